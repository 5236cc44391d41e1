"""The vectorized KV layout and fp8 caches: writes, gathers and attention."""

import dataclasses
import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.kernels.kv_cache.layout import (
    FP8,
    LAYOUTS,
    as_bytes,
    gather_reference,
    shapes,
    write_reference,
)
from sglang_dflash_rocm.kernels.kv_cache.write import gather_kv, store_kv
from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract
from sglang_dflash_rocm.testing.gfx942 import DEVICE, triton_launches
from sglang_dflash_rocm.testing.paged_cases import PagedCase, poison

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
register_amd_ci(est_time=60, suite="stage-b-test-1-gpu-small-amd")

FULL = PagedAttentionContract(q_heads=16, kv_heads=1, qk_dim=192, v_dim=128, layout="vectorized_5d")
SLIDING = dataclasses.replace(FULL, kv_heads=2, window=128, sinks=True, q_rows=2)
LENS = [0, 14, 15, 16, 63, 64, 200]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_fnuz"])
@pytest.mark.parametrize("contract", [FULL, SLIDING], ids=["full", "sliding"])
def test_attention(contract, kv_dtype):
    PagedCase(dataclasses.replace(contract, kv_dtype=kv_dtype), LENS).check()


@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_fnuz"])
def test_page_sizes(page_size, kv_dtype):
    PagedCase(dataclasses.replace(SLIDING, page_size=page_size, kv_dtype=kv_dtype), [1, 63, 200]).check()


def test_fp8_rows():
    PagedCase(dataclasses.replace(FULL, layout="nhd", kv_dtype="fp8_fnuz", q_rows=2), LENS).check()


def pools(layout, slots, heads, page_size, dtype):
    shape_k, shape_v = shapes(layout, slots, heads, 192, 128, page_size, dtype)
    return poison(shape_k, dtype), poison(shape_v, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_writes_are_bit_exact(layout, dtype, page_size):
    """Rows of a fused projection (strided), slots without order, negative slots skipped, values that saturate."""
    torch.manual_seed(0)
    k, v = pools(layout, 256, 2, page_size, dtype)
    expected = k.clone(), v.clone()
    fused = torch.randn(9, 2 * (192 + 128)).bfloat16() * 200
    new_k, new_v = fused[:, : 2 * 192].view(9, 2, 192), fused[:, 2 * 192 :].view(9, 2, 128)
    new_k[0, 0, :4] = torch.tensor([0.0, -0.0, 1e-4, -1e30])
    slots = torch.tensor([5, -1, 255, 17, 100, 63, 64, 0, -1])
    scales = (0.7, 1.3) if dtype == FP8 else (1.0, 1.0)
    write_reference(new_k, new_v, *expected, slots, layout, page_size, *scales)
    on_device = [t.to(DEVICE) for t in (new_k, new_v, k, v, slots)]
    with triton_launches():
        store_kv(*on_device, layout=layout, page_size=page_size, k_scale=scales[0], v_scale=scales[1])
    for got, want in zip(on_device[2:4], expected, strict=True):
        bits = torch.uint8 if dtype == FP8 else torch.int16
        assert torch.equal(got.cpu().view(bits), want.view(bits))


def test_fp8_is_fnuz():
    """240 is the largest number, 0x80 is NaN and never written, and -0 becomes 0: OCP bytes would be other numbers."""
    k, v = pools("nhd", 64, 1, 64, FP8)
    values = torch.tensor([0.0, -0.0, 1.0, 240.0, -240.0, 448.0, -1e30, 2.0**-11]).bfloat16()
    new = torch.zeros(1, 1, 192, dtype=torch.bfloat16)
    new[0, 0, :8] = values
    k, v, new, slots = (t.to(DEVICE) for t in (k, v, new, torch.tensor([3])))
    with triton_launches():
        store_kv(new, new[:, :, :128].contiguous(), k, v, slots, layout="nhd", page_size=64)
    got = as_bytes(k.cpu())[3, 0, :8].tolist()
    assert got == [0x00, 0x00, 0x40, 0x7F, 0xFF, 0x7F, 0xFF, 0x00]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_gather_gives_back_what_was_written(dtype, layout):
    torch.manual_seed(0)
    k, v = pools(layout, 256, 2, 64, dtype)
    slots = torch.randperm(256)[:20]
    write_reference(torch.randn(20, 2, 192).bfloat16(), torch.randn(20, 2, 128).bfloat16(), k, v, slots, layout, 64)
    rows = [poison((20, 2, dim), dtype).to(DEVICE) for dim in (192, 128)]
    k, v, slots = (t.to(DEVICE) for t in (k, v, slots))
    with triton_launches():
        gather_kv(k, v, slots, *rows, layout=layout, page_size=64)
    for got, want in zip(rows, gather_reference(k, v, slots, 64), strict=True):
        assert torch.equal(as_bytes(got), as_bytes(want))


def test_nothing_to_write_is_no_launch():
    k, v = (t.to(DEVICE) for t in pools("nhd", 64, 2, 64, torch.bfloat16))
    none = torch.empty(0, 2, 192, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    store_kv(none, none[:, :, :128].contiguous(), k, v, slots, layout="nhd", page_size=64)


@pytest.mark.parametrize(
    "name, change",
    [
        ("k", lambda a: a | dict(k=a["k"].float())),
        ("v", lambda a: a | dict(v=a["v"][:2])),
        ("k_cache", lambda a: a | dict(k_cache=a["k_cache"][:, :1])),
        ("slots", lambda a: a | dict(slots=a["slots"].float())),
        ("layout", lambda a: a | dict(layout="5d")),
    ],
)
def test_bad_arguments_are_named(name, change):
    k, v = pools("nhd", 64, 2, 64, torch.bfloat16)
    new = torch.zeros(3, 2, 192, dtype=torch.bfloat16)
    args = dict(k=new, v=new[:, :, :128].contiguous(), k_cache=k, v_cache=v, slots=torch.arange(3))
    args = change(args | dict(layout="nhd", page_size=64))
    with pytest.raises(ValueError, match=f"^{name}"):
        store_kv(**args)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
