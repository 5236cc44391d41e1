"""MUBUF instructions: loads, stores, loads to LDS and atomics through a buffer descriptor.

The descriptor (four SGPRs) has a 48-bit base, a stride, a number of records and flags. Accesses outside of the records
are no error: loads give 0, stores are dropped, each dword by itself. What is inside must lie in a registered buffer as
well, since compilers often set the number of records to its maximum. Source: ISA guide, "Vector memory buffer
instructions", "Range checking".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import atomics
from .access import (
    LOADS,
    STORES,
    TO_LDS,
    Transfer,
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
from .errors import UnknownInstruction
from .operands import scalar
from .state import Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

_NO_EFFECT = frozenset(("buffer_wbl2", "buffer_inv"))
# In the tables, but only gfx950 has it with a buffer descriptor.
_ATOMICS = {name: operation for name, operation in atomics.VMEM.items() if name != "pk_add_bf16"}
_NEVER = np.int64(1 << 40)  # beyond every offset
_NOTHING = np.zeros((1, 1), np.uint32)
_SWIZZLE = 1 << 31
_ADD_THREAD_ID, _TYPE = 1 << 23, 3 << 30


class _Target(NamedTuple):
    """The lanes of one buffer access.

    address: int64 [waves, 64]. start: uint32 or int64, end: int64, both broadcast to that: a part of the access from
    byte a to byte b is inside of the records if start + b <= end. lanes: EXEC, bool [waves, 64].
    """

    address: np.ndarray
    start: np.ndarray
    end: np.ndarray
    lanes: np.ndarray

    def inside(self, size: int) -> np.ndarray:
        """The active lanes whose first `size` bytes are inside of the records, bool [waves, 64]."""
        if int(self.start.max()) + size <= int(self.end.min()):
            return self.lanes
        return self.lanes & (self.start <= self.end - size)


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """MUBUF instructions."""
    name = instruction.mnemonic
    if name in _NO_EFFECT:
        return None
    _, action, what = name.split("_", 2)
    if action == "load" and instruction.field("lds"):
        if what in TO_LDS:
            return _load_to_lds(instruction, TO_LDS[what])
    elif action == "load" and what in LOADS:
        return _load(instruction, LOADS[what])
    elif action == "store" and what in STORES:
        return _store(instruction, STORES[what])
    elif action == "atomic" and what in _ATOMICS:
        return _atomic(instruction, _ATOMICS[what])
    destination = " with LDS as its destination" if instruction.field("lds") else ""
    raise UnknownInstruction(f"{name}{destination} is not implemented")


class _Addressing:
    """The address part of an instruction: base + SOFFSET + offset + VGPR offset + stride * VGPR index."""

    def __init__(self, instruction: Instruction):
        register = register_of(instruction, "vaddr", accumulator=False)
        self.descriptor = instruction.field("srsrc")
        self.scalar_offset = scalar(instruction.field("soffset"))
        self.offset = instruction.field("offset")
        self.index_register = register if instruction.field("idxen") else None
        self.offset_register = None
        if instruction.field("offen"):
            self.offset_register = register + (self.index_register is not None)

    def target(self, batch: Batch, waves: Selection) -> _Target | None:
        """Where the lanes go, or None if no lane is active.

        The range check of a raw buffer is on SOFFSET + offset + VGPR offset, which do not wrap at 2**32; that of a
        structured one (a stride, and an index in the instruction) on the index alone.

        Raises:
            UnknownInstruction: the descriptor asks for swizzling or thread ids, or is none.
        """
        lanes = batch.exec[waves]
        if not lanes.any():
            return None
        low, high, records, flags = (batch.sgpr[self.descriptor + i][waves] for i in range(4))
        self._check_descriptor(high, flags, lanes)
        base = np.left_shift(high & np.uint32(0xFFFF), 32, dtype=np.int64) + low
        fixed = self.scalar_offset(batch, waves).astype(np.int64) + self.offset
        start, end = _NOTHING, (records - fixed)[:, None]
        address = (base + fixed)[:, None]
        if self.offset_register is not None:
            start = batch.vgpr[self.offset_register][waves]
            address = address + start
        if self.index_register is not None:
            stride = (high >> np.uint32(16) & np.uint32(0x3FFF)).astype(np.int64)[:, None]
            index = batch.vgpr[self.index_register][waves]
            start = np.where(stride == 0, start, np.where(index < records[:, None], 0, _NEVER))
            end = np.where(stride == 0, end, _NEVER)
            address = address + stride * index
        return _Target(np.broadcast_to(address, lanes.shape), start, end, lanes)

    @staticmethod
    def _check_descriptor(high: np.ndarray, flags: np.ndarray, lanes: np.ndarray) -> None:
        unusual = (high & np.uint32(_SWIZZLE)) | (flags & np.uint32(_ADD_THREAD_ID | _TYPE))
        if unusual.any():
            wave = np.flatnonzero((unusual != 0) & lanes.any(1))
            if wave.size:
                raise UnknownInstruction(
                    f"buffer descriptor with words 1 and 3 {int(high[wave[0]]):#x}, {int(flags[wave[0]]):#x}: "
                    "swizzling, thread ids and other types are not implemented"
                )


def _read_lanes(
    batch: Batch, address: np.ndarray, lanes: np.ndarray, size: int, may_hold_anything: bool
) -> list[np.ndarray]:
    """Load in `lanes`, as uint32 [waves, 64] words. The others get 0, or anything if they may."""
    if not lanes.any():
        return [np.zeros(lanes.shape, np.uint32) for _ in range(max(1, size // 4))]
    every = bool(lanes.all())
    words = load(global_place(batch, address, lanes, every, size, "read"), size)
    return words if every or may_hold_anything else [word * lanes for word in words]


def _write_lanes(batch: Batch, address: np.ndarray, lanes: np.ndarray, size: int, words: list[np.ndarray]) -> None:
    if lanes.any():
        store(global_place(batch, address, lanes, bool(lanes.all()), size, "write"), size, words)


def _parts(target: _Target, size: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray, int]]]:
    """What of an access lies inside of the records.

    Returns: the lanes of which the first dword does, and steps (byte offset, lanes, size) that cover all of it: one, or
    one for each dword if the end of the records cuts through a lane.
    """
    whole = target.inside(size)
    if size <= 4 or whole is target.lanes:
        return whole, [(0, whole, size)]
    first = target.inside(4)
    if (whole == first).all():
        return whole, [(0, whole, size)]
    return first, [(at, target.inside(at + 4), 4) for at in range(0, size, 4)]


def _load_words(
    batch: Batch, waves: Selection, instruction: Instruction, target: _Target, size: int
) -> list[np.ndarray]:
    """The words of a load, uint32 [waves, 64]; 0 outside of the records."""
    reported, parts = _parts(target, size)
    words: list[np.ndarray] = []
    for at, lanes, step in parts:
        words += _read_lanes(batch, target.address + at if at else target.address, lanes, step, lanes is target.lanes)
    if reported.any():
        tell_vmem(batch, waves, instruction, target.address, reported, size, "read")
    return words


def _load(instruction: Instruction, transfer: Transfer) -> Handler:
    addressing, register, size = _Addressing(instruction), register_of(instruction, "vdata"), transfer.size

    def read(batch: Batch, waves: Selection) -> None:
        target = addressing.target(batch, waves)
        if target is None:
            return
        words = _load_words(batch, waves, instruction, target, size)
        lanes = None if target.lanes.all() else target.lanes
        write_loaded(batch, waves, register, words, transfer, lanes)

    return read


def _load_to_lds(instruction: Instruction, transfer: Transfer) -> Handler:
    addressing, offset = _Addressing(instruction), instruction.field("offset")

    def read_to_lds(batch: Batch, waves: Selection) -> None:
        target = addressing.target(batch, waves)
        if target is None:
            return
        word = extend(_load_words(batch, waves, instruction, target, transfer.size)[0], transfer)
        lanes = target.lanes
        write_direct_to_lds(batch, waves, instruction, word, offset, lanes, bool(lanes.all()))

    return read_to_lds


def _store(instruction: Instruction, transfer: Transfer) -> Handler:
    addressing, register, size = _Addressing(instruction), register_of(instruction, "vdata"), transfer.size

    def write(batch: Batch, waves: Selection) -> None:
        target = addressing.target(batch, waves)
        if target is None:
            return
        words = read_words(batch, waves, register, transfer)
        reported, parts = _parts(target, size)
        for at, lanes, step in parts:
            part = words if step == size else words[at // 4 : at // 4 + 1]
            _write_lanes(batch, target.address + at, lanes, step, part)
        if reported.any():
            tell_vmem(batch, waves, instruction, target.address, reported, size, "write")

    return write


def _atomic(instruction: Instruction, operation: atomics.Operation) -> Handler:
    """SC0 asks for the old value, which is 0 outside of the records. An atomic is inside as a whole or not at all."""
    addressing, register = _Addressing(instruction), register_of(instruction, "vdata")
    size, returns, transfer = operation.size, bool(instruction.field("sc0")), Transfer(operation.size)
    sources = [register + i * operation.words for i in range(operation.operands)]

    def atomic(batch: Batch, waves: Selection) -> None:
        target = addressing.target(batch, waves)
        if target is None:
            return
        lanes = target.inside(size)
        if lanes.any():
            place = global_place(batch, target.address, lanes, bool(lanes.all()), size, "atomic")
            data = [read_words(batch, waves, source, transfer) for source in sources]
            old = atomics.run(place, operation, data, returns)
            tell_vmem(batch, waves, instruction, target.address, lanes, size, "atomic")
        else:
            old = [np.zeros(lanes.shape, np.uint32) for _ in range(operation.words)]
        if returns:
            write_words(batch, waves, register, old, target.lanes)

    return atomic
