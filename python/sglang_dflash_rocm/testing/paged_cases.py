"""One paged-attention call with its reference: random pages, everything that must not be read poisoned with NaN."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_dflash_rocm.kernels.kv_cache.layout import FP8, as_bytes, shapes
from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract
from sglang_dflash_rocm.kernels.paged_attention.launch import PagedAttention, Scratch, kv_dtype, sinks_dtype
from sglang_dflash_rocm.kernels.paged_attention.reference import first_visible_key, paged_attention

from .gfx942 import DEVICE, flydsl_launches

# Relative to the sum of |weight * value| of a row: weights and the result are rounded to bf16 (8 bits) each.
ROUNDING = 2.0**-7
FP8_NAN_BYTE = 0x80


def poison(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN."""
    if dtype == FP8:
        return torch.full(shape, FP8_NAN_BYTE, dtype=torch.uint8).view(FP8)
    return torch.full(shape, float("nan"), dtype=torch.float32).to(dtype)


def sparse_pool(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A pool of any size of which only what is touched takes memory. It is 0 where it was never written."""
    size = int(np.prod(shape)) * dtype.itemsize
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | no_reserve)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


@dataclass
class PagedCase:
    """Inputs of one launch in `partitions`. `lens` are keys in front of the block; each request has `q_rows` more.

    Keys and values are N(0, 1) times `k_size`; pages are drawn without order from `pages` (default: a few more than are
    needed). Unused slots and pages, keys in front of the window and padding are NaN; unused page-table entries are a
    page that does not exist.
    """

    contract: PagedAttentionContract
    lens: Sequence[int]
    seed: int = 0
    k_size: float = 1.0
    pages: int | None = None
    sparse: bool = False
    table_width: int | None = None
    partitions: int = 1

    def __post_init__(self) -> None:
        c = self.contract
        torch.manual_seed(self.seed)
        self.requests = len(self.lens)
        self.scale = c.qk_dim**-0.5
        counts = [-(-(n + c.q_rows) // c.page_size) for n in self.lens]
        pages = self.pages or sum(counts) + 3
        dtype = kv_dtype(c)
        k_shape, v_shape = shapes("nhd", pages * c.page_size, c.kv_heads, c.qk_dim, c.v_dim, c.page_size, dtype)
        make = sparse_pool if self.sparse else poison
        self.k, self.v = make(k_shape, dtype), make(v_shape, dtype)
        order = torch.randperm(pages)
        if self.sparse:  # the far end of the pool is what is to be tested
            order = order.sort(descending=True).values
        width = self.table_width or max([*counts, 1]) + 1
        self.page_table = torch.full((self.requests, width), 2**30, dtype=torch.int32)
        self.slots = []
        for i, (n, count) in enumerate(zip(self.lens, counts, strict=True)):
            mine, order = order[:count], order[count:]
            self.page_table[i, :count] = mine.int()
            slots = (mine[:, None] * c.page_size + torch.arange(c.page_size)).flatten()[: n + c.q_rows]
            self.slots.append(slots)
            for pool, dim in ((self.k, c.qk_dim), (self.v, c.v_dim)):
                rows = torch.randn(len(slots), c.kv_heads, dim) * (self.k_size if pool is self.k else 1.0)
                as_bytes(pool)[slots] = as_bytes(rows.clamp(-240, 240).to(dtype))
                # Keys in front of every row's window may have been evicted, and their slots given to others.
                gone = slots[: first_visible_key(len(slots), c.q_rows, c.window)]
                as_bytes(pool)[gone] = as_bytes(poison((len(gone), c.kv_heads, dim), dtype))
        self.q = torch.randn(self.requests * c.q_rows, c.q_heads, c.qk_dim).bfloat16()
        self.sinks = torch.randn(c.q_heads).to(sinks_dtype(c)) if c.sinks else None
        self.seq_lens = torch.tensor(list(self.lens), dtype=torch.int32)

    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in the contract's layout."""
        c = self.contract
        if c.layout == "nhd":
            return self.k, self.v
        x = 16 // self.k.element_size()
        pages = self.k.shape[0] // c.page_size
        k = as_bytes(self.k).view(pages, c.page_size, c.kv_heads, c.qk_dim // x, x).permute(0, 2, 3, 1, 4)
        v = as_bytes(self.v).view(pages, c.page_size // x, x, c.kv_heads, c.v_dim).permute(0, 3, 1, 4, 2)
        return k.contiguous().view(self.k.dtype), v.contiguous().view(self.v.dtype)

    def run(self, contract: PagedAttentionContract | None = None, extra: int | None = None, **options):
        """(out, launches) of the kernel; out starts as NaN. `contract` and `extra` replace the case's own (faults)."""
        c = contract or self.contract
        k, v = (pool.to(DEVICE) for pool in self.pools())
        out = poison((self.requests * c.q_rows, c.q_heads, c.v_dim), torch.bfloat16).to(DEVICE)
        scratch = Scratch.for_launches([(c, self.requests, self.partitions)], DEVICE)
        scratch.out.fill_(float("nan"))
        scratch.lse.fill_(float("nan"))
        sinks = None if self.sinks is None else self.sinks.to(DEVICE)
        op = PagedAttention(c, DEVICE)
        # Older FlyDSL launches while it compiles, on tensors that no test registered.
        op.warm_up(self.partitions)
        q, table, lens = (t.to(DEVICE) for t in (self.q, self.page_table, self.seq_lens))
        touched = dict(out=out, q=q, k_cache=k, v_cache=v, page_table=table, seq_lens=lens, sinks=sinks)
        touched |= dict(no_sinks=op.no_sinks, partial_out=scratch.out, partial_lse=scratch.lse)
        with flydsl_launches({name: t for name, t in touched.items() if t is not None}, **options) as device:
            op(
                out,
                q,
                k,
                v,
                table,
                lens,
                scale=self.scale,
                scratch=scratch,
                partitions=self.partitions,
                extra=extra,
                sinks=sinks,
            )
        return out.cpu(), device.launches if device is not None else []

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(expected, largest error that rounding explains), float64."""
        c = self.contract
        k, v = self.k, self.v
        rows = torch.cat(self.slots)
        # Only the slots in use, in float64: the pool may be huge.
        k, v = (as_bytes(p)[rows].view(p.dtype).double() for p in (k, v))
        starts = np.cumsum([0, *[len(s) for s in self.slots]])
        slots = [torch.arange(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]
        sinks = None if self.sinks is None else self.sinks.double()
        mode = dict(scale=self.scale, window_keys=c.window, causal=c.causal, sinks=sinks)
        q_lens = [c.q_rows] * self.requests
        expected, _ = paged_attention(self.q.double(), k, v, slots, q_lens, **mode)
        size, _ = paged_attention(self.q.double(), k, v.abs(), slots, q_lens, **mode)
        return expected, size * ROUNDING + 1e-6

    def check(self, **options) -> list:
        """Run and compare. Returns the launches, for their costs.

        Raises:
            AssertionError: a row is wrong or not finite.
        """
        out, launches = self.run(**options)
        expected, bound = self.reference()
        wrong = ~((out.double() - expected).abs() <= bound)
        assert not wrong.any(), (
            f"{self.contract}, lens {list(self.lens)}: {int(wrong.sum())} of {wrong.numel()} values differ, first at "
            f"{tuple(wrong.nonzero()[0].tolist())}: {out[wrong][0]} instead of {expected[wrong][0]:.4f}"
        )
        return launches
