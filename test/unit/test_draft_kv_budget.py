"""Bytes per GPU: by hand, against SGLang's own pools, buffers and sizing on the CPU, and what must always hold."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from flash_shapes import DRAFT, FLASH, deployment, upstream_sizing
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash_rocm.srt.mem_cache import draft_kv_budget as budget
from sglang_dflash_rocm.srt.model_executor import pool_configurator
from sglang_dflash_rocm.testing.tiny_config import tiny_config


def sizes(**changes) -> dict[str, int]:
    """Bytes by part, for pools of 10000 and 8000 tokens."""
    return {part.name: part.predicted for part in budget.parts(FLASH, DRAFT, deployment(**changes), 10_000, 8_000)}


# ---- by hand ------------------------------------------------------------------------------------------------------


def test_bytes_per_token_by_hand():
    cost = budget.token_cost(FLASH, DRAFT, deployment())
    assert cost["draft KV"] == 5 * 2 * 128 * 2 * 2 == 5120
    assert cost["target KV, full layers"] == 9 * 1 * (192 + 128) * 2 == 5760
    assert cost["target KV, SWA layers"] == 0.8 * 39 * 2 * (192 + 128) * 2 == pytest.approx(39936)
    fp8 = budget.token_cost(FLASH, DRAFT, deployment(kv_itemsize=1, draft_kv_itemsize=1))
    assert {name: 2 * size for name, size in fp8.items()} == cost
    assert budget.KVLayers(5, 4, 128, 128).bytes_per_token(8, 2) == 5 * 1 * 256 * 2, "a rank keeps one head at least"


def test_fixed_parts_by_hand():
    found = sizes()
    assert found["full embedding copy"] == 152576 * 4096 * 2 == 1_249_902_592
    assert found["request table"] == 25 * (262144 + 4 + 8) * 4
    assert found["draft request table"] == 0
    assert found["slot index"] == 10_001 * 8 + 8 + 10_000 * 8 + 8_000 * 8
    assert found["target KV, full layers"] == 10_001 * 5760
    assert found["draft KV"] == 10_001 * 5120


def test_what_changes_the_fixed_parts():
    assert sizes(attn_dp=1)["full embedding copy"] == 0
    assert sizes(attn_tp=1)["full embedding copy"] == 0, "one rank has the whole table"
    windowed = sizes(draft_window=1024)
    assert windowed["draft request table"] == windowed["request table"]
    assert windowed["draft KV"] == sizes()["draft KV"], "the window does not shorten the draft's pool"
    # Verify reserves two blocks and rounds up to a page.
    assert sizes(page_size=64)["request table"] == 25 * (262144 + 2 * 8 + 63) * 4


def test_the_shapes_are_read_from_config_json():
    tiny = tiny_config("fused")
    target, draft = budget.target_shape(tiny.target_json()), budget.draft_shape(tiny.draft_json())
    assert target.full == budget.KVLayers(2, 2, 48, 32) and target.swa == budget.KVLayers(2, 4, 48, 32)
    assert (target.window, target.fused_tp, target.context_length) == (8, 2, 2048)
    assert draft == budget.DraftShape(budget.KVLayers(2, 4, 32, 32), 8, 8, 16)
    assert budget.target_shape({"text_config": tiny.target_json()}).full == target.full
    assert budget.target_shape(tiny_config().target_json()).fused_tp is None


@pytest.mark.parametrize(
    ("read", "key", "value"),
    [
        (budget.target_shape, "hybrid_layer_pattern", None),
        (budget.target_shape, "hybrid_layer_pattern", [1, 1]),
        (budget.target_shape, "hybrid_layer_pattern", [0, 2]),
        (budget.target_shape, "num_key_value_heads", None),
        (budget.target_shape, "vocab_size", None),
        (budget.draft_shape, "num_hidden_layers", None),
    ],
)
def test_a_missing_key_is_named(read, key, value):
    config = tiny_config().target_json() if read is budget.target_shape else tiny_config().draft_json()
    with pytest.raises(budget.BudgetError, match=key):
        read({**config, key: value})


def test_a_draft_without_block_size_is_refused():
    config = {**tiny_config().draft_json(), "block_size": None, "dflash_config": {}}
    with pytest.raises(budget.BudgetError, match="block_size"):
        budget.draft_shape(config)


# ---- SGLang's own classes, on the CPU -----------------------------------------------------------------------------


def _pool(layers: budget.KVLayers, tokens: int, page: int, dtype: torch.dtype):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    heads = max(1, layers.kv_heads // 4)
    shape = {"head_num": heads, "head_dim": layers.k_dim, "v_head_dim": layers.v_dim, "layer_num": layers.layers}
    return MHATokenToKVPool(tokens, page_size=page, dtype=dtype, device="cpu", enable_memory_saver=False, **shape)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_real_pools_take_what_is_predicted(page, dtype):
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    how = deployment(page_size=page, kv_itemsize=dtype.itemsize, draft_kv_itemsize=dtype.itemsize, context_length=4096)
    full, swa = budget.whole_pages(1000, FLASH, how)
    target = SWAKVPool(
        size=full,
        size_swa=swa,
        page_size=page,
        dtype=dtype,
        head_num=1,
        head_dim=192,
        v_head_dim=128,
        swa_head_num=2,
        swa_head_dim=192,
        swa_v_head_dim=128,
        swa_attention_layer_ids=list(range(9, 48)),
        full_attention_layer_ids=list(range(9)),
        device="cpu",
    )
    allocator = SWATokenToKVPoolAllocator(full, swa, page, dtype, "cpu", target, need_sort=False)
    draft = _pool(DRAFT.kv, full, page, dtype)
    extra = max(4 + 8, 2 * 8 + page - 1 if page > 1 else 0)
    requests = ReqToTokenPool(24, 4096 + extra, "cpu", False)
    real = {
        "target KV, full layers": sum(target.full_kv_pool.get_kv_size_bytes()),
        "target KV, SWA layers": sum(target.swa_kv_pool.get_kv_size_bytes()),
        "draft KV": sum(draft.get_kv_size_bytes()),
        "request table": requests.req_to_token.nbytes,
        "slot index": allocator.full_to_swa_index_mapping.nbytes
        + allocator.full_attn_allocator.free_pages.nbytes
        + allocator.swa_attn_allocator.free_pages.nbytes,
    }
    predicted = {part.name: part.predicted for part in budget.parts(FLASH, DRAFT, how, full, swa)}
    assert {name: predicted[name] for name in real} == real
    assert pool_configurator._pool_bytes(draft) == real["draft KV"]


@settings(max_examples=40, deadline=None)
@given(
    gib=st.floats(1, 150),
    page=st.sampled_from([1, 16, 64]),
    ratio=st.floats(0.05, 1.0),
    itemsize=st.sampled_from([1, 2]),
)
def test_tokens_that_fit_are_sglangs(gib, page, ratio, itemsize):
    how = deployment(page_size=page, swa_ratio=ratio, kv_itemsize=itemsize, draft_kv_itemsize=itemsize)
    config = upstream_sizing(how).calculate_pool_sizes(int(gib * budget.GIB), page)
    assert budget.tokens_that_fit(int(gib * budget.GIB), FLASH, DRAFT, how) == (
        config.full_max_total_num_tokens,
        config.swa_max_total_num_tokens,
    )


@pytest.mark.parametrize("requests", [1, 24, 33])
def test_the_workers_buffers_take_what_is_predicted(requests):
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    worker = object.__new__(DFlashWorkerV2)
    worker.__dict__.update(device="cpu", block_size=8, _draft_block_ids_buf=None, _accept_bonus_buffer_cap=0)
    worker._ensure_draft_block_buffers(requests)
    worker._ensure_accept_bonus_buffers(requests)
    block, accept = _bytes(worker, "_draft_", skip="_cpu_"), _bytes(worker, "")
    assert block == budget.block_buffer_bytes(requests, 8)
    assert accept - _bytes(worker, "_draft_") == budget.accept_buffer_bytes(requests, 8)
    lengths = DFlashDraftInputV2.create_idle_input("cpu")
    lengths._ensure_prepare_length_buffers(requests, "cpu")
    most = budget.worker_scratch_bytes(requests, 8, 4, 2)
    scratch = block + budget.accept_buffer_bytes(requests, 8) + _bytes(lengths, "_prepare_", skip="cpu")
    assert scratch + budget.greedy_head_bytes(requests * 7, 4, 2) + 64 <= most


@settings(max_examples=25, deadline=None)
@given(batches=st.lists(st.integers(1, 64), min_size=1, max_size=12))
def test_no_order_of_batches_takes_more_than_the_bound(batches):
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    worker = object.__new__(DFlashWorkerV2)
    worker.__dict__.update(device="cpu", block_size=8, _draft_block_ids_buf=None, _accept_bonus_buffer_cap=0)
    for batch in batches:
        worker._ensure_draft_block_buffers(batch)
        worker._ensure_accept_bonus_buffers(batch)
    capacity = max(max(batches), 2 * (max(batches) - 1))
    assert worker._draft_block_ids_buf.shape[0] <= capacity and worker._accept_bonus_buffer_cap <= capacity


@pytest.mark.parametrize("attn_tp", [1, 4])
def test_the_graph_head_takes_what_is_predicted(attn_tp):
    from sglang.srt.speculative.dflash_worker_v2 import _DflashDraftSampler

    group = types.SimpleNamespace(world_size=attn_tp)
    weight = torch.zeros(10, 4, dtype=torch.bfloat16)
    head = _DflashDraftSampler(
        weight=weight, block_size=8, num_org=10, org_vocab_start=0, max_bs=24, tp_group=group if attn_tp > 1 else None
    )
    assert _bytes(head, "") - weight.nbytes == budget.graph_head_bytes(24, 8, attn_tp, 2)


def _bytes(holder, prefix: str, skip: str = "\0") -> int:
    named = [(n, v) for n, v in vars(holder).items() if n.startswith(prefix) and skip not in n]
    held = [t for _, value in named for t in (value if isinstance(value, list) else [value])]
    return sum(t.nbytes for t in held if isinstance(t, torch.Tensor))


# ---- what must always hold ----------------------------------------------------------------------------------------

HOW = st.builds(
    deployment,
    attn_tp=st.sampled_from([1, 2, 4]),
    attn_dp=st.sampled_from([1, 2, 4]),
    page_size=st.sampled_from([1, 16, 64, 256]),
    swa_ratio=st.floats(0.01, 1.0),
    requests=st.integers(1, 512),
    context_length=st.integers(512, 1 << 20),
    kv_itemsize=st.sampled_from([1, 2]),
    draft_kv_itemsize=st.sampled_from([1, 2]),
    draft_window=st.sampled_from([None, 1024]),
)


@given(how=HOW, room=st.integers(-(1 << 34), 1 << 38))
def test_pools_are_whole_pages_and_stay_in_the_budget(how, room):
    full, swa = budget.tokens_that_fit(room, FLASH, DRAFT, how)
    assert full >= 0 and full % how.page_size == swa % how.page_size == 0
    assert swa <= full * how.swa_ratio
    pools = {p.name: p.predicted for p in budget.parts(FLASH, DRAFT, how, full, swa) if "KV" in p.name}
    empty = {p.name: p.predicted for p in budget.parts(FLASH, DRAFT, how, 0, 0) if "KV" in p.name}
    # The page for padded rows is not in SGLang's sum.
    assert sum(pools.values()) - sum(empty.values()) <= max(room, 0) * (1 + 1e-12)


@given(how=HOW, room=st.integers(0, 1 << 38), more=st.integers(0, 1 << 34))
def test_more_memory_is_never_fewer_tokens(how, room, more):
    fewer, larger = (budget.tokens_that_fit(size, FLASH, DRAFT, how) for size in (room, room + more))
    assert fewer[0] <= larger[0] and fewer[1] <= larger[1]


@given(how=HOW)
def test_every_part_has_a_place_and_none_is_negative(how):
    found = budget.parts(FLASH, DRAFT, how, 4096, 1024)
    assert {part.name for part in found} | {"weights"} == set(budget.SOURCES) == set(budget.FLAGS)
    assert all(part.predicted >= 0 for part in found)
    more = budget.parts(FLASH, DRAFT, dataclasses.replace(how, requests=how.requests + 1), 4096, 1024)
    assert all(a.predicted <= b.predicted for a, b in zip(found, more, strict=True))


@pytest.mark.parametrize(
    ("size", "text"), [(512, "512 B"), (1024, "1.00 KiB"), (1_249_902_592, "1.16 GiB"), (3 << 42, "12288.00 GiB")]
)
def test_sizes_for_people(size, text):
    assert budget.human(size) == text
