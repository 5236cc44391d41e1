"""SOP1, SOP2, SOPC and SOPK: the scalar ALU. What it computes is in scalar_tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import scalar_tables as tables
from .code_object import Descriptor
from .decode import Instruction
from .errors import OutOfRange, UnknownInstruction
from .hardware_registers import getreg, setreg
from .operands import Source, constant, scalar, scalar64
from .program_counter import PROGRAM_COUNTER
from .state import EXEC, M0, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

# Writes a result for the selected waves. value: integers that broadcast to [waves]; the low bits are what is kept.
Store = Callable[[Batch, Selection, np.ndarray], None]
_SGPRS = 108  # s0 to s101, flat scratch, XNACK mask, VCC: what M0-relative moves may reach


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """One scalar instruction. Raises UnknownInstruction for what a compiler for gfx942 compute code never emits."""
    name = instruction.mnemonic
    words = name.split("_")
    if name in ("s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32"):
        return _hardware_register(instruction, descriptor)
    if name in PROGRAM_COUNTER:
        return PROGRAM_COUNTER[name](instruction)
    if name in _CONSTANT:
        return _CONSTANT[name](instruction)
    if words[1] == "cmpk":
        return _compare_constant(instruction)
    if words[1] in ("cmp", "bitcmp0", "bitcmp1"):
        return _compare(instruction)
    if words[-2:] in (["saveexec", "b64"], ["wrexec", "b64"]):
        return _exec_logic(instruction)
    if words[1] in tables.BITWISE and len(words) == 3:
        return _bitwise(instruction)
    if name in _MOVES:
        return _MOVES[name](instruction)
    if name in tables.UNARY:
        return _unary(instruction)
    if name in tables.BINARY:
        return _binary(instruction)
    if name in tables.WITH_SCC:
        return _with_scc(instruction)
    raise UnknownInstruction(f"{name} is not implemented")


def _width(instruction: Instruction, field: str) -> int:
    """64 or 32: what the instruction tables say an operand is (a 16-bit source is the low half of an SGPR)."""
    return 64 if instruction.raw.op_bits.get(field, 32) == 64 else 32


def _source(instruction: Instruction, field: str) -> Source:
    """uint32 or uint64 [waves] or [1], by the width of the operand. Literals of 64-bit signed sources are signed."""
    code, literal = instruction.field(field), instruction.literal
    if _width(instruction, field) == 32:
        return scalar(code, literal)
    # Unsigned and bit-field instructions extend their 32-bit literal with zeros.
    if literal is not None and instruction.mnemonic.endswith("_i64") and literal >> 31:
        literal |= 0xFFFFFFFF << 32
    return scalar64(code, literal)


def _pair(instruction: Instruction, field: str) -> Source:
    """A 64-bit source as uint32 [2, waves] or [2, 1] (low word first): cheaper where words can be treated alone."""
    code, literal = instruction.field(field), instruction.literal
    if code < 128:
        return lambda batch, waves: batch.sgpr[code : code + 2, waves]
    bits = constant(code, literal, "f64" if 240 <= code <= 248 else "f32")
    if bits is None:
        raise UnknownInstruction(f"64-bit scalar source code {code}")
    value = np.array([[bits & 0xFFFFFFFF], [bits >> 32 & 0xFFFFFFFF]], np.uint32)
    return lambda batch, waves: value


def _store(instruction: Instruction) -> Store:
    """Writes integers to sdst, one or two SGPRs by its width."""
    register, width = instruction.field("sdst"), _width(instruction, "sdst")
    writes_exec = register in (EXEC, EXEC + 1)

    def store32(batch: Batch, waves: Selection, value: np.ndarray) -> None:
        batch.sgpr[register][waves] = value

    def store64(batch: Batch, waves: Selection, value: np.ndarray) -> None:
        batch.sgpr[register][waves] = value & np.uint64(0xFFFFFFFF)
        batch.sgpr[register + 1][waves] = value >> np.uint64(32)

    def store_exec(batch: Batch, waves: Selection, value: np.ndarray) -> None:
        (store64 if width == 64 else store32)(batch, waves, value)
        batch.sync_exec(waves)

    return store_exec if writes_exec else store64 if width == 64 else store32


def _store_pair(batch: Batch, waves: Selection, register: int, value: np.ndarray) -> None:
    batch.sgpr[register : register + 2, waves] = value
    if register == EXEC:
        batch.sync_exec(waves)


def _unary(instruction: Instruction) -> Handler:
    compute, sets_scc = tables.UNARY[instruction.mnemonic]
    read, store = _source(instruction, "ssrc0"), _store(instruction)

    def run(batch: Batch, waves: Selection) -> None:
        result = compute(read(batch, waves))
        store(batch, waves, result)
        if sets_scc:
            batch.scc[waves] = result != 0

    return run


def _binary(instruction: Instruction) -> Handler:
    compute, sets_scc = tables.BINARY[instruction.mnemonic]
    left, right, store = _source(instruction, "ssrc0"), _source(instruction, "ssrc1"), _store(instruction)

    def run(batch: Batch, waves: Selection) -> None:
        result = compute(left(batch, waves), right(batch, waves))
        store(batch, waves, result)
        if sets_scc:
            batch.scc[waves] = result != 0

    return run


def _with_scc(instruction: Instruction) -> Handler:
    compute = tables.WITH_SCC[instruction.mnemonic]
    left, right, store = _source(instruction, "ssrc0"), _source(instruction, "ssrc1"), _store(instruction)

    def run(batch: Batch, waves: Selection) -> None:
        result, scc = compute(left(batch, waves), right(batch, waves), batch.scc[waves])
        store(batch, waves, result)
        batch.scc[waves] = scc

    return run


def _bitwise(instruction: Instruction) -> Handler:
    compute, register = tables.BITWISE[instruction.mnemonic.split("_")[1]], instruction.field("sdst")
    if _width(instruction, "sdst") == 64:
        left, right = _pair(instruction, "ssrc0"), _pair(instruction, "ssrc1")

        def run64(batch: Batch, waves: Selection) -> None:
            result = compute(left(batch, waves), right(batch, waves))
            _store_pair(batch, waves, register, result)
            batch.scc[waves] = (result[0] | result[1]) != 0

        return run64
    left, right, store = _source(instruction, "ssrc0"), _source(instruction, "ssrc1"), _store(instruction)

    def run32(batch: Batch, waves: Selection) -> None:
        result = compute(left(batch, waves), right(batch, waves))
        store(batch, waves, result)
        batch.scc[waves] = result != 0

    return run32


def _exec_logic(instruction: Instruction) -> Handler:
    """EXEC = f(source, EXEC); the destination gets the old EXEC (saveexec) or the new one (wrexec)."""
    _, function, kind, _ = instruction.mnemonic.split("_")
    compute = (tables.SAVEEXEC if kind == "saveexec" else tables.WREXEC)[function]
    source, register = _pair(instruction, "ssrc0"), instruction.field("sdst")
    if register == EXEC:
        raise UnknownInstruction(f"{instruction.mnemonic} with EXEC as its destination")

    def run(batch: Batch, waves: Selection) -> None:
        before = batch.sgpr[EXEC : EXEC + 2, waves]
        after = compute(source(batch, waves), before)
        batch.sgpr[register : register + 2, waves] = before if kind == "saveexec" else after
        _store_pair(batch, waves, EXEC, after)
        batch.scc[waves] = (after[0] | after[1]) != 0

    return run


def _move(instruction: Instruction) -> Handler:
    register, conditional = instruction.field("sdst"), instruction.mnemonic.startswith("s_cmov")
    is_pair = _width(instruction, "sdst") == 64
    read, store = (_pair if is_pair else _source)(instruction, "ssrc0"), _store(instruction)

    def run(batch: Batch, waves: Selection) -> None:
        value = read(batch, waves)
        if conditional:
            old = batch.sgpr[register : register + 2, waves] if is_pair else batch.sgpr[register][waves]
            value = np.where(batch.scc[waves], value, old)
        if is_pair:
            _store_pair(batch, waves, register, value)
        else:
            store(batch, waves, value)

    return run


def _select(instruction: Instruction) -> Handler:
    register, is_pair = instruction.field("sdst"), _width(instruction, "sdst") == 64
    read, store = _pair if is_pair else _source, _store(instruction)
    left, right = read(instruction, "ssrc0"), read(instruction, "ssrc1")

    def run(batch: Batch, waves: Selection) -> None:
        value = np.where(batch.scc[waves], left(batch, waves), right(batch, waves))
        if is_pair:
            _store_pair(batch, waves, register, value)
        else:
            store(batch, waves, value)

    return run


def _not(instruction: Instruction) -> Handler:
    register, is_pair = instruction.field("sdst"), _width(instruction, "sdst") == 64
    read, store = (_pair if is_pair else _source)(instruction, "ssrc0"), _store(instruction)

    def run(batch: Batch, waves: Selection) -> None:
        result = ~read(batch, waves)
        if is_pair:
            _store_pair(batch, waves, register, result)
            batch.scc[waves] = (result[0] | result[1]) != 0
        else:
            store(batch, waves, result)
            batch.scc[waves] = result != 0

    return run


def _set_bit(instruction: Instruction) -> Handler:
    register, is_pair = instruction.field("sdst"), _width(instruction, "sdst") == 64
    read, store = scalar(instruction.field("ssrc0"), instruction.literal), _store(instruction)
    old = scalar64(register) if is_pair else scalar(register)
    one = np.uint64(1) if is_pair else np.uint32(1)
    sets = instruction.mnemonic.startswith("s_bitset1")

    def run(batch: Batch, waves: Selection) -> None:
        value = old(batch, waves)
        bit = one << (read(batch, waves) & np.uint32(63 if is_pair else 31)).astype(one.dtype)
        store(batch, waves, value | bit if sets else value & ~bit)

    return run


def _relative_move(instruction: Instruction) -> Handler:
    """s_movrels and s_movreld: M0 is added to the number of the source or destination register, per wave."""
    count = _width(instruction, "sdst") // 32
    from_source = instruction.mnemonic.startswith("s_movrels")
    register = instruction.field("ssrc0" if from_source else "sdst")
    if register >= _SGPRS:
        raise UnknownInstruction(f"{instruction.mnemonic} from source code {register}")
    source = None if from_source else (_pair if count == 2 else _source)(instruction, "ssrc0")
    target = instruction.field("sdst")

    def run(batch: Batch, waves: Selection) -> None:
        numbers = np.arange(batch.waves)[waves]
        moved = register + batch.sgpr[M0][waves].view(np.int32).astype(np.int64)
        if moved.min() < 0 or moved.max() + count > _SGPRS:
            raise OutOfRange(f"M0 leads to s{moved.min()}..s{moved.max() + count - 1}; there are {_SGPRS} SGPRs")
        rows = moved + np.arange(count)[:, None]
        if source is None:
            batch.sgpr[target : target + count, waves] = batch.sgpr[rows, numbers]
            if target + count > EXEC:
                batch.sync_exec(waves)
        else:
            batch.sgpr[rows, numbers] = source(batch, waves)

    return run


_MOVES: dict[str, Callable[[Instruction], Handler]] = {
    **{f"s_{name}_{width}": _move for name in ("mov", "cmov") for width in ("b32", "b64")},
    **{f"s_{name}_{width}": _relative_move for name in ("movrels", "movreld") for width in ("b32", "b64")},
    **{f"s_{name}_{width}": _set_bit for name in ("bitset0", "bitset1") for width in ("b32", "b64")},
    **{f"s_cselect_{width}": _select for width in ("b32", "b64")},
    **{f"s_not_{width}": _not for width in ("b32", "b64")},
}


def _compare(instruction: Instruction) -> Handler:
    left, right = _source(instruction, "ssrc0"), _source(instruction, "ssrc1")
    words = instruction.mnemonic.split("_")
    if words[1] == "cmp":
        compare, is_signed = tables.COMPARE[words[2]], words[3] == "i32"

        def run(batch: Batch, waves: Selection) -> None:
            a, b = left(batch, waves), right(batch, waves)
            batch.scc[waves] = compare(a.view(np.int32), b.view(np.int32)) if is_signed else compare(a, b)

        return run
    wanted, last = int(words[1][-1]), np.uint32(_width(instruction, "ssrc0") - 1)

    def run_bit(batch: Batch, waves: Selection) -> None:
        value = left(batch, waves)
        bit = value >> (right(batch, waves) & last).astype(value.dtype) & value.dtype.type(1)
        batch.scc[waves] = bit == wanted

    return run_bit


def _compare_constant(instruction: Instruction) -> Handler:
    _, _, relation, kind = instruction.mnemonic.split("_")
    register, compare = instruction.field("sdst"), tables.COMPARE[relation]
    if kind == "i32":
        signed_value = np.int32(instruction.signed("simm16", 16))

        def run_signed(batch: Batch, waves: Selection) -> None:
            batch.scc[waves] = compare(batch.sgpr[register][waves].view(np.int32), signed_value)

        return run_signed
    value = np.uint32(instruction.field("simm16"))

    def run(batch: Batch, waves: Selection) -> None:
        batch.scc[waves] = compare(batch.sgpr[register][waves], value)

    return run


def _constant(instruction: Instruction) -> Handler:
    """s_movk, s_cmovk, s_addk, s_mulk: a sign-extended 16-bit constant with the destination."""
    register, store = instruction.field("sdst"), _store(instruction)
    value = np.full(1, instruction.signed("simm16", 16) & 0xFFFFFFFF, np.uint32)
    name = instruction.mnemonic

    def run(batch: Batch, waves: Selection) -> None:
        old = batch.sgpr[register][waves]
        if name == "s_movk_i32":
            store(batch, waves, value)
        elif name == "s_cmovk_i32":
            store(batch, waves, np.where(batch.scc[waves], value, old))
        elif name == "s_mulk_i32":
            store(batch, waves, old * value)
        else:
            result, batch.scc[waves] = tables.add_signed(old, value, batch.scc)
            store(batch, waves, result)

    return run


_CONSTANT = dict.fromkeys(("s_movk_i32", "s_cmovk_i32", "s_addk_i32", "s_mulk_i32"), _constant)


def _hardware_register(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    if instruction.mnemonic == "s_getreg_b32":
        value, store = np.full(1, getreg(instruction.field("simm16"), descriptor), np.uint32), _store(instruction)
        return lambda batch, waves: store(batch, waves, value)
    write = setreg(instruction.field("simm16"), descriptor)
    if instruction.mnemonic == "s_setreg_imm32_b32":
        written = np.full(1, instruction.literal, np.uint32)
        return lambda batch, waves: write(batch, waves, written)
    register = instruction.field("sdst")
    return lambda batch, waves: write(batch, waves, batch.sgpr[register][waves])
