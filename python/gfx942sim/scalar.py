"""Scalar ALU: SOP1, SOP2, SOPC, SOPK."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .code_object import Descriptor
from .decode import Instruction
from .errors import UnknownInstruction
from .operands import scalar, scalar64
from .scalar_tables import (
    ADDS,
    BITS,
    COMPARES,
    COUNTS,
    LOGIC,
    SHIFTS,
    bit_field_extract,
    signed,
)
from .state import EXEC, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

u32, u64, i64 = np.uint32, np.uint64, np.int64
_LOW = u64(0xFFFFFFFF)
Write = Callable[[Batch, Selection, np.ndarray], None]


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """SOP1, SOP2, SOPC and SOPK instructions."""
    name = instruction.mnemonic.removeprefix("s_")
    family = instruction.encoding.split("_")[0]
    if family == "SOPC":
        return _compare(instruction, name)
    if family == "SOPK":
        return _with_constant(instruction, name, descriptor)
    for make in (_logic, _moves, _shifts, _arithmetic, _bits, _program_counter):
        handler = make(instruction, name)
        if handler is not None:
            return handler
    raise UnknownInstruction(f"{instruction.mnemonic} is not implemented")


def writer(register: int, wide: bool) -> Write:
    """A function that writes uint32 (or uint64 to a pair) to an SGPR, EXEC included."""
    touches_exec = register in (EXEC, EXEC + 1) or (wide and register == EXEC - 1)

    def write(batch: Batch, waves: Selection, value: np.ndarray) -> None:
        if wide:
            batch.sgpr[register][waves] = (value & _LOW).astype(u32)
            batch.sgpr[register + 1][waves] = (value >> u64(32)).astype(u32)
        else:
            batch.sgpr[register][waves] = value
        if touches_exec:
            batch.sync_exec(waves)

    return write


def _source(instruction: Instruction, field: str, wide: bool):
    code, literal = instruction.field(field), instruction.literal
    return scalar64(code, literal) if wide else scalar(code, literal)


def _exec(batch: Batch, waves: Selection) -> np.ndarray:
    return batch.sgpr[EXEC][waves].astype(u64) | batch.sgpr[EXEC + 1][waves].astype(u64) << u64(32)


def _logic(instruction: Instruction, name: str) -> Handler | None:
    """Bitwise operations, and those that swap with EXEC."""
    base, _, width = name.rpartition("_")
    wide = width == "b64"
    write = writer(instruction.field("sdst"), wide) if base else None
    if base in LOGIC and instruction.has("ssrc1"):
        function = LOGIC[base]
        left, right = _source(instruction, "ssrc0", wide), _source(instruction, "ssrc1", wide)

        def two(batch: Batch, waves: Selection) -> None:
            result = function(left(batch, waves), right(batch, waves))
            write(batch, waves, result)
            batch.scc[waves] = result != 0

        return two
    swapped = re.fullmatch(r"(\w+)_(saveexec|wrexec)_b64", name)
    if swapped and swapped[1] in (*LOGIC, "andn1", "orn1"):
        old = _source(instruction, "ssrc0", True)
        first_inverted = swapped[1] in ("andn1", "orn1")
        function = LOGIC["and" if swapped[1] == "andn1" else "or" if swapped[1] == "orn1" else swapped[1]]
        keeps_old = swapped[2] == "saveexec"
        to_exec = writer(EXEC, True)

        def swap(batch: Batch, waves: Selection) -> None:
            value, before = old(batch, waves), _exec(batch, waves)
            result = function(~value if first_inverted else value, before)
            write(batch, waves, before if keeps_old else result)
            to_exec(batch, waves, result)
            batch.scc[waves] = result != 0

        return swap
    if base == "not":
        value = _source(instruction, "ssrc0", wide)

        def invert(batch: Batch, waves: Selection) -> None:
            result = ~value(batch, waves)
            write(batch, waves, result)
            batch.scc[waves] = result != 0

        return invert
    return None


def _moves(instruction: Instruction, name: str) -> Handler | None:
    base, _, width = name.rpartition("_")
    wide = width == "b64"
    if base == "mov":
        value, write = _source(instruction, "ssrc0", wide), writer(instruction.field("sdst"), wide)
        return lambda batch, waves: write(batch, waves, value(batch, waves))
    if base in ("cmov", "cselect"):
        register = instruction.field("sdst")
        chosen, write = _source(instruction, "ssrc0", wide), writer(register, wide)
        other = _source(instruction, "ssrc1", wide) if base == "cselect" else (scalar64 if wide else scalar)(register)

        def select(batch: Batch, waves: Selection) -> None:
            write(batch, waves, np.where(batch.scc[waves] != 0, chosen(batch, waves), other(batch, waves)))

        return select
    return None


def _shifts(instruction: Instruction, name: str) -> Handler | None:
    """Shifts, bit-field mask and extract: the second source is 32 bits wide in every width."""
    base, _, kind = name.rpartition("_")
    wide = kind.endswith("64")
    if base not in ("lshl", "lshr", "ashr", "bfe", "bfm"):
        return None
    write = writer(instruction.field("sdst"), wide)
    value = _source(instruction, "ssrc0", wide and base != "bfm")
    amount = _source(instruction, "ssrc1", False)
    if base == "bfm":
        one, bits = (u64(1), u64(63)) if wide else (u32(1), u32(31))
        kind_of = u64 if wide else u32

        def mask(batch: Batch, waves: Selection) -> None:
            size, at = (x.astype(kind_of) & bits for x in (value(batch, waves), amount(batch, waves)))
            write(batch, waves, ((one << size) - one) << at)

        return mask
    function = SHIFTS.get((base, wide)) or (lambda x, y: bit_field_extract(x, y, kind.startswith("i")))

    def shift(batch: Batch, waves: Selection) -> None:
        result = function(value(batch, waves), amount(batch, waves))
        write(batch, waves, result)
        batch.scc[waves] = result != 0

    return shift


def _arithmetic(instruction: Instruction, name: str) -> Handler | None:
    """Two 32-bit sources, a result and (for most) a carry, overflow or comparison in SCC."""
    function = ADDS.get(name)
    if function is None:
        return None
    write = writer(instruction.field("sdst"), False)
    left, right = _source(instruction, "ssrc0", False), _source(instruction, "ssrc1", False)

    def compute(batch: Batch, waves: Selection) -> None:
        result, condition = function(left(batch, waves), right(batch, waves), batch.scc[waves])
        write(batch, waves, result)
        if condition is not None:
            batch.scc[waves] = condition

    return compute


def _bits(instruction: Instruction, name: str) -> Handler | None:
    """One source: counts, searches, sign extension, reversal; and packs of two halves."""
    if name in COUNTS:
        function, wide, sets_scc = COUNTS[name]
        value, write = _source(instruction, "ssrc0", wide), writer(instruction.field("sdst"), False)

        def count(batch: Batch, waves: Selection) -> None:
            result = function(value(batch, waves))
            write(batch, waves, result)
            if sets_scc:
                batch.scc[waves] = result != 0

        return count
    if name in BITS:
        function, sets_scc = BITS[name]
        wide = name.endswith("b64")
        value, write = _source(instruction, "ssrc0", wide), writer(instruction.field("sdst"), wide)

        def change(batch: Batch, waves: Selection) -> None:
            result = function(value(batch, waves))
            write(batch, waves, result)
            if sets_scc:
                batch.scc[waves] = result != 0

        return change
    packs = re.fullmatch(r"pack_(ll|lh|hl|hh)_b32_b16", name)
    if packs:
        low_shift, high_shift = (u32(16 if half == "h" else 0) for half in packs[1])
        low, high = _source(instruction, "ssrc0", False), _source(instruction, "ssrc1", False)
        write = writer(instruction.field("sdst"), False)

        def pack(batch: Batch, waves: Selection) -> None:
            a = low(batch, waves) >> low_shift & u32(0xFFFF)
            write(batch, waves, a | (high(batch, waves) >> high_shift & u32(0xFFFF)) << u32(16))

        return pack
    sets = re.fullmatch(r"bitset([01])_b(32|64)", name)
    if sets:
        wide = sets[2] == "64"
        kind, limit = (u64, 63) if wide else (u32, 31)
        register = instruction.field("sdst")
        index, old = _source(instruction, "ssrc0", False), (scalar64 if wide else scalar)(register)
        write = writer(register, wide)

        def set_bit(batch: Batch, waves: Selection) -> None:
            bit = kind(1) << (index(batch, waves) & u32(limit)).astype(kind)
            before = old(batch, waves)
            write(batch, waves, before | bit if sets[1] == "1" else before & ~bit)

        return set_bit
    return None


def _program_counter(instruction: Instruction, name: str) -> Handler | None:
    """Absolute addresses: `batch.pc` counts from the start of the image."""
    after = instruction.address + instruction.size
    if name == "getpc_b64":
        write = writer(instruction.field("sdst"), True)
        return lambda batch, waves: write(batch, waves, np.full(1, batch.image_base + after, u64))
    if name in ("setpc_b64", "swappc_b64"):
        target = _source(instruction, "ssrc0", True)
        write = writer(instruction.field("sdst"), True) if name == "swappc_b64" else None

        def jump(batch: Batch, waves: Selection) -> None:
            to = target(batch, waves).astype(i64) - batch.image_base
            if write is not None:
                write(batch, waves, np.full(1, batch.image_base + after, u64))
            batch.pc[waves] = to

        return jump
    return None


def _compare(instruction: Instruction, name: str) -> Handler:
    bit = re.fullmatch(r"bitcmp([01])_b(32|64)", name)
    if bit:
        wide = bit[2] == "64"
        kind, limit = (u64, 63) if wide else (u32, 31)
        value, index = _source(instruction, "ssrc0", wide), _source(instruction, "ssrc1", False)
        wanted = kind(int(bit[1]))

        def test(batch: Batch, waves: Selection) -> None:
            shifted = value(batch, waves) >> (index(batch, waves) & u32(limit)).astype(kind)
            batch.scc[waves] = (shifted & kind(1)) == wanted

        return test
    parts = re.fullmatch(r"cmp_(\w+)_(i32|u32|u64)", name)
    if not parts or parts[1] not in COMPARES:
        raise UnknownInstruction(f"{instruction.mnemonic} is not implemented")
    function, wide, is_signed = COMPARES[parts[1]], parts[2] == "u64", parts[2] == "i32"
    left, right = _source(instruction, "ssrc0", wide), _source(instruction, "ssrc1", wide)

    def compare(batch: Batch, waves: Selection) -> None:
        a, b = left(batch, waves), right(batch, waves)
        batch.scc[waves] = function(signed(a), signed(b)) if is_signed else function(a, b)

    return compare


def _with_constant(instruction: Instruction, name: str, descriptor: Descriptor) -> Handler | None:
    register, write = instruction.field("sdst"), writer(instruction.field("sdst"), False)
    constant = instruction.signed("simm16", 16)
    word = u32(constant & 0xFFFFFFFF)
    if name == "movk_i32":
        return lambda batch, waves: write(batch, waves, np.full(1, word, u32))
    if name == "cmovk_i32":
        return lambda batch, waves: write(
            batch, waves, np.where(batch.scc[waves] != 0, word, batch.sgpr[register][waves])
        )
    if name == "mulk_i32":
        return lambda batch, waves: write(batch, waves, batch.sgpr[register][waves] * word)
    if name == "addk_i32":
        add = ADDS["add_i32"]

        def addk(batch: Batch, waves: Selection) -> None:
            result, overflow = add(batch.sgpr[register][waves], np.full(1, word, u32), None)
            write(batch, waves, result)
            batch.scc[waves] = overflow

        return addk
    compares = re.fullmatch(r"cmpk_(\w+)_(i32|u32)", name)
    if compares and compares[1] in COMPARES:
        function = COMPARES[compares[1]]
        if compares[2] == "i32":
            limit = np.int32(constant)
            return lambda batch, waves: batch.scc.__setitem__(
                waves, function(signed(batch.sgpr[register][waves]), limit)
            )
        unsigned = u32(instruction.field("simm16"))
        return lambda batch, waves: batch.scc.__setitem__(waves, function(batch.sgpr[register][waves], unsigned))
    if name in ("setreg_imm32_b32", "setreg_b32", "getreg_b32"):
        return _hardware_register(instruction, name, descriptor, write)
    if name == "call_b64":
        after, target = instruction.address + instruction.size, instruction.branch_target
        link = writer(register, True)

        def call(batch: Batch, waves: Selection) -> None:
            link(batch, waves, np.full(1, batch.image_base + after, u64))
            batch.pc[waves] = target

        return call
    raise UnknownInstruction(f"{instruction.mnemonic} is not implemented")


# Hardware registers by number (ISA guide, "Hardware registers"); simm16 is size - 1, offset, number.
_MODE, _XCC_ID = 1, 20


def _hardware_register(instruction: Instruction, name: str, descriptor: Descriptor, write: Write) -> Handler:
    where = instruction.field("simm16")
    number, offset, size = where & 63, where >> 6 & 31, (where >> 11) + 1
    mask = ((1 << size) - 1) << offset
    # MODE: rounding 3:0, denormals 7:4, DX10 clamp 8, IEEE 9, as the descriptor sets them.
    mode = descriptor.rsrc1 >> 12 & 0xFF | (descriptor.rsrc1 >> 21 & 1) << 8 | (descriptor.rsrc1 >> 23 & 1) << 9
    if name == "getreg_b32":
        values = {_MODE: mode, _XCC_ID: 0}
        if number not in values:
            raise UnknownInstruction(f"s_getreg of hardware register {number}; known: MODE (1), XCC_ID (20)")
        value = np.full(1, (values[number] & mask) >> offset, u32)
        return lambda batch, waves: write(batch, waves, value)
    if number != _MODE:
        raise UnknownInstruction(f"s_setreg of hardware register {number}; known: MODE (1)")
    source = scalar(255, instruction.literal) if name == "setreg_imm32_b32" else scalar(instruction.field("sdst"))
    fixed = mask & 0xFF  # rounding and denormals are part of the translation

    def set_mode(batch: Batch, waves: Selection) -> None:
        wanted = source(batch, waves).astype(u64) << u64(offset)
        if ((wanted ^ u64(mode)) & u64(fixed)).any():
            raise UnknownInstruction("s_setreg changes rounding or denormals from what the kernel started with")

    return set_mode
