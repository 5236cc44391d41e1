"""Where an element of a paged KV cache lies, in both layouts, in plain torch: the reference of the kernels.

* `nhd`: K [slots, H, D], V [slots, H, Dv]; slot = page * page_size + offset. SGLang's default pools.
* `vectorized_5d`: K [pages, H, D / x, page_size, x], V [pages, H, page_size / x, Dv, x], x = 16 bytes of elements.
  SGLANG_AITER_KV_CACHE_LAYOUT=vectorized_5d.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fnuz
FP8_MAX = 240.0
LAYOUTS = ("nhd", "vectorized_5d")


def vector_width(dtype: torch.dtype) -> int:
    """x of the vectorized layout: elements in 16 bytes."""
    return 16 // dtype.itemsize


def shapes(
    layout: str, slots: int, heads: int, qk_dim: int, v_dim: int, page_size: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V cache.

    Raises:
        ValueError: an unknown layout, or a page size that the slots or the vector width do not fit.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}; allowed: {', '.join(LAYOUTS)}")
    if layout == "nhd":
        return (slots, heads, qk_dim), (slots, heads, v_dim)
    x = vector_width(dtype)
    if page_size % x or slots % page_size or qk_dim % x:
        raise ValueError(
            f"page_size {page_size}, {slots} slots, qk_dim {qk_dim}: wanted multiples of x = {x} and pages"
        )
    pages = slots // page_size
    return (pages, heads, qk_dim // x, page_size, x), (pages, heads, page_size // x, v_dim, x)


def quantize(value: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """To the cache's dtype: unchanged for bf16; times 1 / scale and clamped to +-240 for fp8 e4m3fnuz."""
    if dtype != FP8:
        return value.to(dtype)
    return (value.float() * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def write_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    layout: str,
    page_size: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """What write.store_kv does, one token at a time."""
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        row_k, row_v = quantize(k[token], k_cache.dtype, k_scale), quantize(v[token], v_cache.dtype, v_scale)
        if layout == "nhd":
            k_cache[slot], v_cache[slot] = row_k, row_v
            continue
        page, offset = divmod(slot, page_size)
        x = k_cache.shape[-1]
        k_cache[page, :, :, offset, :] = row_k.view(row_k.shape[0], -1, x)
        v_cache[page, :, offset // x, :, offset % x] = row_v


def gather_reference(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a vectorized cache as [len(slots), H, D] and [len(slots), H, Dv], in the cache's dtype."""
    page, offset = slots // page_size, slots % page_size
    x = k_cache.shape[-1]
    # torch indexes fp8 by its bytes only.
    as_bytes = (lambda t: t.view(torch.uint8)) if k_cache.dtype == FP8 else (lambda t: t)
    k = as_bytes(k_cache)[page, :, :, offset, :].flatten(2)
    v = as_bytes(v_cache)[page, :, offset // x, :, offset % x]
    return k.view(k_cache.dtype), v.view(v_cache.dtype)
