"""What must not be read may hold NaN and infinity: tails of pages, unused pages, padding, scratch, LDS, registers.

PagedCase poisons all of it, so every test of this folder checks it; here are the corners, and faults that must show.
"""

import contextlib
import dataclasses
import sys
from unittest import mock

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.kernels.paged_attention import decode, decode_end, decode_tiles, launch
from sglang_dflash_rocm.kernels.paged_attention import gfx942_ops as ops
from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract, supported
from sglang_dflash_rocm.kernels.paged_attention.launch import BadArgument, PagedAttention, Scratch, UnsupportedContract
from sglang_dflash_rocm.testing.gfx942 import DEVICE, HARDWARE
from sglang_dflash_rocm.testing.paged_cases import PagedCase

register_cpu_ci(est_time=90, suite="base-a-test-cpu")
register_amd_ci(est_time=90, suite="stage-b-test-1-gpu-small-amd")

FULL = PagedAttentionContract(q_heads=16, kv_heads=1, qk_dim=192, v_dim=128)
SLIDING = PagedAttentionContract(q_heads=16, kv_heads=2, qk_dim=192, v_dim=128, q_rows=2, window=128, sinks=True)


def wrong(case: PagedCase, **options) -> bool:
    out, _ = case.run(**options)
    expected, bound = case.reference()
    return not ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_infinities_in_the_tail(value):
    case = PagedCase(FULL, [3, 70])
    used = torch.zeros(len(case.k), dtype=torch.bool)
    used[torch.cat(case.slots)] = True
    case.k[~used] = value
    case.v[~used] = value
    case.check()


def test_nothing_to_see_gives_zero():
    """A block whose rows may look at no key, and sinks alone: 0, not NaN. `extra` says that the block is not there."""
    for contract in (dataclasses.replace(FULL, q_rows=2), SLIDING):
        out, _ = PagedCase(contract, [0]).run(extra=0)
        assert not out.any()


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("rows", [1, 8])
def test_padding_has_a_negative_length_and_gives_zero(rows, partitions):
    """What the backend makes of the rows that pad a graph: no key, whatever their page table says."""
    for contract in (dataclasses.replace(FULL, q_rows=rows), dataclasses.replace(SLIDING, q_rows=rows, sinks=False)):
        case = PagedCase(contract, [40, 0], partitions=partitions)
        whole, _ = case.run()
        case.seq_lens[1] = -16
        out, _ = case.run()
        assert torch.equal(out[:rows], whole[:rows]) and not out[rows:].any()


def test_no_request_is_no_launch():
    case = PagedCase(FULL, [5])
    op = PagedAttention(FULL, DEVICE)
    empty = torch.empty(0, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    lens = torch.empty(0, dtype=torch.int32, device=DEVICE)
    scratch = Scratch.for_launches([(FULL, 1, 1)], DEVICE)
    result = op(empty, empty, case.k, case.v, case.page_table[:0], lens, scale=1.0, scratch=scratch)
    assert result is empty


@contextlib.contextmanager
def fresh_kernels():
    """Kernels built inside are not the cached ones, nor cached, and each is built once, by its launch."""
    plain = dict(_kernel=launch._kernel.__wrapped__, _compiled=launch._compiled.__wrapped__)
    with mock.patch.multiple(launch, **plain), mock.patch.object(PagedAttention, "warm_up"):
        yield


def test_fault_rows_past_the_end_are_loaded():
    """Without the end of the buffer resource, NaN times a weight of zero reaches the sum."""

    def whole_tile(self, tile):
        place = find(self, tile)
        return dataclasses.replace(place, keys=(place.keys > 0).select(16, 0))

    find = decode_tiles.Tiles.find
    with fresh_kernels(), mock.patch.object(decode_tiles.Tiles, "find", whole_tile):
        assert wrong(PagedCase(FULL, [20]))


def test_fault_keys_in_front_of_the_window_are_loaded():
    """An evicted slot may hold another request's keys, or NaN."""
    case = PagedCase(SLIDING, [200])
    with fresh_kernels(), mock.patch.object(decode_tiles.Tiles, "if_visible", lambda self, key, offset: offset):
        assert wrong(case)


def test_fault_the_block_is_not_counted():
    assert wrong(PagedCase(dataclasses.replace(FULL, q_rows=8), [20]), extra=0)


def test_fault_a_branch_per_lane():
    """The reference moves only in the lanes that saw the large score, not in their whole row."""
    case = PagedCase(FULL, [200], k_size=8.0)
    with fresh_kernels(), mock.patch.object(ops, "any_lane", lambda condition: condition):
        assert wrong(case)


@pytest.mark.skipif(HARDWARE, reason="races are found by the simulator")
@pytest.mark.parametrize("module, which", [(decode_end, 0), (decode_end, 1), (decode_end, 3), (decode, 0)])
def test_fault_a_barrier_is_missing(module, which):
    from gfx942sim.races import LdsRaces

    case = PagedCase(dataclasses.replace(FULL, q_rows=4), [200])
    calls = iter(range(100))
    barrier = module.gpu.barrier
    fake = mock.Mock(wraps=module.gpu)
    fake.barrier = lambda: None if next(calls) == which else barrier()
    with fresh_kernels(), mock.patch.object(module, "gpu", fake), pytest.raises(LdsRaces):
        case.run()


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(qk_dim=256), "qk_dim 256; allowed: 128, 192"),
        (dict(v_dim=192), "v_dim 192; allowed: 128"),
        (dict(page_size=48), "page_size 48; allowed: 16, 32, 64, 128"),
        (dict(q_rows=17), "q_rows 17; allowed: 1 to 16"),
        (dict(kv_heads=3), "q_heads 16 is not a multiple of kv_heads 3"),
        (dict(window=0), "window 0; allowed"),
        (dict(kv_dtype="fp8_ocp"), "allowed: bf16, fp8_fnuz"),
        (dict(q_heads=64, q_rows=16), "1024 rows per KV head; allowed: 256"),
    ],
)
def test_contracts_without_a_kernel_are_refused_by_name(change, reason):
    contract = dataclasses.replace(FULL, **change)
    assert reason in supported(contract)
    with pytest.raises(UnsupportedContract, match="gfx942"):
        PagedAttention(contract, DEVICE)


@pytest.mark.parametrize(
    "name, broken",
    [
        ("q", lambda t: t.float()),
        ("q", lambda t: t[:, :8]),
        ("out", lambda t: t[:, :, ::2]),
        ("k_cache", lambda t: t[:-1]),
        ("v_cache", lambda t: t[:, :, :64]),
        ("page_table", lambda t: t.long()),
        ("seq_lens", lambda t: t.long()),
        ("scale", lambda t: 0.0),
        ("sinks", lambda t: torch.zeros(16)),
    ],
)
def test_bad_arguments_never_reach_a_kernel(name, broken):
    case = PagedCase(FULL, [5, 6])
    args = dict(out=torch.empty(2, 16, 128, dtype=torch.bfloat16), q=case.q, k_cache=case.k, v_cache=case.v)
    args |= dict(page_table=case.page_table, seq_lens=case.seq_lens)
    args = {key: value.to(DEVICE) for key, value in args.items()} | dict(scale=case.scale, sinks=None)
    args[name] = broken(args[name])
    with pytest.raises(BadArgument, match=name):
        PagedAttention(FULL, DEVICE)(**args, scratch=Scratch.for_launches([(FULL, 2, 1)], DEVICE))


def test_scratch_that_is_too_small():
    case = PagedCase(FULL, [5, 6])
    scratch = Scratch.for_launches([(FULL, 1, 2)], DEVICE)
    out = torch.empty(2, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    args = [t.to(DEVICE) for t in (case.q, case.k, case.v, case.page_table, case.seq_lens)]
    with pytest.raises(BadArgument, match="scratch holds"):
        PagedAttention(FULL, DEVICE)(out, *args, scale=1.0, scratch=scratch, partitions=2)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
