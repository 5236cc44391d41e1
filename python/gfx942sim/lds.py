"""DS instructions: reads, writes and atomics of LDS. Those that only move data between lanes are in lds_lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import atomics, lds_lanes
from .access import (
    Place,
    Transfer,
    active_lanes,
    lds_place,
    load,
    read_words,
    register_of,
    store,
    tell_lds,
    write_loaded,
    write_words,
)
from .code_object import Descriptor
from .decode import Instruction
from .errors import UnknownInstruction
from .state import LANE, M0, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

_Address = Callable[[Batch, Selection], np.ndarray]

_READS = {
    "ds_read_u8": Transfer(1),
    "ds_read_i8": Transfer(1, signed=True),
    "ds_read_u16": Transfer(2),
    "ds_read_i16": Transfer(2, signed=True),
    "ds_read_b32": Transfer(4),
    "ds_read_b64": Transfer(8),
    "ds_read_b96": Transfer(12),
    "ds_read_b128": Transfer(16),
    "ds_read_u8_d16": Transfer(1, half="low"),
    "ds_read_u8_d16_hi": Transfer(1, half="high"),
    "ds_read_i8_d16": Transfer(1, signed=True, half="low"),
    "ds_read_i8_d16_hi": Transfer(1, signed=True, half="high"),
    "ds_read_u16_d16": Transfer(2, half="low"),
    "ds_read_u16_d16_hi": Transfer(2, half="high"),
    "ds_read_addtid_b32": Transfer(4),
}
_WRITES = {
    "ds_write_b8": Transfer(1),
    "ds_write_b16": Transfer(2),
    "ds_write_b32": Transfer(4),
    "ds_write_b64": Transfer(8),
    "ds_write_b96": Transfer(12),
    "ds_write_b128": Transfer(16),
    "ds_write_b8_d16_hi": Transfer(1, half="high"),
    "ds_write_b16_d16_hi": Transfer(2, half="high"),
    "ds_write_addtid_b32": Transfer(4),
}
# Two accesses: (bytes of each, bytes that the 8-bit offsets count).
_READ_PAIRS = {
    "ds_read2_b32": (4, 4),
    "ds_read2st64_b32": (4, 256),
    "ds_read2_b64": (8, 8),
    "ds_read2st64_b64": (8, 512),
}
_WRITE_PAIRS = {name.replace("read", "write"): sizes for name, sizes in _READ_PAIRS.items()}
_EXCHANGE_PAIRS = {
    "ds_wrxchg2_rtn_b32": (4, 4),
    "ds_wrxchg2st64_rtn_b32": (4, 256),
    "ds_wrxchg2_rtn_b64": (8, 8),
    "ds_wrxchg2st64_rtn_b64": (8, 512),
}
_WAVE_COUNTERS = {"ds_append": np.add, "ds_consume": np.subtract}


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """DS instructions."""
    name = instruction.mnemonic
    if name == "ds_nop":
        return None
    if instruction.field("gds"):
        raise UnknownInstruction("gfx942 has no GDS")
    if name in lds_lanes.TABLE:
        return lds_lanes.TABLE[name](instruction)
    if name in _READS:
        return _read(instruction, _READS[name])
    if name in _WRITES:
        return _write(instruction, _WRITES[name])
    if name in _READ_PAIRS:
        return _read_pair(instruction, *_READ_PAIRS[name])
    if name in _WRITE_PAIRS:
        return _write_pair(instruction, *_WRITE_PAIRS[name])
    if name in _EXCHANGE_PAIRS:
        return _exchange_pair(instruction, *_EXCHANGE_PAIRS[name])
    if name in atomics.LDS:
        return _atomic(instruction, *atomics.LDS[name])
    if name in _WAVE_COUNTERS:
        return _wave_counter(instruction, _WAVE_COUNTERS[name])
    raise UnknownInstruction(f"{name} is not implemented")


def _address(instruction: Instruction, offset: int) -> _Address:
    """The byte address, uint32 [waves, 64]. It wraps at 2**32, so a negative base with an offset works."""
    if instruction.mnemonic.endswith("_addtid_b32"):
        lanes = LANE.astype(np.uint32) * np.uint32(4) + np.uint32(offset)
        return lambda batch, waves: (batch.sgpr[M0][waves] & np.uint32(0xFFFF))[:, None] + lanes
    register = register_of(instruction, "addr", accumulator=False)
    if offset == 0:
        return lambda batch, waves: batch.vgpr[register][waves]
    added = np.uint32(offset)
    return lambda batch, waves: batch.vgpr[register][waves] + added


def _whole_offset(instruction: Instruction) -> int:
    return instruction.field("offset0") | instruction.field("offset1") << 8


def _pair_addresses(instruction: Instruction, unit: int) -> tuple[_Address, _Address]:
    first, second = (_address(instruction, instruction.field(f"offset{i}") * unit) for i in range(2))
    return first, second


def _read(instruction: Instruction, transfer: Transfer) -> Handler:
    address_of, size = _address(instruction, _whole_offset(instruction)), transfer.size
    register = register_of(instruction, "vdst")

    def read(batch: Batch, waves: Selection) -> None:
        active = active_lanes(batch, waves)
        if active is None:
            return
        address = address_of(batch, waves)
        place = lds_place(batch, waves, address, *active, size, "read")
        words = load(place, size)
        tell_lds(batch, waves, instruction, address, active[0], size, "read")
        write_loaded(batch, waves, register, words, transfer, place.lanes)

    return read


def _write(instruction: Instruction, transfer: Transfer) -> Handler:
    address_of, size = _address(instruction, _whole_offset(instruction)), transfer.size
    register = register_of(instruction, "data0")

    def write(batch: Batch, waves: Selection) -> None:
        active = active_lanes(batch, waves)
        if active is None:
            return
        address = address_of(batch, waves)
        place = lds_place(batch, waves, address, *active, size, "write")
        store(place, size, read_words(batch, waves, register, transfer))
        tell_lds(batch, waves, instruction, address, active[0], size, "write")

    return write


def _read_pair(instruction: Instruction, size: int, unit: int) -> Handler:
    addresses, register = _pair_addresses(instruction, unit), register_of(instruction, "vdst")

    def read2(batch: Batch, waves: Selection) -> None:
        active = active_lanes(batch, waves)
        if active is None:
            return
        words: list[np.ndarray] = []
        for address_of in addresses:
            address = address_of(batch, waves)
            place = lds_place(batch, waves, address, *active, size, "read")
            words += load(place, size)
            tell_lds(batch, waves, instruction, address, active[0], size, "read")
        write_words(batch, waves, register, words, place.lanes)

    return read2


def _write_pair(instruction: Instruction, size: int, unit: int) -> Handler:
    addresses, transfer = _pair_addresses(instruction, unit), Transfer(size)
    registers = register_of(instruction, "data0"), register_of(instruction, "data1")

    def write2(batch: Batch, waves: Selection) -> None:
        active = active_lanes(batch, waves)
        if active is None:
            return
        for address_of, register in zip(addresses, registers, strict=True):
            address = address_of(batch, waves)
            place = lds_place(batch, waves, address, *active, size, "write")
            store(place, size, read_words(batch, waves, register, transfer))
            tell_lds(batch, waves, instruction, address, active[0], size, "write")

    return write2


def _atomic(instruction: Instruction, operation: atomics.Operation, returns: bool) -> Handler:
    address_of, size = _address(instruction, _whole_offset(instruction)), operation.size
    target, transfer = register_of(instruction, "vdst"), Transfer(operation.size)
    sources = [register_of(instruction, f"data{i}") for i in range(operation.operands)]

    def atomic(batch: Batch, waves: Selection) -> None:
        active = active_lanes(batch, waves)
        if active is None:
            return
        address = address_of(batch, waves)
        place = lds_place(batch, waves, address, *active, size, "atomic")
        data = [read_words(batch, waves, register, transfer) for register in sources]
        old = atomics.run(place, operation, data, returns)
        tell_lds(batch, waves, instruction, address, active[0], size, "atomic")
        if returns:
            write_words(batch, waves, target, old, place.lanes)

    return atomic


def _exchange_pair(instruction: Instruction, size: int, unit: int) -> Handler:
    """Two exchanges per lane. Both are read before either is written, as the pseudo-code has it."""
    addresses, transfer = _pair_addresses(instruction, unit), Transfer(size)
    target = register_of(instruction, "vdst")
    sources = register_of(instruction, "data0"), register_of(instruction, "data1")

    def exchange2(batch: Batch, waves: Selection) -> None:
        active = active_lanes(batch, waves)
        if active is None:
            return
        both = [address_of(batch, waves) for address_of in addresses]
        places = [lds_place(batch, waves, address, *active, size, "atomic") for address in both]
        for place in places:
            atomics.require_aligned(place, size)
        data = [read_words(batch, waves, register, transfer) for register in sources]
        old = [np.zeros_like(word) for word in (*data[0], *data[1])]
        for row, lane in np.argwhere(active[0]):
            _exchange_lane(places, data, old, row, lane)
        for address in both:
            tell_lds(batch, waves, instruction, address, active[0], size, "atomic")
        write_words(batch, waves, target, old, places[0].lanes)

    return exchange2


def _exchange_lane(
    places: list[Place], data: list[list[np.ndarray]], old: list[np.ndarray], row: int, lane: int
) -> None:
    memory, words = places[0].view(np.uint8), len(data[0])
    spans = [slice(int(place.at[row, lane]), int(place.at[row, lane]) + 4 * words) for place in places]
    found = np.concatenate([memory[span] for span in spans]).view(np.uint32)
    for i, word in enumerate(old):
        word[row, lane] = found[i]
    for span, operand in zip(spans, data, strict=True):
        memory[span] = np.array([word[row, lane] for word in operand], np.uint32).view(np.uint8)


def _wave_counter(instruction: Instruction, change: np.ufunc) -> Handler:
    """ds_append, ds_consume: the number of active lanes is added to, or taken from, the dword at M0[15:0] + offset.

    All active lanes get the old value. Waves come one after another.
    """
    offset, target = _whole_offset(instruction), register_of(instruction, "vdst")
    operation = atomics.Operation(np.uint32, change, in_place=change)

    def count(batch: Batch, waves: Selection) -> None:
        lanes = batch.exec[waves]
        if not lanes.any():
            return
        base = (batch.sgpr[M0][waves] & np.uint32(0xFFFF)) + np.uint32(offset)
        address = np.broadcast_to(base[:, None], lanes.shape)
        one = lanes & (np.cumsum(lanes, axis=1) == 1)
        place = lds_place(batch, waves, address, one, False, 4, "atomic")
        number = np.broadcast_to(lanes.sum(1, dtype=np.uint32)[:, None], lanes.shape)
        old = atomics.run(place, operation, [[number]], True)[0]
        tell_lds(batch, waves, instruction, address, one, 4, "atomic")
        write_words(batch, waves, target, [np.broadcast_to(old.max(1)[:, None], lanes.shape)], lanes)

    return count
