"""K and V of one tile of 16 keys: loads, and the MFMA operands made of them, in both layouts."""

from dataclasses import dataclass

import flydsl.expr as fx

from . import gfx942_ops as ops
from .decode_shape import NOWHERE, TILE_KEYS


@dataclass(frozen=True)
class Place:
    """A tile of 16 keys: its number, page, first slot in the page, and how many of its keys exist. Wave-uniform."""

    tile: object
    page: object
    first: object
    keys: object


class Tiles:
    """Reads the cache for one wave of decode.Work, whose request, KV head and lane it takes from there."""

    def __init__(self, work, k_base, v_base, table, table_stride):
        self.c, self.shape = work.c, work.shape
        self.k_base, self.v_base, self.table, self.table_stride = k_base, v_base, table, table_stride
        self.request, self.head, self.quarter, self.column = work.request, work.head, work.quarter, work.column
        self.kv_len, self.end, self.oldest = work.kv_len, work.end, work.oldest

    def find(self, tile):
        """Where a tile lies: its page and its first slot there; and how many of its keys exist."""
        c = self.c
        page = ops.scalar_load(self.table, self.request * self.table_stride + tile * TILE_KEYS // c.page_size)
        keys = ops.larger(ops.smaller(self.kv_len - tile * TILE_KEYS, fx.Int32(TILE_KEYS)), fx.Int32(0))
        return Place(tile, page, tile * TILE_KEYS % c.page_size, (tile < self.end).select(keys, fx.Int32(0)))

    def load_k(self, place):
        """k_loads Vectors of 4 dwords: pieces of key `column` of the tile; 0 where it does not exist."""
        c, s = self.c, self.shape
        if c.layout == "nhd":
            rows = self.rows_at(place, self.k_base, s.k_row, c.qk_dim * s.element)
            lane, step = (place.first + self.column) * s.k_row + self.quarter * 16, 64
        else:
            rows = self.head_of_page(place, self.k_base, c.qk_dim)
            lane = (self.quarter * c.page_size + place.first + self.column) * 16
            step = 4 * c.page_size * 16
        lane = self.if_visible(place.tile * TILE_KEYS + self.column, lane)
        return [ops.load(rows, lane + i * step, 4) for i in range(s.k_loads)]

    def load_v(self, place):
        """v_loads Vectors: nhd, 8 columns of 4 keys, 0 where they do not exist; vectorized, 4 keys of 8 columns."""
        c, s = self.c, self.shape
        quad = place.first + self.quarter * 4
        if c.layout == "vectorized_5d":
            rows = self.head_of_page(place, self.v_base, c.v_dim)
            lane = quad // s.chunk * (c.v_dim * 16) + quad % s.chunk * s.element + self.column * (8 * 16)
            return [ops.load(rows, lane + j * 16, s.element) for j in range(s.v_loads)]
        rows = self.rows_at(place, self.v_base, s.v_row, c.v_dim * s.element)
        lane, key = quad * s.v_row + self.column * (8 * s.element), place.tile * TILE_KEYS + self.quarter * 4
        return [ops.load(rows, self.if_visible(key + t, lane + t * s.v_row), 2 * s.element) for t in range(s.v_loads)]

    def rows_at(self, place, base, row_bytes, head_bytes):
        """nhd: this head's rows of a page, as far as keys exist.

        The place in the page is not in the base but in the lane's offset, which so changes in the loop: otherwise the
        compiler keeps one offset per load in a register of its own.
        """
        start = base + fx.Int64(place.page) * fx.Int64(self.c.page_size * row_bytes) + fx.Int64(self.head * head_bytes)
        end = (place.first + place.keys) * row_bytes - self.head * head_bytes
        return ops.resource(start, (place.keys > 0).select(end, fx.Int32(0)))

    def head_of_page(self, place, base, dim):
        """vectorized_5d: one head of a page."""
        size = self.c.page_size * dim * self.shape.element
        start = base + (fx.Int64(place.page) * fx.Int64(self.c.kv_heads) + fx.Int64(self.head)) * fx.Int64(size)
        return ops.resource(start, (place.keys > 0).select(fx.Int32(size), fx.Int32(0)))

    def if_visible(self, key, offset):
        """The offset, or one past the end for a key in front of every row's window: its slot may be another's now."""
        if self.oldest is None:
            return offset
        return (key >= self.oldest).select(offset, fx.Int32(NOWHERE))

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
