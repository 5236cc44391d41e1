"""Launch checks: arguments, grid, block, LDS, orders and limits."""

import numpy as np
import pytest
import torch

import triton_kernels as kernels
from gfx942sim import BufferRegistry, launch, pack_arguments
from gfx942sim.errors import BadLaunch, NoProgress, OutOfRange
from gfx942sim.triton_target import simulated_triton


@pytest.fixture(scope="module")
def add():
    x = torch.zeros(256)
    with simulated_triton():
        return kernels.add[(1,)](x, x, x.clone(), 256, block=256).module


def vectors(n=1000):
    rng = np.random.default_rng(0)
    return rng.standard_normal(n, np.float32), rng.standard_normal(n, np.float32), np.zeros(n, np.float32)


def test_numpy_arrays(add):
    x, y, out = vectors()
    result = launch(add, "add", (4,), (256,), (x, y, out, 1000, None, None))
    assert np.array_equal(out, x + y)
    assert result.kernel == "add" and result.instructions > 0 and result.races == []


def test_some_work_groups_only(add):
    x, y, out = vectors(1024)
    launch(add, "add", (4,), (256,), (x, y, out, 1024, None, None), workgroups=[(2, 0, 0)])
    assert np.array_equal(out[512:768], (x + y)[512:768])
    assert not out[:512].any() and not out[768:].any()


def test_batches_of_work_groups_do_not_change_anything(add):
    x, y, out = vectors(4096)
    launch(add, "add", (16,), (256,), (x, y, out, 4096, None, None), batch_waves=5)
    assert np.array_equal(out, x + y)


def test_a_registry_of_ones_own(add):
    x, y, out = vectors()
    registry = BufferRegistry()
    for value in (x, y, out):
        registry.add(value)
    pointers = [v.ctypes.data for v in (x, y, out)]
    launch(add, "add", (4,), (256,), (*pointers, 1000, None, None), buffers=registry)
    assert np.array_equal(out, x + y)
    with pytest.raises(OutOfRange):
        launch(add, "add", (4,), (256,), (*pointers, 1000, None, None))
    registry.remove_range(out.ctypes.data)
    with pytest.raises(OutOfRange, match="write"):
        launch(add, "add", (4,), (256,), (*pointers, 1000, None, None), buffers=registry)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(block=(2048,)), "2048 work-items"),
        (dict(block=(0,)), "at least 1"),
        (dict(grid=(1, 1, 1, 1)), "one to three"),
        (dict(dynamic_lds=70_000), "65536"),
        (dict(order="sideways"), "allowed: lockstep"),
        (dict(races="maybe"), "allowed: raise"),
        (dict(args=()), "takes 6 arguments, got 0"),
        (dict(args=(0, 0, 0, 2**40, None, None)), "does not fit"),
        (dict(args=(0, 0, 0, "n", None, None)), "str"),
        (dict(args=(0, 0, 0, np.int64(3), None, None)), "takes 4 bytes, got 8"),
    ],
)
def test_bad_launches_are_refused(add, change, message):
    x, y, out = vectors()
    call = dict(grid=(4,), block=(256,), args=(x, y, out, 1000, None, None)) | change
    with pytest.raises(BadLaunch, match=message):
        launch(add, "add", **call)
    assert not out.any()


def test_tensors_elsewhere_are_refused():
    with pytest.raises(BadLaunch, match="CPU"):
        BufferRegistry().add(torch.zeros(1, device="meta"))


def test_the_instruction_limit(add):
    x, y, out = vectors()
    with pytest.raises(NoProgress, match="max_instructions"):
        launch(add, "add", (4,), (256,), (x, y, out, 1000, None, None), max_instructions=5)


def test_argument_bytes(add):
    x = np.zeros(4, np.float32)
    packed = pack_arguments(add, "add", (x, None, b"12345678", -1, None, None), (1, 1, 1), (256, 1, 1))
    assert packed[:8] == x.ctypes.data.to_bytes(8, "little")
    assert packed[8:16] == bytes(8) and packed[16:24] == b"12345678" and packed[24:28] == b"\xff" * 4


def test_overlapping_views_are_each_enough():
    registry = BufferRegistry()
    whole = np.zeros(64, np.float32)
    registry.add(whole[:40])
    registry.add(whole[32:])
    address = np.full((1, 64), whole.ctypes.data + 4 * 50)
    registry.check(address, np.ones((1, 64), bool), 4, "read")
    across = np.full((1, 64), whole.ctypes.data + 4 * 39)
    with pytest.raises(OutOfRange, match="crosses its end|past the end"):
        registry.check(np.full((1, 64), whole.ctypes.data + 4 * 63), np.ones((1, 64), bool), 8, "read")
    registry.check(across, np.ones((1, 64), bool), 8, "read")
