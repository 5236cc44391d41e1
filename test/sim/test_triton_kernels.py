"""Triton kernels, compiled for gfx942 and launched by Triton's own host code, against torch."""

import pytest
import torch

import triton_kernels as kernels
from gfx942sim.errors import OutOfRange
from gfx942sim.triton_target import simulated_triton

ORDERS = [("lockstep", 0), ("forward", 0), ("reverse", 0), ("random", 3)]


def test_add_with_a_ragged_end():
    x, y, out = torch.randn(1000), torch.randn(1000), torch.zeros(1000)
    with simulated_triton(uninitialised="lds") as device:
        kernels.add[(4,)](x, y, out, 1000, block=256)
    assert torch.equal(out, x + y)
    assert device.launches[0].instructions > 0


def test_a_read_one_row_past_the_end_names_the_tensor():
    x, out = torch.randn(4, 128), torch.zeros(4, 128)
    with simulated_triton(), pytest.raises(OutOfRange) as caught:
        kernels.read_one_row_past[(4,)](x, out, 4, width=128)
    text = str(caught.value)
    assert "read at 0x" in text and "lane 0" in text
    assert "0 bytes past the end of argument 0 float32[4, 128]" in text
    assert "read_one_row_past" in text and "load" in text


def test_a_slice_ends_where_it_ends_although_its_storage_goes_on():
    whole, out = torch.randn(5, 128), torch.zeros(4, 128)
    with simulated_triton(), pytest.raises(OutOfRange):
        kernels.read_one_row_past[(4,)](whole[:4], out, 4, width=128)


@pytest.mark.parametrize("warps, tile", [(4, 16), (1, 32)])
def test_softmax_and_dot(warps, tile):
    torch.manual_seed(0)
    x, weights = torch.randn(64, 128).bfloat16(), torch.randn(128, 64).bfloat16()
    outs = []
    for order, seed in ORDERS:
        out = torch.zeros(64, 64)
        with simulated_triton(order=order, seed=seed):
            kernels.softmax_times[(2,)](
                x, weights, out, 100, 128, rows=32, padded=128, width=64, num_warps=warps, matrix_instr_nonkdim=tile
            )
        outs.append(out)
    expected = x[:, :100].double().softmax(1) @ weights[:100].double()
    assert (outs[0].double() - expected).abs().max() < 5e-3  # the probabilities are rounded to bf16
    assert all(torch.equal(outs[0], other) for other in outs[1:])


@pytest.mark.parametrize("warps, columns", [(4, 128), (1, 256)], ids=["fits", "spills"])
def test_matmul_with_agprs(warps, columns):
    torch.manual_seed(0)
    a, b, c = torch.randn(256, 64).bfloat16(), torch.randn(64, columns).bfloat16(), torch.zeros(256, columns)
    with simulated_triton(cost=True) as device:
        kernel = kernels.matmul[(2,)](a, b, c, 64, rows=128, columns=columns, depth=32, num_warps=warps)
    assert (c.double() - a.double() @ b.double()).abs().max() < 1e-4
    resources = kernel.module.resources("matmul")
    cost = device.launches[0].cost
    if warps == 1:
        assert resources.agpr > 0 and resources.scratch > 0, resources
        assert cost.count("scratch") > 0
    else:
        assert cost.count("scratch") == 0
    assert cost.count("mfma") > 0


def test_integer_arithmetic():
    torch.manual_seed(0)
    x = torch.randint(-(2**31), 2**31 - 1, (512,), dtype=torch.int32)
    y = torch.randint(1, 2**20, (512,), dtype=torch.int32)
    out = torch.zeros(512, dtype=torch.int64)
    with simulated_triton():
        kernels.integers[(2,)](x, y, out, block=256)
    wide = x.long() * y.long()
    divisor = y.long() * 3 + 7
    expected = torch.div(wide, divisor, rounding_mode="trunc") + torch.fmod(x, y + 1) + (x >> 3)
    difference = (x - y).abs()  # wraps in 32 bits, as in the kernel
    assert torch.equal(out, expected + difference + (x ^ y))


def test_atomics():
    torch.manual_seed(0)
    x = torch.randint(0, 16, (1000,), dtype=torch.int32)
    counts, total = torch.zeros(16, dtype=torch.int32), torch.zeros(1)
    with simulated_triton():
        kernels.histogram[(4,)](x, counts, total, 1000, block=256)
    assert torch.equal(counts, torch.bincount(x, minlength=16).int())
    assert total.item() == x.sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_scan_and_sort(dtype):
    torch.manual_seed(0)
    x = torch.randint(-50, 50, (256,)).to(dtype)
    sums, ordered = torch.zeros_like(x), torch.zeros_like(x)
    with simulated_triton():
        kernels.scan_and_sort[(1,)](x, sums, ordered, block=256)
    assert torch.equal(sums, x.cumsum(0).to(dtype))
    assert torch.equal(ordered, x.sort().values)


def test_the_driver_before_is_back_afterwards():
    from triton.runtime import driver

    with simulated_triton():
        assert driver.active.get_current_target().arch == "gfx942"
    with pytest.raises(RuntimeError):
        driver.active.get_current_target()
