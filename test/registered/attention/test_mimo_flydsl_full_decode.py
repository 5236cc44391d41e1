"""MiMo's full layers: decode and verify over the whole context, in one pass over the KV cache.

On an MI300X these run the kernels; elsewhere gfx942sim runs their machine code, race-checked.
"""

import dataclasses
import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract
from sglang_dflash_rocm.testing.gfx942 import HARDWARE, ORDERS, bytes_read
from sglang_dflash_rocm.testing.paged_cases import PagedCase

register_cpu_ci(est_time=120, suite="base-a-test-cpu")
register_amd_ci(est_time=120, suite="stage-b-test-1-gpu-small-amd")

FULL = PagedAttentionContract(q_heads=16, kv_heads=1, qk_dim=192, v_dim=128)
EDGES = [0, 1, 15, 16, 62, 63, 64, 65, 126, 127, 128, 129]
# KV bytes of one token in a full layer, bf16.
TOKEN = (192 + 128) * 2


def contract(**changes):
    return dataclasses.replace(FULL, **changes)


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_every_context_edge(rows):
    PagedCase(contract(q_rows=rows), EDGES).check()


@pytest.mark.parametrize("lens", [[1022], [1023, 1024, 1025], [4096]])
def test_long_contexts(lens):
    PagedCase(FULL, lens).check()


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("partitions", [2, 5])
def test_partitions(rows, partitions):
    """Contexts shorter than the number of partitions leave some of them empty."""
    PagedCase(contract(q_rows=rows), [0, 3, 17, 100, 1000], partitions=partitions).check()


def test_sixteen_rows_take_two_work_groups():
    PagedCase(contract(q_rows=16), [0, 5, 130]).check()


@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_page_sizes(page_size):
    PagedCase(contract(page_size=page_size, q_rows=2), [1, 63, 64, 300]).check()


def test_a_batch_of_seventeen():
    PagedCase(FULL, [7 * i % 90 for i in range(17)]).check()


@pytest.mark.parametrize("size", [8.0, 24.0, 32.0, 48.0, 64.0])
def test_large_scores(size):
    """Scores of hundreds: the softmax is one key's."""
    PagedCase(contract(q_rows=8), [5, 200], k_size=size).check()


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_page_tables_of_odd_width(width):
    """Rows of the table are not aligned, and the next row's pages hold huge values."""
    case = PagedCase(FULL, [10, 64 * width - 1], table_width=width)
    assert case.page_table.shape[1] == width
    case.v[case.slots[1]] *= 1000
    case.check()


def test_columns_of_v_stay_in_place():
    """V is narrower than K: every column comes back as itself, and nothing else does."""
    case = PagedCase(contract(q_rows=8), [70])
    case.v[case.slots[0]] = torch.arange(128).bfloat16()
    out, _ = case.run()
    assert torch.equal(out, torch.arange(128).bfloat16().expand_as(out))


def test_identical_scores():
    case = PagedCase(FULL, [40])
    case.k[case.slots[0]] = case.k[case.slots[0]][:1]
    case.check()


def test_scores_far_below_zero():
    """All scores of a row are about -1000 in base 2: nothing may underflow before it is normalised."""
    case = PagedCase(contract(q_rows=2), [100])
    case.q[:] = 10.0
    case.k[case.slots[0]] = -5.0 - torch.rand(102, 1, 192).bfloat16()
    case.check()


def test_pages_above_65535_and_a_pool_above_four_gib():
    pages = 180_000
    case = PagedCase(contract(q_rows=2), [100, 30], pages=pages, sparse=True)
    assert case.k.numel() * 2 > 4 * 2**30 and int(case.page_table[:, 0].min()) > 65_535
    case.check()


@pytest.mark.skipif(HARDWARE, reason="the hardware runs one order of its own")
@pytest.mark.parametrize("rows, partitions", [(1, 1), (8, 2)])
def test_every_order_of_the_waves_gives_the_same_bits(rows, partitions):
    case = PagedCase(contract(q_rows=rows), [3, 200], partitions=partitions)
    outs = [case.run(order=order, seed=seed)[0] for order, seed in ORDERS]
    assert all(torch.equal(outs[0].view(torch.int16), other.view(torch.int16)) for other in outs[1:])


@pytest.mark.skipif(HARDWARE, reason="bytes are counted by the simulator")
@pytest.mark.parametrize("rows", [1, 8])
def test_keys_and_values_are_read_once(rows):
    """KV bytes that the lanes ask for, against the least there is: every key and value of the request once."""
    case = PagedCase(contract(q_rows=rows), [1024 - rows])
    (launch,) = case.check(cost=True)
    assert 1024 * TOKEN <= bytes_read(launch, "k_cache", "v_cache") <= 1.03 * 1024 * TOKEN


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
