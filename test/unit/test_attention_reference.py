"""The attention reference against a second, slower statement of the same maths, and its edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash_rocm.kernels.paged_attention.reference import first_visible_key, paged_attention
from sglang_dflash_rocm.srt.layers.attention.window import window_keys


def _by_hand(q, k_cache, v_cache, slots, q_lens, scale, window, causal, sinks):
    """One query row, one head, one key at a time, in Python floats."""
    out = torch.zeros(q.shape[0], q.shape[1], v_cache.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[1]
    row = 0
    for keys, q_len in zip(slots, q_lens, strict=True):
        for i in range(q_len):
            position = len(keys) - q_len + i
            for head in range(q.shape[1]):
                total, acc = 0.0, torch.zeros(v_cache.shape[-1], dtype=torch.float64)
                for key, slot in enumerate(keys.tolist()):
                    if (causal and key > position) or (window is not None and key <= position - window):
                        continue
                    score = float(q[row + i, head].double() @ k_cache[slot, head // group].double()) * scale
                    total += math.exp(score)
                    acc += math.exp(score) * v_cache[slot, head // group].double()
                if sinks is not None:
                    total += math.exp(float(sinks[head]))
                out[row + i, head] = acc / total if total else 0.0
        row += q_len
    return out


@settings(max_examples=40, deadline=None)
@given(
    kv_lens=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    q_len=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 2, 5, 50]),
    causal=st.booleans(),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_equals_the_sum_by_hand(kv_lens, q_len, kv_heads, group, window, causal, with_sinks, seed):
    g = torch.Generator().manual_seed(seed)
    q_lens = [min(q_len, n) for n in kv_lens]
    q = torch.randn(sum(q_lens) + 1, kv_heads * group, 6, generator=g)
    k, v = torch.randn(40, kv_heads, 6, generator=g), torch.randn(40, kv_heads, 4, generator=g)
    slots = list(torch.randperm(40, generator=g)[: sum(kv_lens)].split(kv_lens))
    sinks = torch.randn(kv_heads * group, generator=g) if with_sinks else None
    out, _ = paged_attention(q.double(), k, v, slots, q_lens, scale=0.5, window_keys=window, causal=causal, sinks=sinks)
    want = _by_hand(q, k, v, slots, q_lens, 0.5, window, causal, sinks)
    torch.testing.assert_close(out, want, atol=1e-9, rtol=1e-9)
    assert not out[sum(q_lens) :].any(), "padding rows are 0"


def test_what_no_query_sees_is_not_read():
    """NaN in slots before the window, in other pages and in padding rows leaves the output finite and equal."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, generator=g), torch.randn(32, 1, 4, generator=g), torch.randn(32, 1, 3, generator=g)
    slots = [torch.arange(4, 24)]
    clean, lse = paged_attention(q, k, v, slots, [3], scale=1.0, window_keys=5)
    first = first_visible_key(20, 3, 5)
    assert first == 13
    seen = slots[0][first:]
    for cache in (k, v):
        poison = torch.full_like(cache, float("nan"))
        poison[seen] = cache[seen]
        cache.copy_(poison)
    again, lse_again = paged_attention(q, k, v, slots, [3], scale=1.0, window_keys=5)
    assert torch.equal(clean, again) and torch.equal(lse, lse_again)


def test_value_columns_come_back():
    """C34: V filled with its own column number; a kernel that took K's width for V's would shift it."""
    v = torch.arange(128.0).expand(16, 1, 128)
    out, _ = paged_attention(torch.randn(2, 16, 192), torch.randn(16, 1, 192), v, [torch.arange(9)], [2], scale=0.07)
    torch.testing.assert_close(out, torch.arange(128.0).expand(2, 16, 128), atol=1e-4, rtol=1e-5)


def test_a_row_without_keys_is_zero_and_its_lse_is_the_sink():
    q, k, v = torch.randn(2, 2, 4), torch.randn(4, 1, 4), torch.randn(4, 1, 4)
    out, lse = paged_attention(
        q, k, v, [torch.arange(2)], [2], scale=1.0, window_keys=0, sinks=torch.tensor([1.5, -2.0])
    )
    assert not out.any()
    assert torch.equal(lse, torch.tensor([1.5, -2.0]).expand(2, 2))
    out, lse = paged_attention(q, k, v, [torch.arange(2)], [2], scale=1.0, window_keys=0)
    assert not out.any() and torch.isneginf(lse).all()


def test_an_idle_batch_gives_only_padding():
    out, lse = paged_attention(torch.randn(4, 2, 4), torch.randn(4, 1, 4), torch.randn(4, 1, 4), [], [], scale=1.0)
    assert not out.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize(
    ("q_lens", "message"), [([3], "3 query rows but only 2 keys"), ([2, 2, 2], r"q has 4 rows, the requests ask for 6")]
)
def test_impossible_batches_are_refused(q_lens, message):
    q, cache = torch.randn(4, 2, 4), torch.randn(4, 1, 4)
    with pytest.raises(ValueError, match=message):
        paged_attention(q, cache, cache, [torch.arange(2)] * len(q_lens), q_lens, scale=1.0)


def test_one_meaning_of_the_window():
    """MiMo hands on the config's window, everybody else ``window_left``; negative and ``None`` mean full attention."""
    assert window_keys(128, ["MiMoV2ForCausalLM"]) == 128
    assert window_keys(1023, ["DFlashDraftModel"]) == 1024
    assert window_keys(-1, ["MiMoV2ForCausalLM"]) is None
    assert window_keys(None, ["DFlashDraftModel"]) is None
