"""VOP3P: packed 16-bit and 32-bit arithmetic, dot products, mixed-precision fma, and moves of AGPRs.

Inline constants of packed 16-bit instructions are 32-bit values from which op_sel picks halves: integers are
sign-extended, floats of f16 instructions have their f16 in the low half, floats of integer instructions are f32. (This
is how LLVM encodes them; the guide is not clear.) Constants of packed f32 instructions are the same in both halves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import floats, operands
from .code_object import Descriptor
from .decode import Instruction
from .errors import UnknownInstruction
from .modifiers import ieee_mode, saturated
from .state import AGPR, Batch, Selection
from .vector_int import dot_products, signed_field, unsigned_field

if TYPE_CHECKING:
    from .translate import Handler

Reader = Callable[[Batch, Selection], np.ndarray]
_SIGN_16, _SIGN_32 = np.uint16(0x8000), np.uint32(0x80000000)


class _Fields(NamedTuple):
    """Operand fields. half[i]: which half of source i the low and the high result use; negative[i]: whether it is
    negated there."""

    codes: list[int]
    half: list[tuple[int, int]]
    negative: list[tuple[int, int]]
    clamp: bool
    destination: int
    descriptor: Descriptor


def _fields(instruction: Instruction, descriptor: Descriptor) -> _Fields:
    field = instruction.field
    high = field("opsel_hi") | field("opsel_hi2") << 2
    return _Fields(
        [field(f"src{i}") for i in range(3)],
        [(field("opsel") >> i & 1, high >> i & 1) for i in range(3)],
        [(field("neg") >> i & 1, field("neg_hi") >> i & 1) for i in range(3)],
        bool(field("clmp")),
        field("vdst") & 0xFF,
        descriptor,
    )


def _halves(fields: _Fields, index: int, is_float: bool) -> Reader:
    """Source `index` as uint16 [waves, 64, 2]: what goes into the low and into the high result. Broadcasts."""
    raw = operands.vector(fields.codes[index], None, "f16" if is_float else "f32")
    half, negative = fields.half[index], fields.negative[index]
    if any(negative) and not is_float:
        raise UnknownInstruction("neg on a packed integer operand")
    # All views: in order, swapped, or one half for both.
    chosen = {(0, 1): slice(None), (1, 0): slice(None, None, -1), (0, 0): slice(0, 1), (1, 1): slice(1, 2)}[half]
    signs = np.array(negative, np.uint16) * _SIGN_16

    def read(batch: Batch, waves: Selection) -> np.ndarray:
        value = np.ascontiguousarray(raw(batch, waves))
        both = value.reshape(-1).view(np.uint16).reshape(*value.shape, 2)[..., chosen]
        return both ^ signs if any(negative) else both

    return read


def _write_halves(batch: Batch, waves: Selection, register: int, value: np.ndarray) -> None:
    """16-bit [waves, 64, 1 or 2] to a register."""
    both = np.ascontiguousarray(np.broadcast_to(value, (*value.shape[:-1], 2)))
    batch.write_vgpr(waves, register, both.view(np.uint32)[..., 0])


def _integer_handler(fields: _Fields, dtype: type, function: Callable, count: int, saturates: bool) -> Handler:
    readers = [_halves(fields, i, False) for i in range(count)]
    limits, register, clamp = np.iinfo(dtype), fields.destination, fields.clamp
    if clamp and not saturates:
        raise UnknownInstruction("clamp on a packed instruction without saturation")

    def handler(batch: Batch, waves: Selection) -> None:
        values = [read(batch, waves).view(dtype) for read in readers]
        if clamp:
            exact = function(*[value.astype(np.int64) for value in values])
            result = np.clip(exact, limits.min, limits.max).astype(dtype)
        else:
            result = function(*values)
        _write_halves(batch, waves, register, result)

    return handler


def _half_handler(fields: _Fields, function: Callable, count: int, as_half: bool) -> Handler:
    """f16. as_half: the function works on float16; otherwise it gets float32 and its result is rounded."""
    readers = [_halves(fields, i, True) for i in range(count)]
    descriptor, register = fields.descriptor, fields.destination
    flushing, clamp = descriptor.flushes_f16_f64_denormals, fields.clamp
    nan_to_zero = bool(descriptor.rsrc1 >> 21 & 1)

    def handler(batch: Batch, waves: Selection) -> None:
        values = [read(batch, waves) for read in readers]
        values = [value.view(np.float16) if as_half else floats.from_f16(value) for value in values]
        if flushing:
            values = [floats.flush(value, 2.0**-14) for value in values]
        result = function(*values)
        if clamp:
            result = floats.clamp_to_one(result, nan_to_zero)
        if flushing:
            result = floats.flush(result, 2.0**-14)
        bits = result.view(np.uint16) if as_half else floats.to_f16(saturated(batch, waves, result, 65504.0))
        _write_halves(batch, waves, register, bits)

    return handler


def _pair_element(code: int, half: int, negative: int) -> Reader:
    """One 32-bit half of a 64-bit packed operand as raw uint32."""
    is_register = code < 128 or code >= operands.FIRST_VGPR
    read = operands.vector(code + half if is_register else code)
    return (lambda batch, waves: read(batch, waves) ^ _SIGN_32) if negative else read


def _single_handler(fields: _Fields, function: Callable, count: int) -> Handler:
    """Packed f32."""
    low, high = (
        [_pair_element(fields.codes[i], fields.half[i][part], fields.negative[i][part]) for i in range(count)]
        for part in (0, 1)
    )
    register, descriptor = fields.destination, fields.descriptor
    flushing, clamp = descriptor.flushes_f32_denormals, fields.clamp
    nan_to_zero = bool(descriptor.rsrc1 >> 21 & 1)

    def compute(batch: Batch, waves: Selection, readers: list[Reader]) -> np.ndarray:
        values = [read(batch, waves).view(np.float32) for read in readers]
        if flushing:
            values = [floats.flush(value) for value in values]
        result = function(*values)
        if clamp:
            result = floats.clamp_to_one(result, nan_to_zero)
        return (floats.flush(result) if flushing else result).view(np.uint32)

    def handler(batch: Batch, waves: Selection) -> None:
        results = compute(batch, waves, low), compute(batch, waves, high)
        batch.write_vgpr(waves, register, results[0])
        batch.write_vgpr(waves, register + 1, results[1])

    return handler


def _move_pair(fields: _Fields) -> Handler:
    """v_pk_mov_b32: one word of each source; op_sel_hi does not matter."""
    low, high = (_pair_element(fields.codes[i], fields.half[i][0], 0) for i in range(2))
    register = fields.destination
    if fields.clamp or any(map(any, fields.negative)):
        raise UnknownInstruction("modifiers on v_pk_mov_b32")

    def handler(batch: Batch, waves: Selection) -> None:
        # The second source may be the first destination.
        first, second = low(batch, waves).copy(), high(batch, waves).copy()
        batch.write_vgpr(waves, register, first)
        batch.write_vgpr(waves, register + 1, second)

    return handler


def _mixed_operand(fields: _Fields, index: int) -> Reader:
    """A source of v_mad_mix: f32, or a half of it as f16; neg_hi means abs here. Gives float32."""
    (half, is_half), (negative, absolute) = fields.half[index], fields.negative[index]
    raw = operands.vector(fields.codes[index], None, "f16" if is_half else "f32")
    flush_32, flush_16 = fields.descriptor.flushes_f32_denormals, fields.descriptor.flushes_f16_f64_denormals

    def read(batch: Batch, waves: Selection) -> np.ndarray:
        value = raw(batch, waves)
        if is_half:
            number = floats.from_f16((value >> 16 * half).astype(np.uint16))
            number = floats.flush(number, 2.0**-14) if flush_16 else number
        else:
            number = floats.flush(value.view(np.float32)) if flush_32 else value.view(np.float32)
        number = np.abs(number) if absolute else number
        return -number if negative else number

    return read


def _mix_handler(fields: _Fields, part: str) -> Handler:
    """v_mad_mix*, which LLVM knows as v_fma_mix on gfx942: one rounding to f32, then, for lo and hi, one to f16."""
    readers = [_mixed_operand(fields, i) for i in range(3)]
    descriptor, register, clamp = fields.descriptor, fields.destination, fields.clamp
    nan_to_zero = bool(descriptor.rsrc1 >> 21 & 1)
    shift = 16 if part == "hi_f16" else 0

    def handler(batch: Batch, waves: Selection) -> None:
        result = floats.fma32(*[read(batch, waves) for read in readers])
        if clamp:
            result = floats.clamp_to_one(result, nan_to_zero)
        if descriptor.flushes_f32_denormals:
            result = floats.flush(result)
        bits = result.view(np.uint32)
        if part != "_f32":
            kept = batch.vgpr[register][waves] & (0xFFFF0000 >> shift)
            bits = kept | floats.to_f16(saturated(batch, waves, result, 65504.0)).astype(np.uint32) << shift
        batch.write_vgpr(waves, register, bits)

    return handler


def _dot_halves(fields: _Fields) -> Handler:
    """v_dot2_f32_f16: f16 products are exact in f32; each of the two sums is rounded."""
    left, right = (_halves(fields, i, True) for i in range(2))
    addend = _pair_element(fields.codes[2], 0, fields.negative[2][0])
    register, clamp = fields.destination, fields.clamp
    nan_to_zero = bool(fields.descriptor.rsrc1 >> 21 & 1)
    flushing = fields.descriptor.flushes_f32_denormals

    def handler(batch: Batch, waves: Selection) -> None:
        products = floats.from_f16(left(batch, waves)) * floats.from_f16(right(batch, waves))
        total = addend(batch, waves).view(np.float32)
        products = np.broadcast_to(products, (*products.shape[:-1], 2))
        result = (total + products[..., 0]) + products[..., 1]
        if clamp:
            result = floats.clamp_to_one(result, nan_to_zero)
        result = floats.flush(result) if flushing else result
        batch.write_vgpr(waves, register, result.view(np.uint32))

    return handler


def _dot_integers(fields: _Fields, bits: int, is_signed: bool) -> Handler:
    """The sum is exact; it wraps, or saturates with clamp."""
    if any(half[0] for half in fields.half) or any(map(any, fields.negative)):
        raise UnknownInstruction("op_sel or neg on an integer dot product")
    readers = [operands.vector(code) for code in fields.codes]
    dtype, register, clamp = np.int32 if is_signed else np.uint32, fields.destination, fields.clamp
    limits, field = np.iinfo(dtype), signed_field if is_signed else unsigned_field

    def handler(batch: Batch, waves: Selection) -> None:
        left, right, addend = (read(batch, waves) for read in readers)
        exact = dot_products(left, right, bits, field) + addend.view(dtype)
        if clamp:
            exact = np.clip(exact, limits.min, limits.max)
        batch.write_vgpr(waves, register, exact.astype(dtype).view(np.uint32))

    return handler


def _read_accumulator(fields: _Fields) -> Handler:
    source, register = fields.codes[0] - operands.FIRST_VGPR + AGPR, fields.destination
    return lambda batch, waves: batch.write_vgpr(waves, register, batch.vgpr[source][waves])


def _write_accumulator(fields: _Fields) -> Handler:
    read, register = operands.vector(fields.codes[0]), fields.destination + AGPR
    return lambda batch, waves: batch.write_vgpr(waves, register, read(batch, waves))


# name -> (dtype, function, number of sources, whether CLAMP saturates)
INTEGER: dict[str, tuple[type, Callable, int, bool]] = {
    "v_pk_add_i16": (np.int16, np.add, 2, True),
    "v_pk_sub_i16": (np.int16, np.subtract, 2, True),
    "v_pk_mad_i16": (np.int16, lambda a, b, c: a * b + c, 3, True),
    "v_pk_add_u16": (np.uint16, np.add, 2, True),
    "v_pk_sub_u16": (np.uint16, np.subtract, 2, True),
    "v_pk_mad_u16": (np.uint16, lambda a, b, c: a * b + c, 3, True),
    "v_pk_mul_lo_u16": (np.uint16, np.multiply, 2, False),
    "v_pk_lshlrev_b16": (np.uint16, lambda a, b: b << (a & 15), 2, False),
    "v_pk_lshrrev_b16": (np.uint16, lambda a, b: b >> (a & 15), 2, False),
    "v_pk_ashrrev_i16": (np.int16, lambda a, b: b >> (a & 15), 2, False),
    "v_pk_min_i16": (np.int16, np.minimum, 2, False),
    "v_pk_max_i16": (np.int16, np.maximum, 2, False),
    "v_pk_min_u16": (np.uint16, np.minimum, 2, False),
    "v_pk_max_u16": (np.uint16, np.maximum, 2, False),
}
HALF: dict[str, tuple[Callable, int]] = {
    "v_pk_fma_f16": (floats.fma16, 3),
    "v_pk_add_f16": (np.add, 2),
    "v_pk_mul_f16": (np.multiply, 2),
}
HALF_PICKS: dict[str, Callable] = {"v_pk_min_f16": floats.minimum, "v_pk_max_f16": floats.maximum}
SINGLE: dict[str, tuple[Callable, int]] = {
    "v_pk_fma_f32": (floats.fma32, 3),
    "v_pk_add_f32": (np.add, 2),
    "v_pk_mul_f32": (np.multiply, 2),
}
# name -> (bits of an element, signed)
DOT: dict[str, tuple[int, bool]] = {
    "v_dot2_i32_i16": (16, True),
    "v_dot2_u32_u16": (16, False),
    "v_dot4_i32_i8": (8, True),
    "v_dot4_u32_u8": (8, False),
    "v_dot8_i32_i4": (4, True),
    "v_dot8_u32_u4": (4, False),
}
MIX: dict[str, str] = {"v_mad_mix_f32": "_f32", "v_mad_mixlo_f16": "lo_f16", "v_mad_mixhi_f16": "hi_f16"}
OTHER: dict[str, Callable[[_Fields], Handler]] = {
    "v_dot2_f32_f16": _dot_halves,
    "v_pk_mov_b32": _move_pair,
    "v_accvgpr_read": _read_accumulator,
    "v_accvgpr_write": _write_accumulator,
}


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """VOP3P without MFMA. Raises UnknownInstruction for a mnemonic or modifier that is not implemented."""
    name, fields = instruction.mnemonic, _fields(instruction, descriptor)
    if name in INTEGER:
        return _integer_handler(fields, *INTEGER[name])
    if name in HALF:
        return _half_handler(fields, *HALF[name], as_half=False)
    if name in HALF_PICKS:
        pick = functools.partial(HALF_PICKS[name], ieee=ieee_mode(descriptor))
        return _half_handler(fields, pick, 2, as_half=True)
    if name in SINGLE:
        return _single_handler(fields, *SINGLE[name])
    if name in DOT:
        return _dot_integers(fields, *DOT[name])
    if name in MIX:
        return _mix_handler(fields, MIX[name])
    if name in OTHER:
        return OTHER[name](fields)
    raise UnknownInstruction(f"{name} is not implemented")
