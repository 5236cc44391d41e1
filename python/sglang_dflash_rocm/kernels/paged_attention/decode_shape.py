"""Compile-time numbers and running state of decode.py."""

from dataclasses import dataclass

import flydsl.expr as fx

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
    loads of K per lane and tile, of `chunk` elements each; v_loads: loads of V. tiles: row tiles of a work-group, which
    each wave has all of. columns: tiles of 16 V columns. q_row: bytes between rows of Q in LDS. exchange: bytes of one
    float per row and wave. lds: bytes in all.
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

    @property
    def v_ahead(self) -> bool:
        """V is loaded a tile ahead, as K is."""
        return not self.q_in_lds

    @property
    def ahead(self) -> int:
        """Vectors that are loaded a tile ahead."""
        return self.k_loads + (self.v_loads if self.v_ahead else 0)

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
