"""FLAT, GLOBAL and SCRATCH: loads, stores, loads to LDS, and atomics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import access
from .atomics import global_operation, perform
from .code_object import Descriptor
from .decode import Instruction
from .errors import OutOfRange, UnknownInstruction
from .state import AGPR, LANES, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

i64 = np.int64
_OFF = 127  # saddr: no scalar address
_NO_REGISTER = 124
Address = Callable[[Batch, Selection], np.ndarray]


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler:
    """FLAT, GLOBAL and SCRATCH instructions."""
    name = instruction.mnemonic
    if instruction.encoding == "SCRATCH":
        return _scratch(instruction, descriptor)
    address = _address(instruction)
    if "_atomic_" in name:
        return _atomic(instruction, address)
    if "_load_lds_" in name:
        return _to_lds(instruction, address)
    width = access.width_of(name)
    accumulator = AGPR if instruction.field("acc") else 0
    if "_store_" in name:
        register = instruction.field("data") - 256 + accumulator

        def store(batch: Batch, waves: Selection) -> None:
            active = batch.exec[waves]
            at = address(batch, waves)
            batch.registry.check(at, active, width.size, "write")
            access.notify_vmem(batch, waves, instruction, at, active, width.size, "write")
            offsets = access.global_offsets(at)
            access.store_from_registers(batch, waves, access.ADDRESS_SPACE, offsets, active, width, register)

        return store
    target = instruction.field("vdst") - 256 + accumulator

    def load(batch: Batch, waves: Selection) -> None:
        active = batch.exec[waves]
        at = address(batch, waves)
        batch.registry.check(at, active, width.size, "read")
        access.notify_vmem(batch, waves, instruction, at, active, width.size, "read")
        offsets = access.global_offsets(at)
        access.load_to_registers(batch, waves, access.ADDRESS_SPACE, offsets, active, width, target)

    return load


def _address(instruction: Instruction) -> Address:
    """Byte address per lane: a 64-bit VGPR pair, or a 64-bit SGPR pair plus a 32-bit VGPR; and the offset."""
    vector, scalar = instruction.field("addr") - 256, instruction.field("saddr")
    flat = instruction.encoding == "FLAT"
    constant = instruction.field("offset") if flat else instruction.signed("offset", 13)
    if flat or scalar in (_OFF, _NO_REGISTER):

        def pair(batch: Batch, waves: Selection) -> np.ndarray:
            high = batch.vgpr[vector + 1][waves].astype(i64) << 32
            return (high | batch.vgpr[vector][waves]) + constant

        return pair

    def scalar_and_vector(batch: Batch, waves: Selection) -> np.ndarray:
        base = batch.sgpr[scalar][waves].astype(i64) | batch.sgpr[scalar + 1][waves].astype(i64) << 32
        return (base + constant)[:, None] + batch.vgpr[vector][waves]

    return scalar_and_vector


def lds_target(batch: Batch, waves: Selection, constant: int, active: np.ndarray, size: int) -> np.ndarray:
    """Where a load to LDS goes: M0[15:0] + the instruction's offset + size * lane, bytes in the work-group's LDS."""
    base = (batch.sgpr[_NO_REGISTER][waves] & np.uint32(0xFFFF)).astype(i64)[:, None] + constant
    at = np.ascontiguousarray(np.broadcast_to(base + np.arange(LANES) * size, active.shape))
    wrong = active & (at + size > batch.lds_bytes)
    if wrong.any():
        wave, lane = np.argwhere(wrong)[0]
        raise OutOfRange(f"{size}-byte LDS write at byte {at[wave, lane]} by lane {lane}; LDS has {batch.lds_bytes}")
    return at


def move_to_lds(batch: Batch, waves: Selection, instruction, values, active, constant: int, words: int) -> None:
    at = lds_target(batch, waves, constant, active, 4 * words)
    access.notify_lds(batch, waves, instruction, at, active, 4 * words, "write")
    if active.any():
        access.lds_memory(batch).store_words(at + batch.lds_start[waves], active, values)


def _to_lds(instruction: Instruction, address: Address) -> Handler:
    width = access.width_of(instruction.mnemonic)
    if width.unit != 4 or width.words != 1:
        raise UnknownInstruction(f"{instruction.mnemonic} is not implemented (gfx942 compilers use the dword form)")
    constant = instruction.signed("offset", 13)

    def load(batch: Batch, waves: Selection) -> None:
        active = batch.exec[waves]
        if not active.any():
            return
        at = address(batch, waves)
        batch.registry.check(at, active, 4, "read")
        access.notify_vmem(batch, waves, instruction, at, active, 4, "read")
        values = access.ADDRESS_SPACE.load_words(access.safe_offsets(access.global_offsets(at), active), 1)
        move_to_lds(batch, waves, instruction, values, active, constant, 1)

    return load


def operands_of(batch: Batch, waves: Selection, register: int, words: int) -> np.ndarray:
    """One or two VGPRs as uint32 or uint64 [waves, 64]."""
    low = batch.vgpr[register][waves]
    if words == 1:
        return np.array(low)
    return low.astype(np.uint64) | batch.vgpr[register + 1][waves].astype(np.uint64) << np.uint64(32)


def _atomic(instruction: Instruction, address: Address) -> Handler:
    operation, words, two = global_operation(instruction.mnemonic.split("_atomic_")[1])
    accumulator = AGPR if instruction.field("acc") else 0
    data, target = instruction.field("data") - 256 + accumulator, instruction.field("vdst") - 256 + accumulator
    returns = bool(instruction.field("sc0"))

    def atomic(batch: Batch, waves: Selection) -> None:
        active = batch.exec[waves]
        at = address(batch, waves)
        batch.registry.check(at, active, 4 * words, "atomic")
        access.notify_vmem(batch, waves, instruction, at, active, 4 * words, "atomic")
        first = operands_of(batch, waves, data, words)
        second = operands_of(batch, waves, data + words, words) if two else None
        before = perform(access.ADDRESS_SPACE, access.global_offsets(at), active, operation, first, second)
        if returns:
            _write(batch, waves, target, before, active)

    return atomic


def _write(batch: Batch, waves: Selection, register: int, value: np.ndarray, active: np.ndarray) -> None:
    if value.dtype == np.uint64:
        batch.write_vgpr(waves, register + 1, (value >> np.uint64(32)).astype(np.uint32), active)
        value = (value & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    batch.write_vgpr(waves, register, value, active)


def _scratch(instruction: Instruction, descriptor: Descriptor) -> Handler:
    """Each lane has an array of its own; addresses are bytes from its start."""
    name = instruction.mnemonic
    if "_lds_" in name:
        raise UnknownInstruction(f"{name} is not implemented")
    width = access.width_of(name)
    accumulator = AGPR if instruction.field("acc") else 0
    vector = instruction.field("addr") - 256 if instruction.field("sve") else None
    scalar = instruction.field("saddr") if instruction.field("saddr") not in (_OFF, _NO_REGISTER) else None
    constant, size = instruction.signed("offset", 13), descriptor.scratch
    is_store = "_store_" in name
    register = instruction.field("data" if is_store else "vdst") - 256 + accumulator
    kind = "scratch_write" if is_store else "scratch_read"

    def run(batch: Batch, waves: Selection) -> None:
        active = batch.exec[waves]
        at = np.full(active.shape, constant, i64)
        if vector is not None:
            at += batch.vgpr[vector][waves]
        if scalar is not None:
            at += batch.sgpr[scalar][waves].astype(i64)[:, None]
        wrong = active & ((at < 0) | (at + width.size > size))
        if wrong.any():
            wave, lane = np.argwhere(wrong)[0]
            raise OutOfRange(f"{width.size}-byte scratch access at byte {at[wave, lane]} by lane {lane}; it has {size}")
        access.notify_vmem(batch, waves, instruction, at, active, width.size, kind)
        row = np.arange(batch.waves)[waves][:, None] * LANES + np.arange(LANES)
        offsets = at + row * batch.scratch.shape[2]
        memory = access.scratch_memory(batch)
        if is_store:
            access.store_from_registers(batch, waves, memory, offsets, active, width, register)
        else:
            access.load_to_registers(batch, waves, memory, offsets, active, width, register)

    return run
