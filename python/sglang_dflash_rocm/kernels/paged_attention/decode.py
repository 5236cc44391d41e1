"""Paged attention for decode, verify and the draft block on gfx942: every row of a request in one pass over its KV.

One work-group of four waves serves one request, KV head and partition of the context, and up to 128 rows (a request with
more, such as 16 positions of 16 heads, takes two work-groups). Each wave takes every fourth tile
of 16 keys and all rows, so the waves share nothing until the end:

    S^T [16 keys, 16 rows] = K Q^T      v_mfma_f32_16x16x16_bf16, K is operand A, Q is operand B
    P^T = exp2(S^T - m)                 stays where it is: the D layout of S^T is the B layout of P^T
    O^T [128, 16 rows] += V^T P^T       V is operand A; its four keys per lane are packed from four row loads

Softmax is the online one with a lazy reference: m of a row moves only when a score exceeds it by 2**8 in some lane of
the wave (one ballot per tile), so in most tiles no accumulator is rescaled and nothing crosses lanes. See
FlashAttention-4's conditional rescaling, arXiv:2603.05451, section 3.

Tensors (n requests, r = q_rows, H = q_heads, h = kv_heads; see PagedAttentionContract):

* out [n * r, H, v_dim] bf16, written when partitions == 1
* partial_out [n, h, partitions, rows, v_dim] float32 and partial_lse [n, h, partitions, rows] float32 in base 2,
  written when partitions > 1 (reduce.py combines them); an empty partition writes its LSE only
* q [n * r, H, qk_dim] bf16; its rows may be `q_stride` elements apart
* k_cache [slots, h, qk_dim], v_cache [slots, h, v_dim], bf16 or fp8 e4m3fnuz; a page is page_size neighbouring slots;
  or the vectorized layout of kv_cache/layout.py
* page_table [n, table_stride] int32; seq_lens [n] int32, keys in front of the block; a request has seq_lens + extra
* sinks [H] float32, used when partitions == 1 and the contract has sinks
"""

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu

from . import gfx942_ops as ops
from .contract import TILE_ROWS, PagedAttentionContract

WAVES = 4
LANES = 64
THREADS = WAVES * LANES
TILE_KEYS = 16
STEP_TILES = 2 * WAVES  # tiles of keys that the work-group takes per step of its loop
LOG2E = 1.4426950408889634
# Scores in front of any real one, in base 2; finite, so that differences of it are.
NOTHING = -1.0e30
# A row's reference may lag behind its maximum by this power of two before it is moved.
SLACK = 8.0
# Accumulators go through LDS in halves of V's columns: rows of 64 floats, padded against bank conflicts.
HALF = 64
HALF_ROW_BYTES = (HALF + 4) * 4
# Rows of Q in LDS: the padding makes eight neighbouring rows fall on different banks.
Q_PADDING = 16
# Up to this many tiles, Q stays in registers.
TILES_IN_REGISTERS = 2


NOWHERE = 0x7FFFFFF0  # a byte offset past the end of every buffer resource


@dataclass(frozen=True)
class Shape:
    """What follows from a contract, as compile-time numbers.

    element: bytes of a cached element. k_row, v_row: bytes between the rows of two neighbouring slots. k_loads: 16-byte
    loads of K per lane and tile, of `chunk` elements each; v_loads: loads of V. tiles: row tiles of a work-group, which each wave has all of.
    columns: tiles of 16 V columns. q_row: bytes between rows of Q in LDS. exchange: bytes of one float
    per row and wave. lds: bytes in all.
    """

    element: int
    k_row: int
    v_row: int
    k_loads: int
    chunk: int
    v_loads: int
    tiles: int
    columns: int
    q_in_lds: bool
    q_row: int
    exchange: int
    lds: int

    @classmethod
    def of(cls, c: PagedAttentionContract) -> "Shape":
        element = c.kv_bytes
        tiles = -(-c.tiles // c.row_splits)
        q_in_lds = tiles > TILES_IN_REGISTERS
        q_row = c.qk_dim * 2 + Q_PADDING
        exchange = WAVES * tiles * TILE_ROWS * 4
        reduce = WAVES * TILE_ROWS * HALF_ROW_BYTES
        return cls(
            element=element,
            k_row=c.kv_heads * c.qk_dim * element,
            v_row=c.kv_heads * c.v_dim * element,
            k_loads=c.qk_dim * element // 64,
            chunk=16 // element,
            v_loads=4 if c.layout == "nhd" else c.v_dim // 16,
            tiles=tiles,
            columns=c.v_dim // 16,
            q_in_lds=q_in_lds,
            q_row=q_row,
            exchange=exchange,
            lds=max(tiles * TILE_ROWS * q_row if q_in_lds else 0, 2 * exchange, reduce),
        )


@dataclass
class Softmax:
    """Running state of one wave: sums [tiles * columns] of Vector(4), reference and total [tiles] of Float32."""

    sums: list
    reference: list
    total: list

    def flat(self) -> list:
        return [*self.sums, *self.reference, *self.total]

    @classmethod
    def from_flat(cls, values: list, shape: Shape) -> "Softmax":
        a, b = shape.tiles * shape.columns, shape.tiles * shape.columns + shape.tiles
        return cls(list(values[:a]), list(values[a:b]), list(values[b : b + shape.tiles]))

    @classmethod
    def empty(cls, shape: Shape) -> "Softmax":
        zero = fx.Vector.filled(4, 0.0, fx.Float32)
        return cls(
            [zero] * (shape.tiles * shape.columns),
            [fx.Float32(NOTHING)] * shape.tiles,
            [fx.Float32(0.0)] * shape.tiles,
        )


class Work:
    """The code of one work-group. Plain Python that emits; FlyDSL rewrites only the decorated kernel itself."""

    def __init__(self, contract, shape, lds, tensors, requests, q_stride, table_stride, extra, scale, v_scale):
        c = self.c = contract
        self.shape, self.scale, self.v_scale, self.table_stride = shape, scale, v_scale, table_stride
        self.out, self.partial_out, self.partial_lse = (ops.base_of(t) for t in tensors[:3])
        q, self.k_base, self.v_base, table, lengths, self.sinks = (ops.base_of(t) for t in tensors[3:])
        self.lds_load, self.lds_store = ops.lds_view(lds)
        self.thread = fx.Int32(gpu.thread_id("x"))
        self.request = fx.Int32(gpu.block_id("x"))
        block = fx.Int32(gpu.block_id("y"))
        self.head, self.first_row = block // c.row_splits, block % c.row_splits * (shape.tiles * TILE_ROWS)
        self.part = fx.Int32(gpu.block_id("z"))
        self.wave = ops.uniform(self.thread // LANES)
        lane = self.thread % LANES
        self.quarter, self.column = lane // 16, lane % 16
        self.table = ops.resource(table, requests * table_stride * 4)
        self.q_stride = q_stride
        self.q_tokens = ops.resource(
            q + fx.Int64(self.request * c.q_rows) * fx.Int64(q_stride * 2), q_stride * (2 * c.q_rows)
        )

        self.kv_len = ops.scalar_load(ops.resource(lengths, requests * 4), self.request) + extra
        self.q_first = self.kv_len - c.q_rows  # position of the first query row
        first_tile = fx.Int32(0)
        if c.window is not None:
            first_tile = ops.larger(self.q_first - (c.window - 1), fx.Int32(0)) // TILE_KEYS
        end_tile = (self.kv_len + (TILE_KEYS - 1)) // TILE_KEYS
        per_part = (end_tile - first_tile + (c.partitions - 1)) // c.partitions
        self.begin = first_tile + self.part * per_part
        self.end = ops.smaller(self.begin + per_part, end_tile)
        self.steps = (self.end - self.begin + (STEP_TILES - 1)) // STEP_TILES

    def run(self) -> None:
        self.stage_q()
        waiting = self.load_tile(self.begin + self.wave)
        state = ops.loop(fx.Int32(0), self.steps, [*waiting, *Softmax.empty(self.shape).flat()], self.two_tiles)
        softmax = Softmax.from_flat(state[len(waiting) :], self.shape)
        factors = self.agree(softmax)
        self.add_up(softmax.sums, factors)

    # ---- rows: this lane's row of tile m is `column` of it

    def row_of(self, m):
        return self.first_row + m * TILE_ROWS + self.column

    def position_of(self, m):
        """Position in the block of a row; the same for all lanes when a tile holds one position."""
        if self.c.group % TILE_ROWS == 0:
            return (self.first_row + m * TILE_ROWS) // self.c.group
        return self.row_of(m) // self.c.group

    def q_offset(self, row):
        """Bytes from the request's first query row; rows that do not exist lie past the resource's end."""
        c = self.c
        head = self.head * c.group + row % c.group
        return (row < c.rows).select(row // c.group * (self.q_stride * 2) + head * (c.qk_dim * 2), fx.Int32(NOWHERE))

    # ---- Q: its dims are read in the order in which K's loads give them

    def q_pieces(self):
        """Byte offsets in a row of Q of this lane's 16-byte pieces: load i of lane quarter g is chunk 4 i + g."""
        s = self.shape
        return [((self.quarter + 4 * i) * s.chunk + 8 * p) * 2 for i in range(s.k_loads) for p in range(s.chunk // 8)]

    def stage_q(self) -> None:
        """Bring Q to LDS, or, when it is small, to registers."""
        s = self.shape
        if not s.q_in_lds:
            self.q_registers = []
            for m in range(s.tiles):
                base = self.q_offset(self.row_of(m))
                self.q_registers.append([ops.load(self.q_tokens, base + piece, 4) for piece in self.q_pieces()])
            return
        per_row = self.c.qk_dim * 2 // 16
        for start in range(0, s.tiles * TILE_ROWS * per_row, THREADS):
            at = self.thread + start
            row, piece = at // per_row, at % per_row
            words = ops.load(self.q_tokens, self.q_offset(self.first_row + row) + piece * 16, 4)
            self.lds_store(row * s.q_row + piece * 16, words)
        gpu.barrier()

    def q_fragments(self, m):
        """Operand B per step of 16 dims."""
        if self.shape.q_in_lds:
            base = (m * TILE_ROWS + self.column) * self.shape.q_row
            loaded = [self.lds_load(base + piece, 4) for piece in self.q_pieces()]
        else:
            loaded = self.q_registers[m]
        return [ops.pair(w[2 * i], w[2 * i + 1]) for w in loaded for i in range(2)]

    # ---- K and V of one tile

    def load_tile(self, tile):
        """k_loads Vectors of K and v_loads of V. Rows of a tile that do not exist give 0, or V's are masked later."""
        c = self.c
        page = ops.scalar_load(self.table, self.request * self.table_stride + tile * TILE_KEYS // c.page_size)
        first = tile * TILE_KEYS % c.page_size
        keys = ops.larger(ops.smaller(self.kv_len - tile * TILE_KEYS, fx.Int32(TILE_KEYS)), fx.Int32(0))
        keys = (tile < self.end).select(keys, fx.Int32(0))
        if c.layout == "nhd":
            return self.load_rows(page, first, keys)
        return self.load_vectorized(page, first, keys)

    def load_rows(self, page, first, keys):
        """nhd: K in `k_loads` pieces of this lane's key row, V as four key rows of 8 columns."""
        c, s = self.c, self.shape

        def rows_at(base, row_bytes, head_bytes):
            start = base + fx.Int64(page) * fx.Int64(c.page_size * row_bytes)
            start = start + fx.Int64(first * row_bytes + self.head * head_bytes)
            return ops.resource(start, ops.larger(keys * row_bytes - self.head * head_bytes, fx.Int32(0)))

        k_rows = rows_at(self.k_base, s.k_row, c.qk_dim * s.element)
        v_rows = rows_at(self.v_base, s.v_row, c.v_dim * s.element)
        k_lane = self.column * s.k_row + self.quarter * 16
        v_lane = self.quarter * (4 * s.v_row) + self.column * (8 * s.element)
        k = [ops.load(k_rows, k_lane + i * 64, 4) for i in range(s.k_loads)]
        return k + [ops.load(v_rows, v_lane + t * s.v_row, 2 * s.element) for t in range(4)]

    def load_vectorized(self, page, first, keys):
        """vectorized_5d: a 16-byte piece of K is one chunk of one key; a piece of V is neighbouring keys of a column."""
        c, s = self.c, self.shape

        def head_of_page(base, dim):
            size = c.page_size * dim * s.element
            start = base + (fx.Int64(page) * fx.Int64(c.kv_heads) + fx.Int64(self.head)) * fx.Int64(size)
            return ops.resource(start, (keys > 0).select(fx.Int32(size), fx.Int32(0)))

        k_part, v_part = head_of_page(self.k_base, c.qk_dim), head_of_page(self.v_base, c.v_dim)
        k_lane = (self.quarter * c.page_size + first + self.column) * 16
        v_lane = (first + self.quarter * 4) // s.chunk * (c.v_dim * 16) + self.column * (8 * 16)
        v_lane = v_lane + (first + self.quarter * 4) % s.chunk * s.element
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

    # ---- the loop: two tiles per step, so that loads of one are in flight while the other is computed

    def two_tiles(self, step, state):
        s = self.shape
        count = s.k_loads + s.v_loads
        waiting, softmax = state[:count], Softmax.from_flat(state[count:], s)
        tile = self.begin + step * STEP_TILES + self.wave
        other = self.load_tile(tile + WAVES)
        softmax = self.attend(tile, waiting, softmax)
        waiting = self.load_tile(tile + STEP_TILES)
        softmax = self.attend(tile + WAVES, other, softmax)
        return [*waiting, *softmax.flat()]

    def attend(self, tile, loaded, softmax):
        """Scores, weights and weighted sum of one tile of keys."""
        s = self.shape
        k, rows = self.k_fragments(loaded[: s.k_loads]), loaded[s.k_loads :]
        scores = self.scores(tile, k)
        exponents = self.exponents(scores, softmax.reference)
        highest = exponents[0]
        for e in exponents[1:]:
            highest = ops.maximum(highest, e)
        count = len(softmax.flat())
        state = ops.when(
            ops.any_lane(highest > fx.Float32(SLACK)),
            [*softmax.flat(), *exponents],
            lambda state: self.move_references(Softmax.from_flat(state[:count], s), scores),
        )
        softmax, exponents = Softmax.from_flat(state[:count], s), state[count:]
        p = []
        for m in range(s.tiles):
            weights = [ops.exp2(e) for e in exponents[4 * m : 4 * m + 4]]
            softmax.total[m] = softmax.total[m] + ((weights[0] + weights[1]) + (weights[2] + weights[3]))
            p.append(ops.pair(ops.pack_bf16(weights[0], weights[1]), ops.pack_bf16(weights[2], weights[3])))
        for j, v in enumerate(self.v_fragments(tile, rows)):
            for m in range(s.tiles):
                softmax.sums[m * s.columns + j] = ops.mfma_bf16(v, p[m], softmax.sums[m * s.columns + j])
        return softmax

    def scores(self, tile, k):
        """Unscaled scores, [tiles * 4]: keys 4 * quarter + r; -inf where the row may not look."""
        c = self.c
        keys = [tile * TILE_KEYS + self.quarter * 4 + r for r in range(4)]
        found = []
        for m in range(self.shape.tiles):
            if self.shape.q_in_lds:
                # Otherwise the compiler reads all of Q ahead, and spills.
                fx.rocdl.sched_barrier(0)
            score = fx.Vector.filled(4, 0.0, fx.Float32)
            for k_part, q_part in zip(k, self.q_fragments(m), strict=True):
                score = ops.mfma_bf16(k_part, q_part, score)
            position = self.q_first + self.position_of(m)
            limit = ops.smaller(position + 1 if c.causal else self.kv_len, self.end * TILE_KEYS)
            for r in range(4):
                seen = keys[r] < limit
                if c.window is not None:
                    seen = seen & (keys[r] > position - c.window)
                found.append(seen.select(score[r], fx.Float32(float("-inf"))))
        return found

    def exponents(self, scores, reference):
        """Scaled scores minus the row's reference, in base 2."""
        return [ops.fma(score, self.scale, -reference[i // 4]) for i, score in enumerate(scores)]

    def move_references(self, softmax, scores):
        """Raise each row's reference to its highest score so far, and scale what was summed under the old one.

        Exponents are made anew from the scores: next to the first reference, NOTHING, they have no digits left.
        """
        s = self.shape
        for m in range(s.tiles):
            top = scores[4 * m]
            for r in range(1, 4):
                top = ops.maximum(top, scores[4 * m + r])
            for distance in (16, 32):
                top = ops.maximum(top, top.shuffle_xor(distance, LANES))
            before = softmax.reference[m]
            softmax.reference[m] = ops.maximum(before, top * self.scale)
            fade = ops.exp2(before - softmax.reference[m])
            softmax.total[m] = softmax.total[m] * fade
            for j in range(s.columns):
                softmax.sums[m * s.columns + j] = softmax.sums[m * s.columns + j] * fade
        return [*softmax.flat(), *self.exponents(scores, softmax.reference)]

    # ---- the end: the waves agree on a reference and a sum per row, and add up

    def agree(self, softmax):
        """Per tile the factor that this wave's sums get; writes the LSE of a partition."""
        c, s = self.c, self.shape
        for m in range(s.tiles):
            for distance in (16, 32):
                softmax.total[m] = softmax.total[m] + softmax.total[m].shuffle_xor(distance, LANES)
        gpu.barrier()
        slot = (self.wave * s.tiles * TILE_ROWS + self.column) * 4
        for m in range(s.tiles):
            self.lds_store(slot + m * 64, ops.words(softmax.reference[m]))
            self.lds_store(slot + m * 64 + s.exchange, ops.words(softmax.total[m]))
        gpu.barrier()
        factors = []
        for m in range(s.tiles):
            row = self.row_of(m)
            slots = [(w * s.tiles * TILE_ROWS + self.column) * 4 + m * 64 for w in range(WAVES)]
            references = [ops.float_at(self.lds_load(at, 1)) for at in slots]
            totals = [ops.float_at(self.lds_load(at + s.exchange, 1)) for at in slots]
            terms = list(zip(totals, references, strict=True))
            if c.sinks and c.partitions == 1:
                logits = ops.resource(self.sinks, fx.Int32(c.q_heads * 4))
                logit = ops.float_at(ops.load(logits, (self.head * c.group + row % c.group) * 4, 1))
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
            if c.partitions > 1:
                lse = some.select(top + ops.log2(whole), fx.Float32(float("-inf")))
                mine = (self.wave == 0) & (self.quarter == 0)
                to = mine.select(row * 4, fx.Int32(NOWHERE))
                ops.store(self.partial_rows(self.partial_lse, 4), to, ops.words(lse))
        return factors

    def partial_rows(self, base, row_bytes):
        """The resource of this work-group's rows in a partial tensor."""
        c = self.c
        index = (self.request * c.kv_heads + self.head) * c.partitions + self.part
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
                    ops.floats(self.lds_load((w * TILE_ROWS + row_in_tile) * HALF_ROW_BYTES + dim_in_half * 4, 4))
                    for w in range(WAVES)
                ]
                added = (parts[0] + parts[1]) + (parts[2] + parts[3])
                self.write(self.first_row + m * TILE_ROWS + row_in_tile, half * HALF + dim_in_half, added)

    def put(self, values) -> None:
        """This lane's 32 neighbouring columns, 8 * (4 * quarter + r) + j, of its row."""
        at = (self.wave * TILE_ROWS + self.column) * HALF_ROW_BYTES + self.quarter % 2 * 128
        for r in range(4):
            for j in range(0, self.shape.columns, 4):
                piece = ops.vector_words([values[j + i][r] for i in range(4)])
                self.lds_store(at + (8 * r + j) * 4, piece)

    def write(self, row, dim, values) -> None:
        """Four columns of one row: to `out`, or to this partition's part of `partial_out`."""
        c = self.c
        exists = row < c.rows
        if c.partitions > 1:
            exists = exists & (self.steps > 0)
            to = exists.select((row * c.v_dim + dim) * 4, fx.Int32(NOWHERE))
            ops.store(self.partial_rows(self.partial_out, c.v_dim * 4), to, ops.as_words(values))
            return
        size = c.q_rows * c.q_heads * c.v_dim * 2
        rows = ops.resource(self.out + fx.Int64(self.request) * fx.Int64(size), fx.Int32(size))
        to = ((row // c.group * c.q_heads + self.head * c.group + row % c.group) * c.v_dim + dim) * 2
        ops.store(rows, exists.select(to, fx.Int32(NOWHERE)), ops.bf16_words(values))


def build(contract: PagedAttentionContract):
    """The host launcher (a `flyc.jit` function) of one specialisation.

    Its arguments are the tensors above in that order, then requests, q_stride, table_stride, extra (Int32), scale
    (softmax scale times LOG2E times K's scale) and v_scale (Float32), and the stream.
    """
    c, shape = contract, Shape.of(contract)

    @fx.struct
    class Storage:
        buf: fx.Array[fx.Int32, shape.lds // 4, 16]

    @flyc.kernel(known_block_size=(THREADS, 1, 1))
    def paged_attention_kernel(
        out: fx.Tensor,
        partial_out: fx.Tensor,
        partial_lse: fx.Tensor,
        q: fx.Tensor,
        k_cache: fx.Tensor,
        v_cache: fx.Tensor,
        page_table: fx.Tensor,
        seq_lens: fx.Tensor,
        sinks: fx.Tensor,
        requests: fx.Int32,
        q_stride: fx.Int32,
        table_stride: fx.Int32,
        extra: fx.Int32,
        scale: fx.Float32,
        v_scale: fx.Float32,
    ):
        lds = fx.SharedAllocator().allocate(Storage).peek()
        tensors = (out, partial_out, partial_lse, q, k_cache, v_cache, page_table, seq_lens, sinks)
        Work(c, shape, lds, tensors, requests, q_stride, table_stride, extra, scale, v_scale).run()

    @flyc.jit
    def paged_attention(
        out: fx.Tensor,
        partial_out: fx.Tensor,
        partial_lse: fx.Tensor,
        q: fx.Tensor,
        k_cache: fx.Tensor,
        v_cache: fx.Tensor,
        page_table: fx.Tensor,
        seq_lens: fx.Tensor,
        sinks: fx.Tensor,
        requests: fx.Int32,
        q_stride: fx.Int32,
        table_stride: fx.Int32,
        extra: fx.Int32,
        scale: fx.Float32,
        v_scale: fx.Float32,
        stream: fx.Stream = fx.Stream(None),
    ):
        paged_attention_kernel(
            out,
            partial_out,
            partial_lse,
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            sinks,
            requests,
            q_stride,
            table_stride,
            extra,
            scale,
            v_scale,
        ).launch(grid=(requests, c.kv_heads * c.row_splits, c.partitions), block=(THREADS, 1, 1), stream=stream)

    return paged_attention
