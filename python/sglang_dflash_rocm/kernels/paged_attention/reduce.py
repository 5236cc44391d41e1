"""Combines the partitions of decode.py: out = sum_p 2**(lse_p - lse) out_p, with the sink as one more term.

A work-group of 256 threads takes eight rows; 32 lanes take one row, four columns each. Every lane reads the row's LSEs
for itself: there are few, and they are in one cache line.

* partial_out [n, h, partitions, rows, v_dim] float32, partial_lse [n, h, partitions, rows] float32 in base 2
* out [n * r, H, v_dim] bf16; sinks [H] float32 or bf16

An empty partition has LSE -inf; its partial_out was never written and is selected away, not multiplied by 0.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu

from . import gfx942_ops as ops
from .contract import PagedAttentionContract
from .decode_shape import LOG2E, NOTHING, NOWHERE
from .toolchain import identity

THREADS = 256
LANES_PER_ROW = 32
ROWS = THREADS // LANES_PER_ROW
STREAM = fx.Stream(None)


def reduce_rows(name: str, c: PagedAttentionContract, tensors, partitions) -> None:
    """The code of one work-group. Plain Python that emits. `name` is in the closure: see toolchain.identity."""
    del name
    out, partial_out, partial_lse, sinks = (ops.base_of(t) for t in tensors)
    thread = fx.Int32(gpu.thread_id("x"))
    request, head = fx.Int32(gpu.block_id("x")), fx.Int32(gpu.block_id("y"))
    row = fx.Int32(gpu.block_id("z")) * ROWS + thread // LANES_PER_ROW
    dim = thread % LANES_PER_ROW * 4
    exists = row < c.rows
    index = request * c.kv_heads + head
    size = partitions * (c.rows * 4)
    lses = ops.resource(partial_lse + fx.Int64(index) * fx.Int64(size), size)
    parts = ops.resource(partial_out + fx.Int64(index) * fx.Int64(size * c.v_dim), size * c.v_dim)

    def lse_of(p):
        return ops.float_at(ops.load(lses, exists.select((p * c.rows + row) * 4, fx.Int32(NOWHERE)), 1))

    top = fx.Float32(NOTHING)
    if c.sinks:
        logits = ops.resource(sinks, fx.Int32(c.sinks_bytes))
        logit = ops.load_number(logits, head * c.group + row % c.group, c.sinks_dtype) * fx.Float32(LOG2E)
        top = logit
    top = ops.loop(fx.Int32(0), partitions, [top], lambda p, s: [ops.maximum(s[0], lse_of(p))])[0]
    whole = ops.exp2(logit - top) if c.sinks else fx.Float32(0.0)

    def add(p, state):
        total, values = state
        weight = ops.exp2(lse_of(p) - top)
        offset = exists.select(((p * c.rows + row) * c.v_dim + dim) * 4, fx.Int32(NOWHERE))
        part = ops.floats(ops.load(parts, offset, 4))
        zero = fx.Float32(0.0)
        kept = [(weight > zero).select(part[i], zero) * weight for i in range(4)]
        return [total + weight, values + fx.Vector.from_elements(kept, dtype=fx.Float32)]

    state = [whole, fx.Vector.filled(4, 0.0, fx.Float32)]
    whole, values = ops.loop(fx.Int32(0), partitions, state, add)
    some = whole > fx.Float32(0.0)
    factor = some.select(ops.reciprocal(some.select(whole, fx.Float32(1.0))), fx.Float32(0.0))
    bytes_out = c.q_rows * c.q_heads * c.v_dim * 2
    rows_out = ops.resource(out + fx.Int64(request) * fx.Int64(bytes_out), fx.Int32(bytes_out))
    to = ((row // c.group * c.q_heads + head * c.group + row % c.group) * c.v_dim + dim) * 2
    ops.store(rows_out, exists.select(to, fx.Int32(NOWHERE)), ops.bf16_words(values * factor))


def build(contract: PagedAttentionContract):
    """The host launcher (a `flyc.jit` function): out, partial_out, partial_lse, sinks, requests, partitions, stream."""
    c, name = contract, identity(contract)

    @flyc.kernel(known_block_size=(THREADS, 1, 1))
    def paged_attention_reduce_kernel(
        out: fx.Tensor, partial_out: fx.Tensor, partial_lse: fx.Tensor, sinks: fx.Tensor, partitions: fx.Int32
    ):
        reduce_rows(name, c, (out, partial_out, partial_lse, sinks), partitions)

    @flyc.jit
    def paged_attention_reduce(
        out: fx.Tensor,
        partial_out: fx.Tensor,
        partial_lse: fx.Tensor,
        sinks: fx.Tensor,
        requests: fx.Int32,
        partitions: fx.Int32,
        stream: fx.Stream = STREAM,
    ):
        paged_attention_reduce_kernel(out, partial_out, partial_lse, sinks, partitions).launch(
            grid=(requests, c.kv_heads, -(-c.rows // ROWS)), block=(THREADS, 1, 1), stream=stream
        )

    return paged_attention_reduce
