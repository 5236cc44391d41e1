"""Paged attention for decode, verify and the draft block on gfx942: every row of a request in one pass over its KV.

One work-group of four waves serves one request, KV head and partition of the context, and up to 128 rows (a request
with more, such as 16 positions of 16 heads, takes two work-groups). Each wave takes every fourth tile of 16 keys and
all rows, so the waves share nothing until the end:

    S^T [16 keys, 16 rows] = K Q^T      v_mfma_f32_16x16x16_bf16, K is operand A, Q is operand B
    P^T = exp2(S^T - m)                 stays where it is: the D layout of S^T is the B layout of P^T
    O^T [128, 16 rows] += V^T P^T       V is operand A; its four keys per lane are packed from four row loads

Softmax is the online one with a lazy reference: m of a row moves only when a score exceeds it by 2**8 in some lane of
the wave (one ballot per tile), so in most tiles no accumulator is rescaled and nothing crosses lanes. See
FlashAttention-4's conditional rescaling, arXiv:2603.05451, section 3.

Tensors (n requests, r = q_rows, H = q_heads, h = kv_heads; see PagedAttentionContract):

* out [n * r, H, v_dim] bf16, written unless the contract is split
* partial_out [n, h, partitions, rows, v_dim] float32 and partial_lse [n, h, partitions, rows] float32 in base 2,
  written if it is (reduce.py combines them); an empty partition writes its LSE only
* q [n * r, H, qk_dim] bf16; its rows may be `q_stride` elements apart
* k_cache [slots, h, qk_dim], v_cache [slots, h, v_dim], bf16 or fp8 e4m3fnuz; a page is page_size neighbouring slots;
  or the vectorized layout of kv_cache/layout.py
* page_table [n, table_stride] int32; seq_lens [n] int32, keys in front of the block; a request has seq_lens + extra
* sinks [H] float32 or bf16, used if the contract has sinks and is not split
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu

from . import gfx942_ops as ops
from .contract import TILE_ROWS, PagedAttentionContract
from .decode_end import End
from .decode_shape import LANES, NOWHERE, SLACK, STEP_TILES, THREADS, TILE_KEYS, WAVES, Shape, Softmax
from .decode_tiles import Tiles
from .toolchain import identity

STREAM = fx.Stream(None)


class Work:
    """The code of one work-group. Plain Python that emits; FlyDSL rewrites only the decorated kernel itself."""

    def __init__(self, name, contract, shape, lds, tensors, numbers):
        requests, partitions, q_stride, table_stride, extra, scale, v_scale = numbers
        self.name = name  # in the kernel's closure, see toolchain.identity
        c = self.c = contract
        self.shape, self.scale = shape, scale
        out, partial_out, partial_lse = (ops.base_of(t) for t in tensors[:3])
        q, k_base, v_base, table, lengths, sinks = (ops.base_of(t) for t in tensors[3:])
        self.lds_load, self.lds_store = ops.lds_view(lds)
        self.thread = fx.Int32(gpu.thread_id("x"))
        self.request = fx.Int32(gpu.block_id("x"))
        block = fx.Int32(gpu.block_id("y"))
        self.head, self.first_row = block // c.row_splits, block % c.row_splits * (shape.tiles * TILE_ROWS)
        self.part, self.partitions = fx.Int32(gpu.block_id("z")), partitions
        self.wave = ops.uniform(self.thread // LANES)
        lane = self.thread % LANES
        self.quarter, self.column = lane // 16, lane % 16
        self.q_stride = q_stride
        self.q_tokens = ops.resource(
            q + fx.Int64(self.request * c.q_rows) * fx.Int64(q_stride * 2), q_stride * (2 * c.q_rows)
        )

        self.kv_len = ops.scalar_load(ops.resource(lengths, requests * 4), self.request) + extra
        self.q_first = self.kv_len - c.q_rows  # position of the first query row
        first_tile, self.oldest = fx.Int32(0), None
        if c.window is not None:
            self.oldest = self.q_first - (c.window - 1)  # the first key that some row sees
            first_tile = ops.larger(self.oldest, fx.Int32(0)) // TILE_KEYS
        end_tile = (self.kv_len + (TILE_KEYS - 1)) // TILE_KEYS
        self.begin, self.end = first_tile, end_tile
        if c.split:
            per_part = (end_tile - first_tile + partitions - 1) // partitions
            self.begin = first_tile + self.part * per_part
            self.end = ops.smaller(self.begin + per_part, end_tile)
        self.steps = (self.end - self.begin + (STEP_TILES - 1)) // STEP_TILES
        table = ops.resource(table, requests * table_stride * 4)
        self.tiles = Tiles(self, k_base, v_base, table, table_stride)
        self.finish = End(self, out, partial_out, partial_lse, sinks, v_scale)

    def run(self) -> None:
        self.stage_q()
        waiting = self.load(self.begin + self.wave)
        state = ops.loop(fx.Int32(0), self.steps, [*waiting, *Softmax.empty(self.shape).flat()], self.two_tiles)
        softmax = Softmax.from_flat(state[len(waiting) :], self.shape)
        self.finish.add_up(softmax.sums, self.finish.agree(softmax))

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
        pieces = s.tiles * TILE_ROWS * per_row
        for start in range(0, pieces, THREADS):
            at = self.thread + start
            row, piece = at // per_row, at % per_row
            words = ops.load(self.q_tokens, self.q_offset(self.first_row + row) + piece * 16, 4)
            to = row * s.q_row + piece * 16
            if start + THREADS <= pieces:
                self.lds_store(to, words)
            else:
                ops.only_if(at < pieces, lambda to=to, words=words: self.lds_store(to, words))
        gpu.barrier()

    def q_fragments(self, m):
        """Operand B per step of 16 dims."""
        if self.shape.q_in_lds:
            base = (m * TILE_ROWS + self.column) * self.shape.q_row
            loaded = [self.lds_load(base + piece, 4) for piece in self.q_pieces()]
        else:
            loaded = self.q_registers[m]
        return [ops.pair(w[2 * i], w[2 * i + 1]) for w in loaded for i in range(2)]

    # ---- the loop: two tiles per step, so that loads of one are in flight while the other is computed

    def load(self, tile):
        """What is loaded a tile ahead: K, and V too where there are registers for it."""
        place = self.tiles.find(tile)
        return self.tiles.load_k(place) + (self.tiles.load_v(place) if self.shape.v_ahead else [])

    def two_tiles(self, step, state):
        s = self.shape
        waiting, softmax = state[: s.ahead], Softmax.from_flat(state[s.ahead :], s)
        tile = self.begin + step * STEP_TILES + self.wave
        other = self.load(tile + WAVES)
        fx.rocdl.sched_barrier(0)  # the compiler would sink the loads to where their values are wanted
        softmax = self.attend(tile, waiting, softmax)
        waiting = self.load(tile + STEP_TILES)
        fx.rocdl.sched_barrier(0)
        softmax = self.attend(tile + WAVES, other, softmax)
        return [*waiting, *softmax.flat()]

    def attend(self, tile, loaded, softmax):
        """Scores, weights and weighted sum of one tile of keys."""
        s = self.shape
        # With many rows the scores alone take long enough to hide the loads of V behind them.
        rows = loaded[s.k_loads :] if s.v_ahead else self.tiles.load_v(self.tiles.find(tile))
        k = self.tiles.k_fragments(loaded[: s.k_loads])
        scores = self.scores(tile, k)
        tops = [
            ops.maximum(ops.maximum(*scores[i : i + 2]), ops.maximum(*scores[i + 2 : i + 4]))
            for i in range(0, len(scores), 4)
        ]
        rises = [ops.fma(top, self.scale, -before) for top, before in zip(tops, softmax.reference, strict=True)]
        highest = rises[0]
        for rise in rises[1:]:
            highest = ops.maximum(highest, rise)
        state = ops.when(
            ops.any_lane(highest > fx.Float32(SLACK)),
            softmax.flat(),
            lambda state: self.move_references(Softmax.from_flat(state, s), tops),
        )
        softmax = Softmax.from_flat(state, s)
        # In base 2, and made only now: next to the first reference, NOTHING, a score has no digits left.
        exponents = [ops.fma(score, self.scale, -softmax.reference[i // 4]) for i, score in enumerate(scores)]
        p = []
        for m in range(s.tiles):
            weights = [ops.exp2(e) for e in exponents[4 * m : 4 * m + 4]]
            softmax.total[m] = softmax.total[m] + ((weights[0] + weights[1]) + (weights[2] + weights[3]))
            p.append(ops.pair(ops.pack_bf16(weights[0], weights[1]), ops.pack_bf16(weights[2], weights[3])))
        for j, v in enumerate(self.tiles.v_fragments(tile, rows)):
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
                    oldest = position - (c.window - 1)
                    seen = ops.unsigned_below(keys[r] - oldest, ops.larger(limit - oldest, fx.Int32(0)))
                found.append(seen.select(score[r], fx.Float32(float("-inf"))))
        return found

    def move_references(self, softmax, tops):
        """Raise each row's reference to its highest score so far, and scale what was summed under the old one.

        Args:
            tops: per row tile, this lane's highest score of the tile, unscaled.
        """
        s = self.shape
        for m, top in enumerate(tops):
            for distance in (16, 32):
                top = ops.maximum(top, top.shuffle_xor(distance, LANES))
            before = softmax.reference[m]
            softmax.reference[m] = ops.maximum(before, top * self.scale)
            fade = ops.exp2(before - softmax.reference[m])
            softmax.total[m] = softmax.total[m] * fade
            for j in range(s.columns):
                softmax.sums[m * s.columns + j] = softmax.sums[m * s.columns + j] * fade
        return softmax.flat()


def build(contract: PagedAttentionContract):
    """The host launcher (a `flyc.jit` function) of one specialisation.

    Its arguments are the tensors above in that order, then requests, partitions, q_stride, table_stride, extra (Int32),
    scale (softmax scale times LOG2E times K's scale) and v_scale (Float32), and the stream.
    """
    c, shape, name = contract, Shape.of(contract), identity(contract)

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
        partitions: fx.Int32,
        q_stride: fx.Int32,
        table_stride: fx.Int32,
        extra: fx.Int32,
        scale: fx.Float32,
        v_scale: fx.Float32,
    ):
        lds = fx.SharedAllocator().allocate(Storage).peek()
        tensors = (out, partial_out, partial_lse, q, k_cache, v_cache, page_table, seq_lens, sinks)
        numbers = (requests, partitions, q_stride, table_stride, extra, scale, v_scale)
        Work(name, c, shape, lds, tensors, numbers).run()

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
        partitions: fx.Int32,
        q_stride: fx.Int32,
        table_stride: fx.Int32,
        extra: fx.Int32,
        scale: fx.Float32,
        v_scale: fx.Float32,
        stream: fx.Stream = STREAM,
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
            partitions,
            q_stride,
            table_stride,
            extra,
            scale,
            v_scale,
        ).launch(grid=(requests, c.kv_heads * c.row_splits, partitions), block=(THREADS, 1, 1), stream=stream)

    return paged_attention
