"""The end of decode.py: the four waves agree on a reference and a sum per row, add up through LDS, and write."""

import flydsl.expr as fx
from flydsl.expr import gpu

from . import gfx942_ops as ops
from .contract import TILE_ROWS
from .decode_shape import HALF, HALF_ROW_BYTES, LANES, LOG2E, NOWHERE, WAVES


class End:
    """Combines the waves of one decode.Work."""

    def __init__(self, work, out, partial_out, partial_lse, sinks, v_scale):
        self.c, self.shape = work.c, work.shape
        self.out, self.partial_out, self.partial_lse, self.sinks, self.v_scale = (
            out,
            partial_out,
            partial_lse,
            sinks,
            v_scale,
        )
        self.work = work

    def agree(self, softmax):
        """Per tile the factor that this wave's sums get; writes the LSE of a partition."""
        c, s = self.c, self.shape
        lane = ops.lane_id()  # the loop has no register left to keep these in
        self.thread = self.work.wave * LANES + lane
        self.quarter, self.column = lane // 16, lane % 16
        for m in range(s.tiles):
            for distance in (16, 32):
                softmax.total[m] = softmax.total[m] + softmax.total[m].shuffle_xor(distance, LANES)
        gpu.barrier()
        slot = (self.work.wave * s.tiles * TILE_ROWS + self.column) * 4
        for m in range(s.tiles):
            self.work.lds_store(slot + m * 64, ops.words(softmax.reference[m]))
            self.work.lds_store(slot + m * 64 + s.exchange, ops.words(softmax.total[m]))
        gpu.barrier()
        factors = []
        for m in range(s.tiles):
            row = self.work.first_row + m * TILE_ROWS + self.column
            slots = [(w * s.tiles * TILE_ROWS + self.column) * 4 + m * 64 for w in range(WAVES)]
            references = [ops.float_at(self.work.lds_load(at, 1)) for at in slots]
            totals = [ops.float_at(self.work.lds_load(at + s.exchange, 1)) for at in slots]
            terms = list(zip(totals, references, strict=True))
            if c.sinks and not c.split:
                logits = ops.resource(self.sinks, fx.Int32(c.sinks_bytes))
                logit = ops.load_number(logits, self.work.head * c.group + row % c.group, c.sinks_dtype)
                terms.append((fx.Float32(1.0), logit * fx.Float32(LOG2E)))
            top = terms[0][1]
            for _, reference in terms[1:]:
                top = ops.maximum(top, reference)
            whole = fx.Float32(0.0)
            for total, reference in terms:
                whole = whole + total * ops.exp2(reference - top)
            some = whole > fx.Float32(0.0)
            inverse = ops.reciprocal(some.select(whole, fx.Float32(1.0))) * self.v_scale
            factors.append(some.select(ops.exp2(softmax.reference[m] - top) * inverse, fx.Float32(0.0)))
            if c.split:
                lse = some.select(top + ops.log2(whole), fx.Float32(float("-inf")))
                mine = (self.work.wave == 0) & (self.quarter == 0)
                to = mine.select(row * 4, fx.Int32(NOWHERE))
                ops.store(self.partial_rows(self.partial_lse, 4), to, ops.words(lse))
        return factors

    def partial_rows(self, base, row_bytes):
        """The resource of this work-group's rows in a partial tensor."""
        c = self.c
        index = (self.work.request * c.kv_heads + self.work.head) * self.work.partitions + self.work.part
        return ops.resource(base + fx.Int64(index) * fx.Int64(c.rows * row_bytes), fx.Int32(c.rows * row_bytes))

    def add_up(self, sums, factors) -> None:
        """Sum over the waves through LDS, half the columns of one row tile at a time, and write."""
        s = self.shape
        row_in_tile, dim_in_half = self.thread // 16, self.thread % 16 * 4
        for m in range(s.tiles):
            values = [sums[m * s.columns + j] * factors[m] for j in range(s.columns)]
            for half in range(2):
                gpu.barrier()
                ops.only_if(self.quarter // 2 == half, lambda values=values: self.put(values))
                gpu.barrier()
                parts = [
                    ops.floats(self.work.lds_load((w * TILE_ROWS + row_in_tile) * HALF_ROW_BYTES + dim_in_half * 4, 4))
                    for w in range(WAVES)
                ]
                added = (parts[0] + parts[1]) + (parts[2] + parts[3])
                self.write(self.work.first_row + m * TILE_ROWS + row_in_tile, half * HALF + dim_in_half, added)

    def put(self, values) -> None:
        """This lane's 32 neighbouring columns, 8 * (4 * quarter + r) + j, of its row."""
        at = (self.work.wave * TILE_ROWS + self.column) * HALF_ROW_BYTES + self.quarter % 2 * 128
        for r in range(4):
            for j in range(0, self.shape.columns, 4):
                piece = ops.vector_words([values[j + i][r] for i in range(4)])
                self.work.lds_store(at + (8 * r + j) * 4, piece)

    def write(self, row, dim, values) -> None:
        """Four columns of one row: to `out`, or to this partition's part of `partial_out`."""
        c = self.c
        exists = row < c.rows
        if c.split:
            exists = exists & (self.work.steps > 0)
            to = exists.select((row * c.v_dim + dim) * 4, fx.Int32(NOWHERE))
            ops.store(self.partial_rows(self.partial_out, c.v_dim * 4), to, ops.as_words(values))
            return
        size = c.q_rows * c.q_heads * c.v_dim * 2
        rows = ops.resource(self.out + fx.Int64(self.work.request) * fx.Int64(size), fx.Int32(size))
        to = ((row // c.group * c.q_heads + self.work.head * c.group + row % c.group) * c.v_dim + dim) * 2
        ops.store(rows, exists.select(to, fx.Int32(NOWHERE)), ops.bf16_words(values))
