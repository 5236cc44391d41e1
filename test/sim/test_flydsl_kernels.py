"""FlyDSL kernels, compiled for gfx942 by FlyDSL and launched by its own host code, against torch."""

import pytest
import torch

import fly_kernels as fly
from gfx942sim import hip_runtime
from gfx942sim.errors import OutOfRange, SimulationError, Uninitialised
from gfx942sim.races import LdsRaces

ORDERS = [("lockstep", 0), ("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]
INNER = 96


def test_vector_add_across_work_groups():
    a, b, out = torch.randn(1024), torch.randn(1024), torch.zeros(1024)
    run = fly.compiled(fly.vector_add(), *[((1024,), torch.float32)] * 3, 4)
    device = hip_runtime.run(run, a, b, out, 4, fly.STREAM)
    assert torch.equal(out, a + b)
    assert [launch.kernel.startswith("vector_add_kernel") for launch in device.launches] == [True]


def test_a_buffer_resource_ends_where_the_tensor_ends():
    """A fifth work-group lies past num_records: its stores are dropped, and nothing is read."""
    a, b, out = torch.randn(1024), torch.randn(1024), torch.zeros(2048)
    run = fly.compiled(fly.vector_add(), *[((1024,), torch.float32)] * 3, 4)
    hip_runtime.run(run, a, b, out[:1024], 5, fly.STREAM)
    assert torch.equal(out[:1024], a + b)
    assert not out[1024:].any()


def test_a_tensor_that_was_not_registered_is_out_of_range():
    a, b, out = torch.randn(1024), torch.randn(1024), torch.zeros(1024)
    run = fly.compiled(fly.vector_add(), *[((1024,), torch.float32)] * 3, 4)
    with pytest.raises(OutOfRange, match="read at 0x"), hip_runtime.simulated_hip(a, out):
        run(a, b, out, 4, fly.STREAM)


def test_nothing_runs_without_a_device():
    a, b, out = torch.randn(1024), torch.randn(1024), torch.zeros(1024)
    run = fly.compiled(fly.vector_add(), *[((1024,), torch.float32)] * 3, 4)
    try:
        run(a, b, out, 4, fly.STREAM)
    except Exception as error:  # FlyDSL reports a failed launch in ways of its own, or not at all
        assert "NoDevice" in str(error) or "hip" in str(error).lower()
    assert not out.any()


@pytest.mark.parametrize("order, seed", ORDERS)
def test_copy_through_lds(order, seed):
    source, out = torch.randn(1024), torch.zeros(1024)
    run = fly.compiled(fly.reverse_through_lds(), *[((1024,), torch.float32)] * 2)
    hip_runtime.run(run, source, out, fly.STREAM, order=order, seed=seed, uninitialised="lds")
    assert torch.equal(out.view(256, 4), source.view(256, 4).flip(0))


@pytest.mark.parametrize("order, seed", ORDERS)
def test_a_missing_barrier_is_found_in_every_order(order, seed):
    source, out = torch.randn(1024), torch.zeros(1024)
    run = fly.compiled(fly.reverse_through_lds(barrier=False), *[((1024,), torch.float32)] * 2)
    with pytest.raises(LdsRaces) as caught:
        hip_runtime.run(run, source, out, fly.STREAM, order=order, seed=seed)
    race = caught.value.races[0]
    assert race.kind in ("RAW", "WAR")
    assert {race.first_address, race.second_address} != {race.first_address}
    assert "ds_read" in str(caught.value) and "ds_write" in str(caught.value)


def test_a_missing_barrier_gives_wrong_results_in_some_order():
    """Why the order can be chosen: in step the race is invisible."""
    right = {}
    for order in ("lockstep", "forward"):
        source, out = torch.randn(1024), torch.zeros(1024)
        run = fly.compiled(fly.reverse_through_lds(barrier=False), *[((1024,), torch.float32)] * 2)
        hip_runtime.run(run, source, out, fly.STREAM, order=order, races="off")
        right[order] = torch.equal(out.view(256, 4), source.view(256, 4).flip(0))
    assert right == {"lockstep": True, "forward": False}


def test_lds_that_nobody_wrote_is_found():
    source, out = torch.randn(1024), torch.zeros(1024)
    run = fly.compiled(fly.reverse_through_lds(written=255), *[((1024,), torch.float32)] * 2)
    with pytest.raises(Uninitialised, match="LDS"):
        hip_runtime.run(run, source, out, fly.STREAM, uninitialised="lds")


def _gemm(fp8: bool, last_barrier: bool = True, **options):
    dtype = torch.float8_e4m3fnuz if fp8 else torch.bfloat16
    torch.manual_seed(0)
    a, b = torch.randn(128, INNER).to(dtype), torch.randn(64, INNER).to(dtype)
    c = torch.zeros(128, 64)
    run = fly.compiled(
        fly.gemm(fp8, INNER, last_barrier),
        ((128, INNER), dtype),
        ((64, INNER), dtype),
        ((128, 64), torch.float32),
        2,
    )
    device = hip_runtime.run(run, a, b, c, 2, fly.STREAM, **options)
    return c, a.double() @ b.double().T, device.launches[0]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_gemm_is_right_and_the_same_bits_in_every_order(fp8):
    results = [_gemm(fp8, order=order, seed=seed)[0] for order, seed in ORDERS]
    _, reference, launch = _gemm(fp8, cost=True, uninitialised="lds")
    assert (results[0].double() - reference).abs().max() < 1e-4
    assert all(torch.equal(results[0], other) for other in results[1:])
    waves = 2 * 4
    # Per wave: 3 steps of 32, four column tiles; bf16 multiplies 16 deep, fp8 32 deep.
    assert launch.cost.count("mfma") == waves * 3 * 4 * (1 if fp8 else 2)


def test_gemm_without_the_second_barrier_races():
    with pytest.raises(LdsRaces) as caught:
        _gemm(False, last_barrier=False)
    assert any(race.kind == "WAR" for race in caught.value.races)


def test_a_second_device_is_refused():
    with hip_runtime.simulated_hip(), pytest.raises(SimulationError, match="active already"):
        with hip_runtime.simulated_hip():
            pass
