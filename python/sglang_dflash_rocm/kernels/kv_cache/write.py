"""KV cache write and gather in Triton: K and V of different widths, both layouts, bf16 and fp8 e4m3fnuz."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .layout import FP8, FP8_MAX, LAYOUTS, shapes


@triton.jit
def _k_offset(slot, head, dim, heads, qk_dim: tl.constexpr, page_size: tl.constexpr, x: tl.constexpr):
    """Element of K in its cache; x = 0 means rows per slot. 64 bits: pools pass 4 GiB."""
    if x == 0:
        return (slot * heads + head) * qk_dim + dim
    else:
        page, offset = slot // page_size, slot % page_size
        return (((page * heads + head) * (qk_dim // x) + dim // x) * page_size + offset) * x + dim % x


@triton.jit
def _v_offset(slot, head, dim, heads, v_dim: tl.constexpr, page_size: tl.constexpr, x: tl.constexpr):
    if x == 0:
        return (slot * heads + head) * v_dim + dim
    else:
        page, offset = slot // page_size, slot % page_size
        return (((page * heads + head) * (page_size // x) + offset // x) * v_dim + dim) * x + offset % x


@triton.jit
def _quantize(value, inverse_scale, limit: tl.constexpr, fp8: tl.constexpr):
    if fp8:
        scaled = value.to(tl.float32) * inverse_scale
        return tl.minimum(tl.maximum(scaled, -limit), limit).to(tl.float8e4b8)
    else:
        return value


@triton.jit
def _store_kv(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_stride,
    v_stride,
    heads,
    k_inverse,
    v_inverse,
    qk_dim: tl.constexpr,
    v_dim: tl.constexpr,
    padded: tl.constexpr,
    page_size: tl.constexpr,
    x: tl.constexpr,
    fp8: tl.constexpr,
    limit: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    dim = tl.arange(0, padded)
    k_row = tl.load(k + token * k_stride + head * qk_dim + dim, mask=dim < qk_dim, other=0.0)
    v_row = tl.load(v + token * v_stride + head * v_dim + dim, mask=dim < v_dim, other=0.0)
    k_to = k_cache + _k_offset(slot, head, dim, heads, qk_dim, page_size, x)
    v_to = v_cache + _v_offset(slot, head, dim, heads, v_dim, page_size, x)
    tl.store(k_to, _quantize(k_row, k_inverse, limit, fp8), mask=dim < qk_dim)
    tl.store(v_to, _quantize(v_row, v_inverse, limit, fp8), mask=dim < v_dim)


@triton.jit
def _gather_kv(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    heads,
    qk_dim: tl.constexpr,
    v_dim: tl.constexpr,
    padded: tl.constexpr,
    page_size: tl.constexpr,
    x: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    dim = tl.arange(0, padded)
    k_row = tl.load(k_cache + _k_offset(slot, head, dim, heads, qk_dim, page_size, x), mask=dim < qk_dim)
    v_row = tl.load(v_cache + _v_offset(slot, head, dim, heads, v_dim, page_size, x), mask=dim < v_dim)
    tl.store(k + (token * heads + head) * qk_dim + dim, k_row, mask=dim < qk_dim)
    tl.store(v + (token * heads + head) * v_dim + dim, v_row, mask=dim < v_dim)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    layout: str,
    page_size: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write one token's K and V per slot; negative slots are skipped. One launch.

    Args:
        k, v: [tokens, H, D] and [tokens, H, Dv] bf16; heads and dims contiguous, tokens at any stride.
        k_cache, v_cache: in `layout`, bf16 or fp8 e4m3fnuz, see layout.shapes.
        slots: [tokens] int32 or int64.
        k_scale, v_scale: what a stored fp8 number is multiplied with to get the value; values beyond 240 scales
            saturate.

    Raises:
        ValueError: an argument that does not fit: its name, what it is and what was wanted.
    """
    tokens, heads, qk_dim = k.shape
    v_dim = v.shape[2]
    if tokens == 0:
        return
    _check(k, v, k_cache, v_cache, slots, layout, page_size)
    fp8 = k_cache.dtype == FP8
    _store_kv[(tokens, heads)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k.stride(0),
        v.stride(0),
        heads,
        1.0 / k_scale,
        1.0 / v_scale,
        qk_dim=qk_dim,
        v_dim=v_dim,
        padded=triton.next_power_of_2(max(qk_dim, v_dim)),
        page_size=page_size,
        x=0 if layout == "nhd" else k_cache.shape[-1],
        fp8=fp8,
        limit=FP8_MAX,
        num_warps=1,
    )


def gather_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str,
    page_size: int,
) -> None:
    """Copy slots of a cache to rows: k [tokens, H, D] and v [tokens, H, Dv] of the cache's dtype. One launch.

    Raises:
        ValueError: an argument that does not fit: its name, what it is and what was wanted.
    """
    tokens, heads, qk_dim = k.shape
    if tokens == 0:
        return
    _check(k, v, k_cache, v_cache, slots, layout, page_size, dtype=k_cache.dtype)
    # Bytes move as bytes: not every GPU that runs this has the fp8 type.
    fp8 = k_cache.dtype == FP8
    tensors = [t.view(torch.uint8) if fp8 else t for t in (k, v, k_cache, v_cache)]
    _gather_kv[(tokens, heads)](
        *tensors,
        slots,
        heads,
        qk_dim=qk_dim,
        v_dim=v.shape[2],
        padded=triton.next_power_of_2(max(qk_dim, v.shape[2])),
        page_size=page_size,
        x=0 if layout == "nhd" else k_cache.shape[-1],
        num_warps=1,
    )


def _check(k, v, k_cache, v_cache, slots, layout, page_size, dtype=torch.bfloat16) -> None:
    tokens, heads, qk_dim = k.shape
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r}, wanted one of {', '.join(LAYOUTS)}")
    if v.shape[:2] != (tokens, heads):
        raise ValueError(f"v: shape {tuple(v.shape)}, wanted ({tokens}, {heads}, any)")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != dtype:
            raise ValueError(f"{name}: {tensor.dtype}, wanted {dtype}")
        if tensor.stride(2) != 1 or (heads > 1 and tensor.stride(1) != tensor.shape[2]):
            raise ValueError(f"{name}: strides {tensor.stride()}, wanted (any, {tensor.shape[2]}, 1)")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (torch.bfloat16, FP8):
        raise ValueError(f"k_cache {k_cache.dtype}, v_cache {v_cache.dtype}: wanted both bfloat16 or both {FP8}")
    slots_held = k_cache.shape[0] * (1 if layout == "nhd" else page_size)
    wanted = shapes(layout, slots_held, heads, qk_dim, v.shape[2], page_size, k_cache.dtype)
    for name, tensor, shape in (("k_cache", k_cache, wanted[0]), ("v_cache", v_cache, wanted[1])):
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, wanted {shape}, contiguous")
    if slots.shape != (tokens,) or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots: {slots.dtype} {tuple(slots.shape)}, wanted int32 or int64 ({tokens},)")
