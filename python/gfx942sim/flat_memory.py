"""FLAT, GLOBAL and SCRATCH instructions: loads, stores, loads to LDS and atomics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import atomics
from .access import (
    LOADS,
    STORES,
    TO_LDS,
    Place,
    Transfer,
    active_lanes,
    extend,
    global_place,
    load,
    read_words,
    register_of,
    store,
    tell_vmem,
    write_direct_to_lds,
    write_loaded,
    write_words,
)
from .code_object import Descriptor
from .decode import Instruction
from .errors import OutOfRange, UnknownInstruction
from .state import LANE, LANES, M0, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

_Address = Callable[[Batch, Selection], np.ndarray]
_Locate = Callable[[Batch, Selection, np.ndarray, np.ndarray, bool, int, str], Place]

_NO_SGPR = 0x7F
_LAST_PAIR = 106  # VCC: M0 and what follows it cannot hold a 64-bit address


class _Segment:
    """Global (also for FLAT) or scratch memory: how an address is made, checked and named to the observers."""

    def __init__(self, address: _Address, locate: _Locate, prefix: str = ""):
        self.address, self.locate, self.prefix = address, locate, prefix


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """FLAT, GLOBAL and SCRATCH instructions."""
    family, action, what = instruction.mnemonic.split("_", 2)
    if instruction.encoding == "SCRATCH":
        segment = _Segment(_scratch_address(instruction), _scratch_place(descriptor.scratch), "scratch_")
    elif instruction.encoding == "GLOBAL":
        segment = _Segment(_global_address(instruction), _global_place)
    else:
        segment = _Segment(_flat_address(instruction), _flat_place)
    if action == "load" and what in LOADS:
        return _load(instruction, segment, LOADS[what])
    if action == "load" and what.startswith("lds_") and what[4:] in TO_LDS:
        return _load_to_lds(instruction, segment, TO_LDS[what[4:]])
    if action == "store" and what in STORES:
        return _store(instruction, segment, STORES[what])
    if action == "atomic" and what in atomics.VMEM and family != "scratch":
        return _atomic(instruction, segment, atomics.VMEM[what])
    raise UnknownInstruction(f"{instruction.mnemonic} is not implemented")


def _vgpr_pair(batch: Batch, waves: Selection, register: int) -> np.ndarray:
    """Two registers as int64 [waves, 64]."""
    high = batch.vgpr[register + 1][waves]
    return np.left_shift(high, 32, dtype=np.int64) + batch.vgpr[register][waves]


def _flat_address(instruction: Instruction) -> _Address:
    register, offset = register_of(instruction, "addr", accumulator=False), instruction.field("offset") & 0xFFF
    return lambda batch, waves: _vgpr_pair(batch, waves, register) + offset


def _address_sgpr(instruction: Instruction, last: int) -> int | None:
    """The SGPR of the address, at most `last`, or None if the instruction has none."""
    code = instruction.field("saddr")
    if code == _NO_SGPR:
        return None
    if code > last:
        raise UnknownInstruction(f"SADDR {code}: an SGPR, or {_NO_SGPR} for none, is expected")
    return code


def _global_address(instruction: Instruction) -> _Address:
    register, sgpr = register_of(instruction, "addr", accumulator=False), _address_sgpr(instruction, _LAST_PAIR)
    offset = instruction.signed("offset", 13)
    if sgpr is None:
        return lambda batch, waves: _vgpr_pair(batch, waves, register) + offset

    def with_base(batch: Batch, waves: Selection) -> np.ndarray:
        base = np.left_shift(batch.sgpr[sgpr + 1][waves], 32, dtype=np.int64) + batch.sgpr[sgpr][waves] + offset
        return base[:, None] + batch.vgpr[register][waves]

    return with_base


def _scratch_address(instruction: Instruction) -> _Address:
    """Bytes from the start of the lane's private array: SADDR + VADDR + offset, each of which may be missing."""
    register, sgpr = register_of(instruction, "addr", accumulator=False), _address_sgpr(instruction, M0)
    offset, has_register = instruction.signed("offset", 13), instruction.field("sve")

    def address(batch: Batch, waves: Selection) -> np.ndarray:
        total = np.full(batch.exec[waves].shape, offset, np.int64)
        if sgpr is not None:
            total += batch.sgpr[sgpr][waves].astype(np.int64)[:, None]
        if has_register:
            total += batch.vgpr[register][waves]
        return total

    return address


def _global_place(batch, waves, address, lanes, every, size, kind) -> Place:
    return global_place(batch, address, lanes, every, size, kind)


def _flat_place(batch, waves, address, lanes, every, size, kind) -> Place:
    try:
        return global_place(batch, address, lanes, every, size, kind)
    except OutOfRange as error:
        raise OutOfRange(f"{error.message} (FLAT: the apertures of LDS and scratch are not modelled)") from None


def _scratch_place(limit: int) -> _Locate:
    def locate(batch, waves, address, lanes, every, size, kind) -> Place:
        if not every:
            address = np.where(lanes, address, address.reshape(-1)[lanes.argmax()])
        if int(address.min()) < 0 or int(address.max()) + size > limit:
            row, lane = np.argwhere(lanes & ((address < 0) | (address + size > limit)))[0]
            wave = int(np.arange(batch.waves)[waves][row])
            raise OutOfRange(
                f"{size}-byte {kind} at scratch byte {int(address[row, lane])} by lane {lane} of wave "
                f"{batch.wave_in_group[wave]}, work-group {batch.workgroup_ids[batch.group_of[wave]]}: "
                f"a lane has {limit} bytes"
            )
        stride = batch.scratch.shape[2]
        first = np.arange(batch.waves)[waves][:, None] * (LANES * stride) + LANE * stride
        bits = int(np.bitwise_or.reduce(address, axis=None))
        return Place(batch.scratch.reshape(-1).view, first + address, bits, None if every else lanes)

    return locate


def _load(instruction: Instruction, segment: _Segment, transfer: Transfer) -> Handler:
    register, size, kind = register_of(instruction, "vdst"), transfer.size, segment.prefix + "read"

    def read(batch: Batch, waves: Selection) -> None:
        active = active_lanes(batch, waves)
        if active is None:
            return
        address = segment.address(batch, waves)
        place = segment.locate(batch, waves, address, *active, size, "read")
        words = load(place, size)
        tell_vmem(batch, waves, instruction, address, active[0], size, kind)
        write_loaded(batch, waves, register, words, transfer, place.lanes)

    return read


def _load_to_lds(instruction: Instruction, segment: _Segment, transfer: Transfer) -> Handler:
    offset, size, kind = instruction.signed("offset", 13), transfer.size, segment.prefix + "read"

    def read_to_lds(batch: Batch, waves: Selection) -> None:
        active = active_lanes(batch, waves)
        if active is None:
            return
        address = segment.address(batch, waves)
        place = segment.locate(batch, waves, address, *active, size, "read")
        word = extend(load(place, size)[0], transfer)
        tell_vmem(batch, waves, instruction, address, active[0], size, kind)
        write_direct_to_lds(batch, waves, instruction, word, offset, *active)

    return read_to_lds


def _store(instruction: Instruction, segment: _Segment, transfer: Transfer) -> Handler:
    register, size, kind = register_of(instruction, "data"), transfer.size, segment.prefix + "write"

    def write(batch: Batch, waves: Selection) -> None:
        active = active_lanes(batch, waves)
        if active is None:
            return
        address = segment.address(batch, waves)
        place = segment.locate(batch, waves, address, *active, size, "write")
        store(place, size, read_words(batch, waves, register, transfer))
        tell_vmem(batch, waves, instruction, address, active[0], size, kind)

    return write


def _atomic(instruction: Instruction, segment: _Segment, operation: atomics.Operation) -> Handler:
    """SC0 asks for the old value."""
    source, target = register_of(instruction, "data"), register_of(instruction, "vdst")
    size, returns, transfer = operation.size, bool(instruction.field("sc0")), Transfer(operation.size)
    sources = [source + i * operation.words for i in range(operation.operands)]

    def atomic(batch: Batch, waves: Selection) -> None:
        active = active_lanes(batch, waves)
        if active is None:
            return
        address = segment.address(batch, waves)
        place = segment.locate(batch, waves, address, *active, size, "atomic")
        data = [read_words(batch, waves, register, transfer) for register in sources]
        old = atomics.run(place, operation, data, returns)
        tell_vmem(batch, waves, instruction, address, active[0], size, "atomic")
        if returns:
            write_words(batch, waves, target, old, place.lanes)

    return atomic
