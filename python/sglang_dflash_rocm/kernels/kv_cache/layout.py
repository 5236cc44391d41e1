"""Where an element of a paged KV cache lies, in both layouts, in plain torch: the reference of the kernels.

* `nhd`: K [slots, H, D], V [slots, H, Dv]; slot = page * page_size + offset. SGLang's default pools.
* `vectorized_5d`: K [pages, H, D / x, page_size, x], V [pages, H, page_size / x, Dv, x], x = 16 bytes of elements.
  SGLANG_AITER_KV_CACHE_LAYOUT=vectorized_5d.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as uint8, which torch can index; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


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
    """What write.store_kv does, in torch and for any float type."""
    kept = slots >= 0
    slots = slots[kept].to(torch.int64)
    k_rows, v_rows = (as_bytes(quantize(t[kept], k_cache.dtype, s)) for t, s in ((k, k_scale), (v, v_scale)))
    k_bytes, v_bytes = as_bytes(k_cache), as_bytes(v_cache)
    if layout == "nhd":
        k_bytes[slots], v_bytes[slots] = k_rows, v_rows
        return
    page, offset, x = slots // page_size, slots % page_size, k_cache.shape[-1]
    k_bytes[page, :, :, offset, :] = k_rows.unflatten(2, (-1, x))
    v_bytes[page, :, offset // x, :, offset % x] = v_rows


def gather_reference(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of a cache in either layout as rows [len(slots), H, D] and [len(slots), H, Dv], in the cache's dtype."""
    k, v = as_bytes(k_cache), as_bytes(v_cache)
    if k.ndim == 3:
        k, v = k[slots], v[slots]
    else:
        page, offset, x = slots // page_size, slots % page_size, k.shape[-1]
        k = k[page, :, :, offset, :].flatten(2)
        v = v[page, :, offset // x, :, offset % x]
    return k.view(k_cache.dtype), v.view(v_cache.dtype)


def linear(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: Sequence[torch.Tensor], page_size: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A cache of just these slots, in `nhd` and float32 if it was fp8, and where each request's slots lie in it."""
    every = torch.cat(list(slots)) if slots else torch.zeros(0, dtype=torch.int64)
    k, v = gather_reference(k_cache, v_cache, every, page_size)
    if k.dtype == FP8:
        k, v = k.float(), v.float()
    return k, v, list(torch.arange(len(every)).split([len(request) for request in slots]))
