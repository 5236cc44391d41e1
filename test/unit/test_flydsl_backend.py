"""Page tables, operations and layer shapes of the FlyDSL backend, without a server."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract
from sglang_dflash_rocm.kernels.paged_attention.launch import UnsupportedContract, partitions_for
from sglang_dflash_rocm.kernels.paged_attention.reference_op import ReferencePagedAttention
from sglang_dflash_rocm.srt.layers.attention.flydsl_pa import Operations, PageTables
from sglang_dflash_rocm.testing.paged_cases import PagedCase

FULL = PagedAttentionContract(q_heads=16, kv_heads=1, qk_dim=192, v_dim=128)


def table(requests=4, context=256, page=64):
    pages = torch.randperm(requests * context // page).view(requests, -1)
    slots = pages[:, :, None] * page + torch.arange(page)
    return pages, slots.view(requests, context).int()


def test_tables_hold_pages_of_both_pools_and_keep_their_address():
    pages, req_to_token = table()
    tables = PageTables(req_to_token, 64, lambda slots: slots + 64 * 100)
    before = tables.full.data_ptr(), tables.sliding.data_ptr(), tables.seq_lens.data_ptr()
    rows = torch.tensor([2, 1])
    tables.fill(rows, torch.tensor([200, 5]))
    assert torch.equal(tables.full[:2], pages[rows].int())
    assert torch.equal(tables.sliding[:2], pages[rows].int() + 100)
    assert tables.seq_lens[:2].tolist() == [200, 5]
    assert before == (tables.full.data_ptr(), tables.sliding.data_ptr(), tables.seq_lens.data_ptr())


def test_padding_has_no_keys():
    """SGLang pads a batch with row 0 of the table, which no request ever gets."""
    _, req_to_token = table()
    tables = PageTables(req_to_token, 64, None)
    tables.fill(torch.tensor([3, 0]), torch.tensor([200, 1]))
    assert tables.seq_lens[0] == 200 and tables.seq_lens[1] + 16 <= 0


def test_slots_behind_the_end_may_be_anything():
    _, req_to_token = table()
    req_to_token[:, 64:] = -1
    tables = PageTables(req_to_token, 64, lambda slots: slots)
    tables.fill(torch.tensor([1]), torch.tensor([10]))
    assert (tables.sliding[0, 1:] >= 0).all()


@pytest.mark.parametrize("page_size", [1, 8, 48])
def test_page_sizes_without_a_kernel_name_the_flag(page_size):
    with pytest.raises(UnsupportedContract, match=f"--page-size {page_size}; allowed: 16, 32, 64, 128"):
        PageTables(torch.zeros(2, 96, dtype=torch.int32), page_size, None)


def test_an_operation_is_made_once_and_scratch_serves_every_batch():
    operations = Operations(torch.device("cpu"), max_requests=48, max_context=8192)
    first, partitions, scratch = operations.get(FULL, 1)
    assert partitions == partitions_for(FULL, 1, 8192) > 1
    again, fewer, same = operations.get(FULL, 48)
    assert first is again and same is scratch and fewer < partitions
    for requests in (1, 7, 48):
        scratch.views(FULL, requests, partitions_for(FULL, requests, 8192))


def test_scratch_that_a_graph_may_know_is_never_given_back():
    operations = Operations(torch.device("cpu"), max_requests=8, max_context=8192)
    _, _, first = operations.get(FULL, 1)
    address = first.out.data_ptr()
    _, _, second = operations.get(PagedAttentionContract(16, 1, 192, 128, q_rows=8), 1)
    assert second.out.numel() > first.out.numel()
    assert any(old.out.data_ptr() == address for old in operations._outgrown)


def test_partitions_fill_the_gpu_and_no_more():
    assert partitions_for(FULL, 48, 8192) == 6  # 288 work-groups on 304 CUs
    assert partitions_for(FULL, 1, 100) == 1
    assert partitions_for(FULL, 1, 131072) == 64
    assert partitions_for(FULL, 500, 8192) == 1
    sliding = PagedAttentionContract(16, 2, 192, 128, window=128, q_rows=8)
    assert partitions_for(sliding, 1, 131072) == 1


@pytest.mark.parametrize("rows, extra", [(1, 0), (8, 8)])
def test_the_reference_operation_is_the_kernels_call(rows, extra):
    """What the CPU platform runs instead of the kernels, on a case of the kernels' own tests."""
    case = PagedCase(PagedAttentionContract(16, 2, 192, 128, q_rows=rows, window=128, sinks=True), [5, 300])
    lens = case.seq_lens + rows - extra
    out = torch.full((2 * rows, 16, 128), float("nan"), dtype=torch.bfloat16)
    operation = ReferencePagedAttention(case.contract, "cpu")
    args = (out, case.q, case.k, case.v, case.page_table, lens)
    operation(*args, scale=case.scale, extra=extra, sinks=case.sinks)
    expected, bound = case.reference()
    assert ((out.double() - expected).abs() <= bound).all()
