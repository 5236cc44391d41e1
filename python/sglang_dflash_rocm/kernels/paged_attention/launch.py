"""The host side of paged attention: checks, compiled kernels by contract, scratch memory, launches.

Nothing here allocates, compiles or waits once `PagedAttention.warm_up` ran, so a launch may be captured in a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ..kv_cache.layout import FP8, shapes
from .contract import PagedAttentionContract, supported
from .toolchain import check_flydsl

LOG2E = 1.4426950408889634
# What fills an MI300X, and the shortest part of a context that is worth a work-group of its own (keys).
COMPUTE_UNITS = 304
SHORTEST_PART = 256
MAX_PARTITIONS = 64


class UnsupportedContract(ValueError):
    """There is no kernel for these shapes. The message names the value and what is allowed."""


class BadArgument(ValueError):
    """An argument that does not fit the contract: name, what it is, what was wanted."""


def partitions_for(contract: PagedAttentionContract, requests: int, max_context: int) -> int:
    """How many parts to split contexts into, from numbers that the host knows when a graph is captured.

    Args:
        requests: batch size of the launch. max_context: most keys that a request can have.
    """
    keys = max_context if contract.window is None else min(max_context, contract.window + contract.q_rows)
    groups = max(1, requests * contract.kv_heads * contract.row_splits)
    wanted = COMPUTE_UNITS // groups
    return max(1, min(wanted, -(-keys // SHORTEST_PART), MAX_PARTITIONS))


@functools.cache
def _kernel(contract: PagedAttentionContract):
    """(attention, reduce or None): `flyc.jit` launchers of one contract."""
    check_flydsl()
    from . import decode, reduce

    return decode.build(contract), reduce.build(contract) if contract.split else None


@functools.cache
def _compiled(contract: PagedAttentionContract, device: torch.device):
    """The same, compiled. On a GPU the compiler launches once: on tensors of its own, with no key to read."""
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    c = contract
    empty = functools.partial(torch.zeros, device=device)
    out = empty(c.q_rows, c.q_heads, c.v_dim, dtype=torch.bfloat16)
    partitions = 2 if c.split else 1
    parts, lse = _scratch_shapes(c, 1, partitions)
    parts, lse = empty(parts, dtype=torch.float32), empty(lse, dtype=torch.float32)
    sinks = empty(c.q_heads, dtype=sinks_dtype(c))
    q = empty(c.q_rows, c.q_heads, c.qk_dim, dtype=torch.bfloat16)
    pools = [empty(shape, dtype=kv_dtype(c)) for shape in _pool_shapes(c, c.page_size)]
    table, lens = empty(1, 1, dtype=torch.int32), empty(1, dtype=torch.int32)
    stream = fx.Stream(None)
    attention, reduce = _kernel(c)
    numbers = (1, partitions, c.q_heads * c.qk_dim, 1, c.q_rows, 1.0, 1.0)
    return (
        flyc.compile(attention, out, parts, lse, q, *pools, table, lens, sinks, *numbers, stream),
        flyc.compile(reduce, out, parts, lse, sinks, 1, partitions, stream) if reduce is not None else None,
    )


def kv_dtype(c: PagedAttentionContract) -> torch.dtype:
    return torch.bfloat16 if c.kv_dtype == "bf16" else FP8


def sinks_dtype(c: PagedAttentionContract) -> torch.dtype:
    return torch.float32 if c.sinks_dtype == "float32" else torch.bfloat16


def _pool_shapes(c: PagedAttentionContract, slots: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return shapes(c.layout, slots, c.kv_heads, c.qk_dim, c.v_dim, c.page_size, kv_dtype(c))


def _scratch_shapes(
    c: PagedAttentionContract, requests: int, partitions: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lead = (requests, c.kv_heads, partitions, c.rows) if partitions > 1 else (1, 1, 1, 1)
    return (*lead, c.v_dim), lead


@dataclass
class Scratch:
    """Memory for partial results, one for all layers: float32, flat. Layers run one after another."""

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def for_launches(cls, launches: Iterable[tuple[PagedAttentionContract, int, int]], device) -> Scratch:
        """Enough for each (contract, requests, partitions)."""
        out = lse = 1
        for launch in launches:
            parts, rows = _scratch_shapes(*launch)
            out, lse = max(out, torch.Size(parts).numel()), max(lse, torch.Size(rows).numel())
        return cls(torch.empty(out, device=device), torch.empty(lse, device=device))

    def views(
        self, contract: PagedAttentionContract, requests: int, partitions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts, lse = _scratch_shapes(contract, requests, partitions)
        sizes = torch.Size(parts).numel(), torch.Size(lse).numel()
        if sizes[0] > self.out.numel() or sizes[1] > self.lse.numel():
            raise BadArgument(
                f"scratch holds {self.out.numel()} values and {self.lse.numel()} LSEs; {requests} requests in "
                f"{partitions} partitions need {sizes[0]} and {sizes[1]}"
            )
        return self.out[: sizes[0]].view(parts), self.lse[: sizes[1]].view(lse)


class PagedAttention:
    """Decode, verify and draft-block attention of one layer shape on one device.

    Args:
        contract: shapes and modes; `split` has no meaning here, each launch says into how many partitions.

    Raises:
        UnsupportedContract: no kernel serves it.
    """

    def __init__(self, contract: PagedAttentionContract, device: torch.device | str):
        reason = supported(contract)
        if reason is not None:
            raise UnsupportedContract(f"paged attention on gfx942: {reason}")
        self.contract, self.device = contract, torch.device(device)
        self.no_sinks = torch.zeros(contract.q_heads, device=self.device)

    def warm_up(self, most_partitions: int) -> None:
        """Compile what launches of up to this many partitions need."""
        for split in (False, True)[: min(most_partitions, 2)]:
            _compiled(replace(self.contract, split=split), self.device)

    def __call__(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        scratch: Scratch,
        partitions: int = 1,
        extra: int | None = None,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """Fill `out` and return it.

        Args:
            out: [requests * q_rows, q_heads, v_dim] bf16, contiguous.
            q: [requests * q_rows, q_heads, qk_dim] bf16; heads contiguous, tokens at any stride.
            k_cache, v_cache: in the contract's layout and KV dtype (kv_cache.layout.shapes), contiguous.
            page_table: [requests, width] int32: page numbers; rows may be a slice of a wider table.
            seq_lens: [requests] int32, keys in the cache in front of the block; a request with none even with
                `extra` may be negative, and gives 0.
            partitions: parts that each context is split into; scratch must have room for them.
            scale: on the scores. k_scale, v_scale: of an fp8 cache.
            extra: keys behind seq_lens that count too; default: the block itself, q_rows.
            sinks: [q_heads] of the contract's dtype, if it has them.

        Raises:
            BadArgument: an argument that does not fit, before anything is launched.
        """
        c = replace(self.contract, split=partitions > 1)
        requests = seq_lens.shape[0]
        if requests == 0:
            return out
        _check(c, requests, self.device, out, q, k_cache, v_cache, page_table, seq_lens, sinks, scale)
        if not 1 <= partitions <= MAX_PARTITIONS:
            raise BadArgument(f"partitions: {partitions}, wanted 1 to {MAX_PARTITIONS}")
        parts, lse = scratch.views(c, requests, partitions)
        sinks = self.no_sinks if sinks is None else sinks
        attention, reduce = _compiled(c, self.device)
        stream = _stream(self.device)
        attention(
            out,
            parts,
            lse,
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            sinks,
            requests,
            partitions,
            q.stride(0),
            page_table.stride(0),
            c.q_rows if extra is None else extra,
            scale * k_scale * LOG2E,
            v_scale,
            stream,
        )
        if reduce is not None:
            reduce(out, parts, lse, sinks, requests, partitions, stream)
        return out


def _stream(device: torch.device):
    import flydsl.expr as fx

    return fx.Stream(torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None)


def _check(c, requests, device, out, q, k_cache, v_cache, page_table, seq_lens, sinks, scale) -> None:
    tokens = requests * c.q_rows
    slots = k_cache.shape[0] * (1 if c.layout == "nhd" else c.page_size)
    if slots % c.page_size:
        raise BadArgument(f"k_cache: {slots} slots, wanted a multiple of page_size {c.page_size}")
    k_shape, v_shape = _pool_shapes(c, slots)
    kv = kv_dtype(c)
    wanted = [
        ("out", out, (tokens, c.q_heads, c.v_dim), torch.bfloat16, True),
        ("q", q, (tokens, c.q_heads, c.qk_dim), torch.bfloat16, False),
        ("k_cache", k_cache, k_shape, kv, True),
        ("v_cache", v_cache, v_shape, kv, True),
        ("page_table", page_table, (requests, None), torch.int32, False),
        ("seq_lens", seq_lens, (requests,), torch.int32, True),
    ]
    if c.sinks:
        if sinks is None:
            raise BadArgument("sinks: got None, wanted a tensor, as the contract has sinks")
        wanted.append(("sinks", sinks, (c.q_heads,), sinks_dtype(c), True))
    elif sinks is not None:
        raise BadArgument("sinks: got a tensor, wanted None, as the contract has none")
    for name, tensor, shape, dtype, contiguous in wanted:
        got = tuple(tensor.shape)
        if len(got) != len(shape) or any(w is not None and w != g for w, g in zip(shape, got, strict=True)):
            raise BadArgument(f"{name}: shape {got}, wanted {tuple('any' if s is None else s for s in shape)}")
        if tensor.dtype != dtype:
            raise BadArgument(f"{name}: {tensor.dtype}, wanted {dtype}")
        if tensor.device.type != device.type:
            raise BadArgument(f"{name}: on {tensor.device}, wanted {device}")
        if contiguous and not tensor.is_contiguous():
            raise BadArgument(f"{name}: strides {tensor.stride()}, wanted contiguous")
        if tensor.data_ptr() % 16 and name != "seq_lens":
            raise BadArgument(f"{name}: address {tensor.data_ptr():#x}, wanted a multiple of 16")
    if q.stride(2) != 1 or q.stride(1) != c.qk_dim or q.stride(0) % 8:
        raise BadArgument(f"q: strides {q.stride()}, wanted (a multiple of 8, {c.qk_dim}, 1)")
    if page_table.stride(1) != 1:
        raise BadArgument(f"page_table: strides {page_table.stride()}, wanted (any, 1)")
    if not scale > 0:
        raise BadArgument(f"scale: {scale}, wanted more than 0")
