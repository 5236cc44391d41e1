"""K and V of one tile of 16 keys: loads, and the MFMA operands made of them, in both layouts."""

import flydsl.expr as fx

from . import gfx942_ops as ops
from .decode_shape import NOWHERE, TILE_KEYS


class Tiles:
    """Reads the cache for one wave of decode.Work, whose request, KV head and lane it takes from there."""

    def __init__(self, work, k_base, v_base, table, table_stride):
        self.c, self.shape = work.c, work.shape
        self.k_base, self.v_base, self.table, self.table_stride = k_base, v_base, table, table_stride
        self.request, self.head, self.quarter, self.column = work.request, work.head, work.quarter, work.column
        self.kv_len, self.end, self.oldest = work.kv_len, work.end, work.oldest

    def load(self, tile):
        """k_loads Vectors of K and v_loads of V. Rows of a tile that do not exist give 0, or V's are masked later."""
        c = self.c
        page = ops.scalar_load(self.table, self.request * self.table_stride + tile * TILE_KEYS // c.page_size)
        first = tile * TILE_KEYS % c.page_size
        keys = ops.larger(ops.smaller(self.kv_len - tile * TILE_KEYS, fx.Int32(TILE_KEYS)), fx.Int32(0))
        keys = (tile < self.end).select(keys, fx.Int32(0))
        if c.layout == "nhd":
            return self.load_rows(tile, page, first, keys)
        return self.load_vectorized(tile, page, first, keys)

    def if_visible(self, key, offset):
        """The offset, or one past the end for a key in front of every row's window: its slot may be another's now."""
        if self.oldest is None:
            return offset
        return (key >= self.oldest).select(offset, fx.Int32(NOWHERE))

    def load_rows(self, tile, page, first, keys):
        """nhd: K in `k_loads` pieces of this lane's key row, V as four key rows of 8 columns."""
        c, s = self.c, self.shape

        def rows_at(base, row_bytes, head_bytes):
            start = base + fx.Int64(page) * fx.Int64(c.page_size * row_bytes) + fx.Int64(self.head * head_bytes)
            end = (keys > 0).select((first + keys) * row_bytes - self.head * head_bytes, fx.Int32(0))
            return ops.resource(start, end)

        k_rows = rows_at(self.k_base, s.k_row, c.qk_dim * s.element)
        v_rows = rows_at(self.v_base, s.v_row, c.v_dim * s.element)
        # The place in the page is part of the lane's offset, which so changes in the loop: otherwise the compiler keeps
        # one offset per load in a register of its own.
        k_lane = (first + self.column) * s.k_row + self.quarter * 16
        v_lane = (first + self.quarter * 4) * s.v_row + self.column * (8 * s.element)
        k_lane = self.if_visible(tile * TILE_KEYS + self.column, k_lane)
        k = [ops.load(k_rows, k_lane + i * 64, 4) for i in range(s.k_loads)]
        v = []
        for t in range(4):
            offset = self.if_visible(tile * TILE_KEYS + self.quarter * 4 + t, v_lane + t * s.v_row)
            v.append(ops.load(v_rows, offset, 2 * s.element))
        return k + v

    def load_vectorized(self, tile, page, first, keys):
        """vectorized_5d: a 16-byte piece of K is a chunk of one key, a piece of V neighbouring keys of one column."""
        c, s = self.c, self.shape

        def head_of_page(base, dim):
            size = c.page_size * dim * s.element
            start = base + (fx.Int64(page) * fx.Int64(c.kv_heads) + fx.Int64(self.head)) * fx.Int64(size)
            return ops.resource(start, (keys > 0).select(fx.Int32(size), fx.Int32(0)))

        k_part, v_part = head_of_page(self.k_base, c.qk_dim), head_of_page(self.v_base, c.v_dim)
        k_lane = (self.quarter * c.page_size + first + self.column) * 16
        v_lane = (first + self.quarter * 4) // s.chunk * (c.v_dim * 16) + self.column * (8 * 16)
        v_lane = v_lane + (first + self.quarter * 4) % s.chunk * s.element
        k_lane = self.if_visible(tile * TILE_KEYS + self.column, k_lane)
        k = [ops.load(k_part, k_lane + i * (4 * c.page_size * 16), 4) for i in range(s.k_loads)]
        return k + [ops.load(v_part, v_lane + j * 16, s.element) for j in range(s.v_loads)]

    def k_fragments(self, loaded):
        """Operand A per step of 16 dims."""
        if self.shape.element == 2:
            return [ops.pair(w[2 * i], w[2 * i + 1]) for w in loaded for i in range(2)]
        return [ops.pair(*ops.fp8_to_bf16(w[i])) for w in loaded for i in range(4)]

    def v_fragments(self, tile, loaded):
        """Operand A per output tile j: column 8 * lane16 + j of four keys. Keys that do not exist are 0."""
        s = self.shape
        if self.c.layout == "vectorized_5d":
            keys = self.kv_len - tile * TILE_KEYS - self.quarter * 4
            mask = ops.first_bytes(keys * s.element, s.element)
            if self.oldest is not None:
                gone = ops.first_bytes((self.oldest - tile * TILE_KEYS - self.quarter * 4) * s.element, s.element)
                mask = [m & ~g for m, g in zip(mask, gone, strict=True)]
            if s.element == 2:
                return [ops.pair(w[0] & mask[0], w[1] & mask[1]) for w in loaded]
            return [ops.pair(*ops.fp8_to_bf16(w[0] & mask[0])) for w in loaded]
        if s.element == 2:
            found = []
            for j in range(s.columns):
                halves, w = (ops.high_halves if j % 2 else ops.low_halves), j // 2
                found.append(ops.pair(halves(loaded[1][w], loaded[0][w]), halves(loaded[3][w], loaded[2][w])))
            return found
        wide = [[x.bitcast(fx.Int32) for w in range(2) for x in ops.fp8_to_f32(row[w])] for row in loaded]
        return [ops.pair(ops.high_halves(b, a), ops.high_halves(d, c)) for a, b, c, d in zip(*wide, strict=True)]
