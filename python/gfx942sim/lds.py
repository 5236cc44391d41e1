"""DS: reads, writes, atomics on LDS, and the lane exchanges that use its crossbar (lds_lanes.py)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from . import access, lds_lanes
from .atomics import FLOAT, INTEGER, perform
from .code_object import Descriptor
from .decode import Instruction
from .errors import OutOfRange, UnknownInstruction
from .flat_memory import _write, operands_of
from .state import AGPR, LANES, M0, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

i64 = np.int64
_ACCESS = re.compile(r"ds_(read|write)(2?)(st64)?_(u8|i8|u16|i16|b8|b16|b32|b64|b96|b128)(_d16)?(_hi)?")
_ADDTID = re.compile(r"ds_(read|write)_addtid_b32")
_ATOMIC = re.compile(r"ds_(pk_add|\w+?)(2?)(st64)?(_rtn)?_(u32|i32|b32|f32|u64|i64|b64|f64|f16|bf16)")
_NAMES = {"wrxchg": "swap", "cmpst": "cmpst"}


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """DS instructions."""
    name = instruction.mnemonic
    if name == "ds_nop":
        return None
    if instruction.field("gds"):
        raise UnknownInstruction(f"{name}: global data share is not implemented")
    if name in lds_lanes.NAMES:
        return lds_lanes.translate(instruction)
    if match := _ADDTID.fullmatch(name):
        return _by_thread(instruction, match[1] == "write")
    if match := _ACCESS.fullmatch(name):
        return _access(instruction, match)
    if match := _ATOMIC.fullmatch(name):
        return _atomic(instruction, match)
    raise UnknownInstruction(f"{name} is not implemented")


def offset_of(instruction: Instruction) -> int:
    return instruction.field("offset0") | instruction.field("offset1") << 8


def check(batch: Batch, waves: Selection, at: np.ndarray, active: np.ndarray, size: int, kind: str) -> None:
    """Raise OutOfRange for an active access past the end. (The hardware gives 0: here it is a fault on purpose.)"""
    if not active.any():
        return
    highest = at.max() if active.all() else at[active].max()
    if highest + size <= batch.lds_bytes:
        return
    row, lane = np.argwhere(active & (at + size > batch.lds_bytes))[0]
    wave = int(np.arange(batch.waves)[waves][row])
    raise OutOfRange(
        f"{size}-byte LDS {kind} at byte {at[row, lane]} by lane {lane} of wave {batch.wave_in_group[wave]} of "
        f"work-group {batch.workgroup_ids[batch.group_of[wave]]}, which has {batch.lds_bytes} bytes"
    )


def _access(instruction: Instruction, match: re.Match) -> Handler:
    direction, twice, far, kind, d16, high = match.groups()
    bits = int(kind[1:])
    half = "high" if high else "low" if d16 else None
    width = access.Width(min(4, bits // 8), max(1, bits // 32), kind[0] == "i", half)
    accumulator = AGPR if instruction.field("acc") else 0
    is_write = direction == "write"
    registers = [instruction.field("data0") - 256 + accumulator, instruction.field("data1") - 256 + accumulator]
    if not is_write:
        first = instruction.field("vdst") - 256 + accumulator
        registers = [first, first + width.words]
    if twice:
        scale = width.size * (64 if far else 1)
        offsets = [instruction.field("offset0") * scale, instruction.field("offset1") * scale]
    else:
        offsets, registers = [offset_of(instruction)], registers[:1]
    address_register = instruction.field("addr") - 256
    word = direction

    def run(batch: Batch, waves: Selection) -> None:
        active = batch.exec[waves]
        if not active.any():
            return
        base = batch.vgpr[address_register][waves].astype(i64)
        memory, start = access.lds_memory(batch), batch.lds_start[waves]
        found = []
        for offset, register in zip(offsets, registers, strict=True):
            at = base + offset
            check(batch, waves, at, active, width.size, word)
            access.notify_lds(batch, waves, instruction, at, active, width.size, word)
            if is_write:
                access.store_from_registers(batch, waves, memory, at + start, active, width, register)
            else:
                safe = access.safe_offsets(at + start, active)
                values = (
                    memory.load_words(safe, width.words) if width.unit == 4 else [memory.load_small(safe, width.unit)]
                )
                found += [(register + j, access.extend(v, width)) for j, v in enumerate(values)]
        for register, value in found:
            batch.write_vgpr(waves, register, access.merge(value, batch.vgpr[register][waves], width), active)

    return run


def _by_thread(instruction: Instruction, is_write: bool) -> Handler:
    """Address M0[15:0] + offset + 4 * lane."""
    accumulator = AGPR if instruction.field("acc") else 0
    register = instruction.field("data0" if is_write else "vdst") - 256 + accumulator
    constant, width = offset_of(instruction), access.Width(4, 1)
    kind = "write" if is_write else "read"

    def run(batch: Batch, waves: Selection) -> None:
        active = batch.exec[waves]
        base = (batch.sgpr[M0][waves] & np.uint32(0xFFFF)).astype(i64)[:, None] + constant
        at = np.ascontiguousarray(np.broadcast_to(base + 4 * np.arange(LANES), active.shape))
        check(batch, waves, at, active, 4, kind)
        access.notify_lds(batch, waves, instruction, at, active, 4, kind)
        move = access.store_from_registers if is_write else access.load_to_registers
        move(batch, waves, access.lds_memory(batch), at + batch.lds_start[waves], active, width, register)

    return run


def _operation(instruction: Instruction, base: str, kind: str):
    """(function, dwords, has two operands)."""
    if f"{base}_{kind}" in FLOAT:
        return (*FLOAT[f"{base}_{kind}"], base == "cmpst")
    name = _NAMES.get(base, base)
    if base in ("min", "max"):
        name = ("s" if kind[0] == "i" else "u") + base
    if name not in INTEGER or kind[0] == "f":
        raise UnknownInstruction(f"{instruction.mnemonic} is not implemented")
    return INTEGER[name], int(kind[1:]) // 32, base in ("cmpst", "mskor")


def _atomic(instruction: Instruction, match: re.Match) -> Handler:
    base, twice, far, returns, kind = match.groups()
    operation, words, two = _operation(instruction, base, kind)
    accumulator = AGPR if instruction.field("acc") else 0
    data = [instruction.field(f"data{i}") - 256 + accumulator for i in range(2)]
    target, address_register = instruction.field("vdst") - 256 + accumulator, instruction.field("addr") - 256
    size = 4 * words
    if twice:
        scale = size * (64 if far else 1)
        turns = [(instruction.field(f"offset{i}") * scale, data[i], target + i * words) for i in range(2)]
    else:
        turns = [(offset_of(instruction), data[0], target)]

    def run(batch: Batch, waves: Selection) -> None:
        active = batch.exec[waves]
        if not active.any():
            return
        start, memory = batch.vgpr[address_register][waves].astype(i64), access.lds_memory(batch)
        found = []
        for offset, register, to in turns:
            at = start + offset
            check(batch, waves, at, active, size, "atomic")
            access.notify_lds(batch, waves, instruction, at, active, size, "atomic")
            first = operands_of(batch, waves, register, words)
            second = operands_of(batch, waves, data[1], words) if two else None
            found.append((to, perform(memory, at + batch.lds_start[waves], active, operation, first, second)))
        if returns:
            for to, before in found:
                _write(batch, waves, to, before, active)

    return run
