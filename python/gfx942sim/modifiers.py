"""What VOP1, VOP2, VOP3, SDWA and DPP encodings say about operands, as readers and writers of typed arrays.

A type is a name such as "f32". What a function of an instruction table gets for it, and may return for it:

    u32 i32 b32   uint32, int32, uint32          u16 i16 b16   uint16, int16, uint16
    u64 i64 b64   uint64, int64, uint64          f32 f64       float32, float64
    f16           float32 (see floats.py; a result may be float64 too)
    half          float16, for what needs the bits of an f16
    mask          bool: one bit per lane of an SGPR pair, in VOP2 of VCC
    VCC           bool: one bit per lane of VCC, not an operand

neg and abs of "b" types act on the sign bit and denormals are never flushed. Source: AMD Instinct MI300 ISA guide,
"VALU instructions" and "Microcode formats" (VOP3, SDWA, DPP).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import floats, operands
from .code_object import Descriptor
from .decode import Instruction
from .dpp import LaneMove
from .errors import UnknownInstruction
from .state import VCC, Batch, Selection

Reader = Callable[[Batch, Selection], np.ndarray]
Writer = Callable[[Batch, Selection, np.ndarray], None]

_FLOATS = {"f16": np.float32, "half": np.float16, "f32": np.float32, "f64": np.float64}
_ARRAYS = {
    **{"u32": np.uint32, "b32": np.uint32, "i32": np.int32, "u16": np.uint16, "b16": np.uint16, "i16": np.int16},
    **{"u64": np.uint64, "b64": np.uint64, "i64": np.int64},
}
_SMALLEST_F16 = 2.0**-14
_LARGEST_F16 = 65504.0
_DWORD = 6
_PAD, _SIGN_EXTEND, _PRESERVE = 0, 1, 2
_OMOD = {1: 2.0, 2: 4.0, 3: 0.5}


def width(kind: str) -> int:
    """Bits of a type."""
    return 16 if kind == "half" else int(kind[1:])


class Field(NamedTuple):
    """One source operand of an encoding. select: SDWA byte 0..3, word 4..5 or 6 for all; high: VOP3 op_sel."""

    code: int
    negative: bool = False
    absolute: bool = False
    select: int = _DWORD
    sign_extend: bool = False
    high: bool = False
    move: LaneMove | None = None


class Encoding:
    """The operand fields of one instruction. sources: in order. destination: the raw 8 bits of vdst."""

    def __init__(self, instruction: Instruction, descriptor: Descriptor):
        self.instruction, self.descriptor = instruction, descriptor
        name = instruction.encoding
        self.vop3, self.sdwa, self.dpp = name.startswith("VOP3"), "SDWA" in name, "DPP" in name
        self.destination = instruction.optional("vdst") & 0xFF
        self.omod, self.clamp = instruction.optional("omod"), bool(instruction.optional("clmp"))
        opsel = instruction.optional("opsel")
        self.high_result = bool(opsel >> 3)
        self.opsel = opsel
        self.result_select = instruction.optional("dst_sel", _DWORD)
        self.result_unused = instruction.optional("dst_unused", _PAD)
        self.move = LaneMove(instruction) if self.dpp else None
        self.sources = self._vop3_sources(opsel) if self.vop3 else self._short_sources()

    def _vop3_sources(self, opsel: int) -> list[Field]:
        get = self.instruction.optional
        negative, absolute = get("neg"), get("abs")
        return [
            Field(
                self.instruction.field(f"src{i}"),
                bool(negative >> i & 1),
                bool(absolute >> i & 1),
                high=bool(opsel >> i & 1),
            )
            for i in range(3)
        ]

    def _short_sources(self) -> list[Field]:
        get = self.instruction.optional
        if not self.sdwa and not self.dpp:
            names = ["src0", "vsrc1"] if self.instruction.has("vsrc1") else ["src0"]
            return [Field(self.instruction.field(name)) for name in names]
        fields = []
        for i, name in enumerate(("vsrc0", "vsrc1")):
            if not self.instruction.has(name):
                continue
            code = self.instruction.field(name)
            if get(f"s{i}"):  # SDWA: the field is a scalar source
                code -= operands.FIRST_VGPR
            fields.append(
                Field(
                    code,
                    bool(get(f"src{i}_neg")),
                    bool(get(f"src{i}_abs")),
                    get(f"src{i}_sel", _DWORD),
                    bool(get(f"src{i}_sext")),
                    move=self.move if i == 0 else None,
                )
            )
        return fields

    @property
    def plain_result(self) -> bool:
        """Nothing but EXEC decides what is written, and nothing changes the value."""
        return not (self.omod or self.clamp or self.high_result or self.sdwa or self.dpp)

    def flushes(self, kind: str) -> bool:
        if kind == "f32":
            return self.descriptor.flushes_f32_denormals
        return kind in ("f16", "half", "f64") and self.descriptor.flushes_f16_f64_denormals

    def reader(self, kind: str, index: int) -> Reader:
        """Source number `index` as `kind`."""
        if kind == "VCC":
            return lane_mask(VCC)
        if kind == "mask":
            return lane_mask(self.sources[index].code if self.vop3 else VCC)
        return self.read(kind, self.sources[index])

    def old_destination(self, kind: str) -> Reader:
        """The destination register as a source, as accumulating instructions read it."""
        return self.read(kind, Field(self.destination + operands.FIRST_VGPR))

    def literal(self, kind: str) -> Reader:
        return self.read(kind, Field(255))

    def read(self, kind: str, source: Field) -> Reader:
        """Raises UnknownInstruction for modifiers that the type does not have."""
        modified = source.negative or source.absolute
        if modified and kind[0] in "iu":
            raise UnknownInstruction("neg or abs on an integer operand")
        bits = width(kind)
        if source.high and bits != 16:
            raise UnknownInstruction(f"op_sel on a {kind} operand")
        if bits == 64:
            raw = self._raw64(kind, source)
        else:
            raw = self._raw32(kind, source)
        get = _decoder(kind, raw, source.high)
        if modified:
            get = _sign_modifiers(kind, get, source)
        if kind in _FLOATS and self.flushes(kind):
            return _flushing(kind, get)
        return get

    def _raw64(self, kind: str, source: Field) -> Reader:
        if source.select != _DWORD:
            raise UnknownInstruction("SDWA select on a 64-bit operand")
        if source.move is not None and not source.move.allows_64_bits:
            raise UnknownInstruction("DPP control that 64-bit operands do not have")
        raw = operands.vector64(source.code, self.instruction.literal, "f64" if kind == "f64" else "b64")
        return source.move.applied(raw) if source.move is not None else raw

    def _raw32(self, kind: str, source: Field) -> Reader:
        constants = "f16" if width(kind) == 16 and kind in ("f16", "half", "b16") else "f32"
        raw = operands.vector(source.code, self.instruction.literal, constants)
        if source.move is not None:
            raw = source.move.applied(raw)
        if source.select != _DWORD:
            raw = _sdwa_select(raw, source)
        return raw

    def writer(self, kind: str, preserves_high: bool = False) -> Writer:
        """Takes an array as the type says and writes the destination, in the lanes of EXEC.

        preserves_high: a 16-bit result leaves the other half of the register alone (else it becomes zero).
        """
        finish = self._finish(kind)
        register = self.destination
        if width(kind) == 64:
            if self.high_result:
                raise UnknownInstruction("op_sel on a 64-bit result")
            return self._write_pair(register, finish)
        if self.high_result and width(kind) != 16:
            raise UnknownInstruction("op_sel on a 32-bit result")
        place = None
        if self.sdwa and self.result_select != _DWORD:
            place = self._sdwa_place(register)
        elif width(kind) == 16 and self.high_result:
            place = _insert(register, 16, 16)
        elif width(kind) == 16 and preserves_high:
            place = _insert(register, 0, 16)
        move = self.move

        def write(batch: Batch, waves: Selection, value: np.ndarray) -> None:
            if kind == "f16":
                value = saturated(batch, waves, value, _LARGEST_F16)
            result = finish(value)
            if place is not None:
                result = place(batch, waves, result)
            batch.write_vgpr(waves, register, result, None if move is None else move.written(batch, waves))

        return write

    def _write_pair(self, register: int, finish: Callable[[np.ndarray], np.ndarray]) -> Writer:
        move = self.move

        def write(batch: Batch, waves: Selection, value: np.ndarray) -> None:
            result = finish(value)
            lanes = None if move is None else move.written(batch, waves)
            words = np.ascontiguousarray(result).view(np.uint32)
            batch.write_vgpr(waves, register, words[..., ::2], lanes)
            batch.write_vgpr(waves, register + 1, words[..., 1::2], lanes)

        return write

    def _finish(self, kind: str) -> Callable[[np.ndarray], np.ndarray]:
        """From the function's result to bits: omod, clamp, flushing, conversion."""
        if kind not in _FLOATS:
            # Integer clamp is done by the caller, on wider numbers.
            if self.omod:
                raise UnknownInstruction("omod on an integer result")
            return _integer_bits(kind)
        descriptor = self.descriptor
        flushing = self.flushes(kind)
        # Output modifiers are ignored while denormals are kept or the IEEE bit is set (ISA guide, "Output modifiers").
        scale = _OMOD[self.omod] if self.omod and flushing and not ieee_mode(descriptor) else None
        clamp, nan_to_zero = self.clamp, bool(descriptor.rsrc1 >> 21 & 1)
        limit = _SMALLEST_F16 if kind == "f16" else None
        if scale is None and not clamp and not flushing:
            return _FLOAT_BITS[kind]

        def finish(value: np.ndarray) -> np.ndarray:
            if scale is not None:
                value = value * value.dtype.type(scale) + value.dtype.type(0)
            if clamp:
                value = floats.clamp_to_one(value, nan_to_zero)
            if flushing:
                value = floats.flush(value, limit)
            return _FLOAT_BITS[kind](value)

        return finish

    def _sdwa_place(self, register: int) -> Callable[[Batch, Selection, np.ndarray], np.ndarray]:
        select, unused = self.result_select, self.result_unused
        if select > _DWORD or unused > _PRESERVE:
            raise UnknownInstruction(f"SDWA dst_sel {select}, dst_unused {unused}")
        shift, bits = (8 * select, 8) if select < 4 else (16 * (select - 4), 16)
        if unused == _PRESERVE:
            return _insert(register, shift, bits)
        if unused == _PAD:
            kept = np.uint32((1 << bits) - 1)
            return lambda batch, waves, value: (value & kept) << np.uint32(shift)
        up = np.uint32(32 - bits)
        # The bits above are copies of the sign, those below are zero.
        return lambda batch, waves, value: (
            ((value << up).view(np.int32) >> np.int32(up - shift)).view(np.uint32)
            & (np.uint32(0xFFFFFFFF << shift & 0xFFFFFFFF))
        )


def ieee_mode(descriptor: Descriptor) -> bool:
    """The IEEE bit of MODE at the kernel's start."""
    return bool(descriptor.rsrc1 >> 23 & 1)


def saturated(batch: Batch, waves: Selection, value: np.ndarray, largest: float) -> np.ndarray:
    """With MODE.FP16_OVFL, finite numbers clipped to the range of a narrower format; infinities and NaN stay."""
    chosen = batch.saturates_f16[waves]
    if not chosen.any():
        return value
    clipped = np.clip(value, value.dtype.type(-largest), value.dtype.type(largest))
    extra = (1,) * (value.ndim - 1)
    return np.where(np.isfinite(value) & chosen.reshape(-1, *extra), clipped, value)


def lane_mask(code: int) -> Reader:
    """An SGPR pair, or a constant, as bool [waves, 64] (or [1, 64])."""
    if code < 128:
        return lambda batch, waves: batch.read_lane_mask(waves, code)
    bits = operands.constant(code, None)
    if bits is None:
        raise UnknownInstruction(f"lane mask from source code {code}")
    lanes = np.array([[bits >> i & 1 for i in range(64)]], bool)
    return lambda batch, waves: lanes


def _sdwa_select(raw: Reader, source: Field) -> Reader:
    if source.select > _DWORD:
        raise UnknownInstruction(f"SDWA select {source.select}")
    shift, bits = (8 * source.select, 8) if source.select < 4 else (16 * (source.select - 4), 16)
    if source.sign_extend:
        left, right = np.uint32(32 - bits - shift), np.int32(32 - bits)
        return lambda batch, waves: ((raw(batch, waves) << left).view(np.int32) >> right).view(np.uint32)
    right_unsigned, mask = np.uint32(shift), np.uint32((1 << bits) - 1)
    return lambda batch, waves: raw(batch, waves) >> right_unsigned & mask


def _decoder(kind: str, raw: Reader, high: bool) -> Reader:
    if kind in ("u32", "b32", "u64", "b64"):
        return raw
    if width(kind) != 16:
        dtype = _FLOATS.get(kind) or _ARRAYS[kind]
        return lambda batch, waves: raw(batch, waves).view(dtype)
    if high:
        low = raw
        raw = lambda batch, waves: low(batch, waves) >> np.uint32(16)  # noqa: E731
    if kind == "f16":
        return lambda batch, waves: floats.from_f16(raw(batch, waves).astype(np.uint16))
    dtype = _FLOATS.get(kind) or _ARRAYS[kind]
    return lambda batch, waves: raw(batch, waves).astype(np.uint16).view(dtype)


def _sign_modifiers(kind: str, get: Reader, source: Field) -> Reader:
    negative, absolute = source.negative, source.absolute
    if kind in _FLOATS:
        if absolute and negative:
            return lambda batch, waves: -np.abs(get(batch, waves))
        if absolute:
            return lambda batch, waves: np.abs(get(batch, waves))
        return lambda batch, waves: -get(batch, waves)
    sign = _ARRAYS[kind](1 << (width(kind) - 1))

    def modified(batch: Batch, waves: Selection) -> np.ndarray:
        value = get(batch, waves)
        if absolute:
            value = value & ~sign
        return value ^ sign if negative else value

    return modified


def _flushing(kind: str, get: Reader) -> Reader:
    limit = _SMALLEST_F16 if kind == "f16" else None
    return lambda batch, waves: floats.flush(get(batch, waves), limit)


def _integer_bits(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    if width(kind) == 64:
        return lambda value: value.view(np.uint64)
    if width(kind) == 32:
        return lambda value: value.view(np.uint32)
    return lambda value: value.view(np.uint16).astype(np.uint32)


_FLOAT_BITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "f16": lambda value: floats.to_f16(value).astype(np.uint32),
    "half": lambda value: value.view(np.uint16).astype(np.uint32),
    "f32": lambda value: value.view(np.uint32),
    "f64": lambda value: value.view(np.uint64),
}


def _insert(register: int, shift: int, bits: int) -> Callable[[Batch, Selection, np.ndarray], np.ndarray]:
    """Put the low `bits` of a value at `shift` into the register's old content."""
    field = np.uint32(((1 << bits) - 1) << shift)

    def insert(batch: Batch, waves: Selection, value: np.ndarray) -> np.ndarray:
        return (batch.vgpr[register][waves] & ~field) | (value << np.uint32(shift) & field)

    return insert
