"""The one attention reference of this project: plain torch, paged KV, sinks, sliding window, block masks, LSE.

Every mode of the runtime is one case of the same sum. A request has ``kv_len`` keys in the cache and asks for its last
``q_len`` positions: decode is ``q_len = 1``, a verify or a draft block ``q_len = block``, prefill ``q_len = chunk``.

Sinks follow the MiMo-V2 and gpt-oss models: one extra logit per head that takes part in the softmax and has no value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def first_visible_key(kv_len: int, q_len: int, window_keys: int | None) -> int:
    """Position of the oldest key that any of the last ``q_len`` queries sees; keys before it are never read.

    ``window_keys`` counts the keys one query sees, its own included; ``None`` means no window.
    """
    if window_keys is None:
        return 0
    return max(0, kv_len - q_len - window_keys + 1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    first_key: int,
    kv_len: int,
    scale: float,
    window_keys: int | None = None,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request over keys that were already gathered.

    Args:
        q: ``[q_len, q_heads, qk_dim]``, the last ``q_len`` of ``kv_len`` positions.
        k: ``[kv_len - first_key, kv_heads, qk_dim]``; ``q_heads`` is a multiple of ``kv_heads``.
        v: ``[kv_len - first_key, kv_heads, v_dim]``.
        first_key: position of ``k[0]``.
        kv_len: number of keys of the request, block included.
        scale: factor on the scores, usually ``qk_dim ** -0.5``.
        window_keys: keys a query sees, its own included (``kv > q - window``, as transformers' MiMo-V2-Flash masks).
        causal: ``False`` lets every row of the block see the whole block; the window still bounds it from below.
        sinks: ``[q_heads]`` logits, or ``None``.

    Returns:
        ``out [q_len, q_heads, v_dim]`` and ``lse [q_len, q_heads]``, in ``q``'s dtype if that is float64, else float32.
        A row that sees no key is 0 with LSE -inf, or 0 with LSE = sink.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_len, q_heads, _ = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    rows = q.to(dtype).view(q_len, kv_heads, group, -1)
    scores = torch.einsum("qhgd,khd->hgqk", rows, k.to(dtype)) * scale

    q_pos = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
    k_pos = torch.arange(first_key, kv_len, device=q.device)[None, :]
    visible = k_pos <= q_pos if causal else torch.ones_like(k_pos <= q_pos)
    if window_keys is not None:
        visible &= k_pos > q_pos - window_keys
    scores = scores.masked_fill(~visible, float("-inf"))

    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype).view(kv_heads, group, 1))
    # A fully masked row has LSE -inf; -inf - -inf would be NaN, and such a row is 0 by definition.
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    out = torch.einsum("hgqk,khd->qhgd", weights, v.to(dtype))
    return out.reshape(q_len, q_heads, -1), lse.permute(2, 0, 1).reshape(q_len, q_heads)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: Sequence[torch.Tensor],
    q_lens: Sequence[int],
    *,
    scale: float,
    window_keys: int | None = None,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a ragged batch over a paged ``nhd`` KV cache, page table given per token.

    Args:
        q: ``[rows, q_heads, qk_dim]``, the requests' query rows one after another; rows beyond ``sum(q_lens)`` are
            padding and give 0.
        k_cache, v_cache: ``[num_slots, kv_heads, qk_dim]`` and ``[num_slots, kv_heads, v_dim]``.
        slots: per request the cache slot of each of its ``kv_len`` keys, int64. A page of ``n`` tokens is ``n``
            neighbouring slots, so every page size is served by the same list.
        q_lens: query rows per request, ``<= kv_len``.
        scale, window_keys, causal, sinks: see :func:`attend`.

    Returns:
        ``out [rows, q_heads, v_dim]`` and ``lse [rows, q_heads]`` (padding: 0 and -inf), float32 (float64 for float64).

    Raises:
        ValueError: the requests ask for more query rows than there are, or a request for more than it has keys.
    """
    if sum(q_lens) > q.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows, the requests ask for {sum(q_lens)} ({list(q_lens)})")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros((q.shape[0], q.shape[1], v_cache.shape[-1]), dtype=dtype)
    lse = q.new_full((q.shape[0], q.shape[1]), float("-inf"), dtype=dtype)
    row = 0
    for request, (keys, q_len) in enumerate(zip(slots, q_lens, strict=True)):
        kv_len = len(keys)
        if q_len > kv_len:
            raise ValueError(f"request {request} has {q_len} query rows but only {kv_len} keys")
        first = first_visible_key(kv_len, q_len, window_keys)
        seen = keys[first:]
        part = slice(row, row + q_len)
        out[part], lse[part] = attend(
            q[part],
            k_cache[seen],
            v_cache[seen],
            first_key=first,
            kv_len=kv_len,
            scale=scale,
            window_keys=window_keys,
            causal=causal,
            sinks=sinks,
        )
        row += q_len
    return out, lse
