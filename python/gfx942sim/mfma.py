"""v_mfma_* and v_smfmac_*: the matrix instructions of gfx942.

Numbers: products are exact; a dot product is summed in float64 and added to C in float64, then rounded once to the
output type. The hardware's order of additions and its intermediate widths are not modelled. f64 instructions round
after each multiplication and each addition, k ascending from C (the hardware fuses). The bits of a wave's result do not
depend on which other waves run with it: every wave's product is its own call into BLAS, of the same shape and layout.

Denormals are kept in inputs and outputs whatever MODE says, as gfx942 does. xf32 inputs are rounded to 10 mantissa
bits, to nearest even, as AMD's libraries define xf32. EXEC is ignored: all lanes take part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import fp8
from .code_object import Descriptor
from .decode import Instruction
from .errors import UnknownInstruction
from .mfma_shapes import BLGP_LANES, LANES, MatrixInstruction, matrix_instruction
from .operands import FIRST_VGPR, constant
from .state import AGPR, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

# Registers uint32 [registers, waves, 64] -> float64 [waves, elements per lane, 64].
Unpack = Callable[[np.ndarray], np.ndarray]
Read = Callable[[Batch, Selection], np.ndarray]

_FP8, _BF8 = fp8.FP8.astype(np.float64), fp8.BF8.astype(np.float64)
_HIGH_HALF = np.uint32(0xFFFF0000)
_SIXTEEN = np.uint32(16)


def _elements(registers: np.ndarray, per_register: int) -> np.ndarray:
    """An empty result of an Unpack."""
    count, waves, _ = registers.shape
    return np.empty((waves, count * per_register, LANES))


def _by_register(elements: np.ndarray, per_register: int) -> np.ndarray:
    """View of an Unpack's result as [registers, waves, 64, elements of the register]."""
    waves, count, _ = elements.shape
    return elements.reshape(waves, count // per_register, per_register, LANES).transpose(1, 0, 3, 2)


def _unpack_bf16(registers: np.ndarray) -> np.ndarray:
    elements = _elements(registers, 2)
    view = _by_register(elements, 2)
    view[..., 0] = (registers << _SIXTEEN).view(np.float32)
    view[..., 1] = (registers & _HIGH_HALF).view(np.float32)
    return elements


def _unpack_as(dtype: type) -> Unpack:
    per_register = 4 // np.dtype(dtype).itemsize

    def unpack(registers: np.ndarray) -> np.ndarray:
        elements = _elements(registers, per_register)
        _by_register(elements, per_register)[...] = registers.view(dtype).reshape(*registers.shape, per_register)
        return elements

    return unpack


def _unpack_table(table: np.ndarray) -> Unpack:
    def unpack(registers: np.ndarray) -> np.ndarray:
        elements = _elements(registers, 4)
        _by_register(elements, 4)[...] = table[registers.view(np.uint8).reshape(*registers.shape, 4)]
        return elements

    return unpack


def _unpack_xf32(registers: np.ndarray) -> np.ndarray:
    rounded = registers + (np.uint32(0xFFF) + (registers >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    value = registers.view(np.float32)
    return _unpack_as(np.float32)(np.where(np.isnan(value), value, rounded.view(np.float32)).view(np.uint32))


def _as_doubles(registers: np.ndarray) -> np.ndarray:
    """uint32 [2 n, waves, 64] -> float64 [n, waves, 64]: even registers hold the low halves."""
    pairs = np.stack([registers[0::2], registers[1::2]], -1)
    return pairs.view(np.float64)[..., 0]


_UNPACK: dict[str, Unpack] = {
    "f32": _unpack_as(np.float32),
    "xf32": _unpack_xf32,
    "f16": _unpack_as(np.float16),
    "bf16": _unpack_bf16,
    "i8": _unpack_as(np.int8),
    "fp8": _unpack_table(_FP8),
    "bf8": _unpack_table(_BF8),
    "f64": lambda registers: _as_doubles(registers).transpose(1, 0, 2),
}


class _Fields:
    """The fields of VOP3P_MFMA. The tables decode the xf32 instructions as plain VOP3P, where the same bits have other
    names."""

    def __init__(self, instruction: Instruction):
        field = instruction.field
        if instruction.has("acc_cd"):
            self.cbsz, self.abid, self.blgp = field("cbsz"), field("abid"), field("blgp")
            self.acc, self.acc_cd = field("acc"), field("acc_cd")
        else:
            self.cbsz, self.blgp = field("neg_hi"), field("neg")
            self.abid = field("opsel") | field("opsel_hi2") << 3
            self.acc, self.acc_cd = field("opsel_hi"), field("clmp")
        self.a, self.b, self.c, self.d = field("src0"), field("src1"), field("src2"), field("vdst")


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """Matrix instructions.

    Raises:
        UnknownInstruction: not an instruction of gfx942; A or B is not a register; C is a scalar register or a literal;
            a modifier that the instruction does not take.
    """
    shape = matrix_instruction(instruction.mnemonic)
    if shape is None:
        raise UnknownInstruction(f"{instruction.mnemonic} is not an instruction of gfx942")
    fields = _Fields(instruction)
    if shape.sparse:
        return _sparse(shape, fields)
    a = _matrix(fields.a, fields.acc & 1, shape.a_registers, _UNPACK[shape.a_type], "A")
    b = _matrix(fields.b, fields.acc >> 1, shape.b_registers, _UNPACK[shape.b_type], "B")
    d = _first_register(fields.d, fields.acc_cd, shape.out_registers, "D")
    a = _broadcast_blocks(shape, fields, a)
    if shape.out_type == "f64":
        return _double_handler(shape, fields, a, b, d)
    if fields.blgp:
        if not shape.permutes:
            raise UnknownInstruction(f"{shape.mnemonic} takes no BLGP, got {fields.blgp}")
        lanes, plain = BLGP_LANES[fields.blgp], b
        b = lambda batch, waves: plain(batch, waves)[:, :, lanes]  # noqa: E731
    c = _accumulator(fields, shape)

    def handler(batch: Batch, waves: Selection) -> None:
        _add_to(batch, waves, shape, d, _products(shape, a(batch, waves), b(batch, waves)), c(batch, waves))

    return handler


def _first_register(code: int, accumulator: int, count: int, what: str) -> int:
    """Row of batch.vgpr that `count` registers start at."""
    if code < FIRST_VGPR:
        raise UnknownInstruction(f"{what} must be in vector registers, got source code {code}")
    if code - FIRST_VGPR + count > 256:
        raise UnknownInstruction(f"{what}: registers {code - FIRST_VGPR} to {code - FIRST_VGPR + count - 1}")
    return code - FIRST_VGPR + (AGPR if accumulator else 0)


def _registers(first: int, count: int) -> Read:
    """`count` registers as uint32 [count, waves, 64]; a view when all waves are selected."""

    def read(batch: Batch, waves: Selection) -> np.ndarray:
        block = batch.vgpr[first : first + count]
        return block if isinstance(waves, slice) else block[:, waves]

    return read


def _matrix(code: int, accumulator: int, count: int, unpack: Unpack, what: str) -> Read:
    """A or B as float64 [waves, elements per lane, 64]."""
    read = _registers(_first_register(code, accumulator, count, what), count)
    return lambda batch, waves: unpack(read(batch, waves))


def _broadcast_blocks(shape: MatrixInstruction, fields: _Fields, a: Read) -> Read:
    """CBSZ and ABID: each run of 2**CBSZ blocks of A uses the block ABID of that run."""
    if not fields.cbsz and not fields.abid:
        return a
    run = 1 << fields.cbsz
    if not shape.broadcasts or run > shape.blocks or fields.abid >= run:
        raise UnknownInstruction(f"{shape.mnemonic} with CBSZ {fields.cbsz}, ABID {fields.abid}")
    source = np.arange(shape.blocks) // run * run + fields.abid
    lanes = (source[:, None] * shape.rows + np.arange(shape.rows)).reshape(-1)
    return lambda batch, waves: a(batch, waves)[:, :, lanes]


def _accumulator(fields: _Fields, shape: MatrixInstruction) -> Read:
    """C as uint32 [registers, waves, 64], or [1, 1, 1] for a constant (uint64 if the output is f64)."""
    double = shape.out_type == "f64"
    if fields.c >= FIRST_VGPR:
        return _registers(_first_register(fields.c, fields.acc_cd, shape.out_registers, "C"), shape.out_registers)
    bits = constant(fields.c, None, "f64" if double else "f32")
    if bits is None:
        raise UnknownInstruction(f"C must be in vector registers or an inline constant, got source code {fields.c}")
    if double:
        value = np.full((1, 1, 1), bits & 0xFFFFFFFFFFFFFFFF, np.uint64)
    else:
        value = np.full((1, 1, 1), bits & 0xFFFFFFFF, np.uint32)
    return lambda batch, waves: value


def _by_block(shape: MatrixInstruction, elements: np.ndarray) -> np.ndarray:
    """float64 [waves, held, 64] -> [waves, blocks, inner, rows or columns] (a view).

    The order along `inner` is (element, lane group), not k: A and B agree on it, which is all that a product needs.
    """
    waves, held, _ = elements.shape
    if shape.blocks == 1:
        return elements.reshape(waves, 1, held * shape.inner_lanes, -1)
    split = elements.reshape(waves, held * shape.inner_lanes, shape.blocks, -1)
    return split.transpose(0, 2, 1, 3)


def _products(shape: MatrixInstruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A x B as float64 [waves, blocks, rows, columns], from what Unpack gives."""
    return np.matmul(_by_block(shape, a).swapaxes(-1, -2), _by_block(shape, b))


def _in_registers(shape: MatrixInstruction, matrices: np.ndarray) -> np.ndarray:
    """[waves, blocks, rows, columns] -> a view [block groups, groups, band, waves, lane_bands, lane_blocks, columns].

    The first three axes count output elements, the last three lanes, as MatrixInstruction describes.
    """
    waves = matrices.shape[0]
    split = matrices.reshape(
        waves, -1, shape.lane_blocks, shape.groups, shape.lane_bands, shape.band, shape.columns
    )  # waves, block group, lane block, group, lane band, band row, column
    return split.transpose(1, 3, 5, 0, 4, 2, 6)


def _add_to(
    batch: Batch, waves: Selection, shape: MatrixInstruction, d: int, products: np.ndarray, c: np.ndarray
) -> None:
    """Write products + c to the registers that start at `d`, rounded once (f32) or modulo 2**32 (i32)."""
    products = _in_registers(shape, products)
    if isinstance(waves, slice):
        target = batch.vgpr[d : d + shape.out_registers]
    else:
        target = np.empty((shape.out_registers, products.shape[3], LANES), np.uint32)
    if c.size > 1:
        c = c.reshape(products.shape)
    else:
        c = c[0, 0]
    if shape.out_type == "i32":
        np.add(products.astype(np.int32), c.view(np.int32), out=target.view(np.int32).reshape(products.shape))
    else:
        out = target.view(np.float32).reshape(products.shape)
        np.add(products, c.view(np.float32), out=out, casting="unsafe")
    if not isinstance(waves, slice):
        batch.vgpr[d : d + shape.out_registers, waves] = target


def _double_handler(shape: MatrixInstruction, fields: _Fields, a: Read, b: Read, d: int) -> Handler:
    """f64: BLGP bits 0 to 2 negate A, B and C."""
    negate_a, negate_b, negate_c = (fields.blgp >> bit & 1 for bit in range(3))
    read_c = _accumulator(fields, shape)
    in_registers = fields.c >= FIRST_VGPR

    def handler(batch: Batch, waves: Selection) -> None:
        left, right = _by_block(shape, a(batch, waves)), _by_block(shape, b(batch, waves))
        c = read_c(batch, waves)
        c = _as_doubles(c) if in_registers else c.view(np.float64)
        total = np.empty((left.shape[0], shape.blocks, shape.rows, shape.columns))
        view = _in_registers(shape, total)
        view[...] = c.reshape(view.shape) if in_registers else c[0, 0]
        if negate_c:
            np.negative(total, out=total)
        if negate_a != negate_b:
            left = -left
        for k in range(shape.inner):
            total += left[:, :, k, :, None] * right[:, :, k, None, :]
        words = np.ascontiguousarray(view).reshape(-1, left.shape[0], LANES).view(np.uint32)
        batch.vgpr[d : d + shape.out_registers : 2, waves] = words[..., 0::2]
        batch.vgpr[d + 1 : d + shape.out_registers : 2, waves] = words[..., 1::2]

    return handler


def _sparse(shape: MatrixInstruction, fields: _Fields) -> Handler:
    """v_smfmac: D = A x B + D, where A holds two of every four elements along `inner`.

    Stored element e of a lane belongs to the lane's run of four number e // 2. Bits 2 e and 2 e + 1 of an index set say
    which of the four it is. The register src2 has four sets of 8 bits for 16-bit inputs, two of 16 bits for 8-bit
    inputs; ABID selects the set when CBSZ is 0, otherwise it is the first.
    """
    a = _matrix(fields.a, fields.acc & 1, shape.a_registers, _UNPACK[shape.a_type], "A")
    b = _matrix(fields.b, fields.acc >> 1, shape.b_registers, _UNPACK[shape.b_type], "B")
    d = _first_register(fields.d, fields.acc_cd, shape.out_registers, "D")
    index = _registers(_first_register(fields.c, 0, 1, "the index"), 1)
    held = shape.a_held
    sets = 32 // (2 * held)
    if fields.blgp or (fields.cbsz == 0 and fields.abid >= sets):
        raise UnknownInstruction(
            f"{shape.mnemonic} with CBSZ {fields.cbsz}, ABID {fields.abid}, BLGP {fields.blgp}; it has {sets} index "
            "sets and no BLGP"
        )
    start = 2 * held * fields.abid if fields.cbsz == 0 else 0
    shifts = (start + 2 * np.arange(held)).astype(np.uint32)[:, None]
    run_of = 4 * (np.arange(held) // 2)[:, None]
    read_d = _registers(d, shape.out_registers)

    def handler(batch: Batch, waves: Selection) -> None:
        stored = a(batch, waves)  # [waves, held, 64]
        count = stored.shape[0]
        place = run_of + (index(batch, waves)[0][:, None] >> shifts & np.uint32(3)).astype(np.int64)
        # Element e of lane group q sits at row (e, q) of `right`: see _by_block.
        group = np.arange(LANES) // shape.rows
        row = (place * shape.inner_lanes + group).reshape(count, held * shape.inner_lanes, shape.rows)
        left = stored.reshape(row.shape)
        right = _by_block(shape, b(batch, waves))[:, 0]
        wave = np.arange(count)[:, None]
        total = np.zeros((count, 1, shape.rows, shape.columns))
        for e in range(row.shape[1]):
            total[:, 0] += left[:, e, :, None] * right[wave, row[:, e]]
        _add_to(batch, waves, shape, d, total, read_d(batch, waves))

    return handler
