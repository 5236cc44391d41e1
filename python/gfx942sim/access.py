"""What the accesses to all memories have in common: the width of a transfer, where it goes, and how it is done.

A memory is a function from a dtype to the whole memory as an array of that dtype; an access to it is a `Place`. Loads
and stores move the widest elements that the alignment of all lanes allows: one gather of 16-byte elements costs little
more than one of 4-byte elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .buffers import LOWEST, view_of
from .decode import Instruction
from .errors import OutOfRange
from .operands import FIRST_VGPR
from .state import AGPR, LANE, M0, Batch, Selection

_ELEMENTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
_GLOBAL_VIEWS = {t: view_of(t) for t in (*_ELEMENTS.values(), np.float32, np.float64, np.int32, np.int64)}
_LOW_HALF, _HIGH_HALF = np.uint32(0xFFFF), np.uint32(0xFFFF0000)

View = Callable[[type], np.ndarray]


class Transfer(NamedTuple):
    """What one lane moves: `size` bytes of memory, and how they fill a register.

    signed: sign-extended (to the half, for a D16 load). half: "low" or "high" half of one register, the other one is
    kept; "" for whole registers.
    """

    size: int
    signed: bool = False
    half: str = ""

    @property
    def registers(self) -> int:
        return max(1, self.size // 4)


# The name after `_load_` and `_store_` of FLAT, GLOBAL, SCRATCH and MUBUF instructions.
LOADS = {
    "ubyte": Transfer(1),
    "sbyte": Transfer(1, signed=True),
    "ushort": Transfer(2),
    "sshort": Transfer(2, signed=True),
    "dword": Transfer(4),
    "dwordx2": Transfer(8),
    "dwordx3": Transfer(12),
    "dwordx4": Transfer(16),
    "ubyte_d16": Transfer(1, half="low"),
    "ubyte_d16_hi": Transfer(1, half="high"),
    "sbyte_d16": Transfer(1, signed=True, half="low"),
    "sbyte_d16_hi": Transfer(1, signed=True, half="high"),
    "short_d16": Transfer(2, half="low"),
    "short_d16_hi": Transfer(2, half="high"),
}
STORES = {
    "byte": Transfer(1),
    "byte_d16_hi": Transfer(1, half="high"),
    "short": Transfer(2),
    "short_d16_hi": Transfer(2, half="high"),
    "dword": Transfer(4),
    "dwordx2": Transfer(8),
    "dwordx3": Transfer(12),
    "dwordx4": Transfer(16),
}
# Loads that go to LDS write one dword per lane, whatever their size.
TO_LDS = {name: LOADS[name] for name in ("ubyte", "sbyte", "ushort", "sshort", "dword")}


class Place(NamedTuple):
    """Where the lanes of one access go.

    at: int64 [waves, 64], byte index into the memory. Lanes that take no part have an index of one that does, so that
    all may be read. low_bits: the bits that are set in any of the indices (for the alignment). lanes: bool [waves, 64],
    the lanes that take part, or None for all.
    """

    view: View
    at: np.ndarray
    low_bits: int
    lanes: np.ndarray | None


def active_lanes(batch: Batch, waves: Selection) -> tuple[np.ndarray, bool] | None:
    """(EXEC as bool [waves, 64], whether all are on), or None if no lane is."""
    lanes = batch.exec[waves]
    if lanes.all():
        return lanes, True
    return (lanes, False) if lanes.any() else None


def _with_safe_lanes(address: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    return np.where(lanes, address, address.reshape(-1)[lanes.argmax()])


def _bits(address: np.ndarray) -> int:
    return int(np.bitwise_or.reduce(address, axis=None))


def global_place(batch: Batch, address: np.ndarray, lanes: np.ndarray, every: bool, size: int, kind: str) -> Place:
    """Check an access to global memory and give its place.

    Args:
        address: int64 [waves, 64]. lanes: those that take part, at least one. every: whether they all do.
        kind: "read", "write" or "atomic".

    Raises:
        OutOfRange: not in a registered buffer.
    """
    if not every:
        address = _with_safe_lanes(address, lanes)
    low, high = batch.registry.check(address, lanes, size, kind)
    start = low & ~15

    def window(dtype: type) -> np.ndarray:
        # numpy copies what is written to an array that may overlap it; only this part of memory does not.
        width = np.dtype(dtype).itemsize
        return _GLOBAL_VIEWS[dtype][(start - LOWEST) // width : -((LOWEST - high) // width)]

    return Place(window, address - start, _bits(address), None if every else lanes)


def lds_place(
    batch: Batch, waves: Selection, address: np.ndarray, lanes: np.ndarray, every: bool, size: int, kind: str
) -> Place:
    """The same for LDS. address: uint32 [waves, 64], bytes from the start of the work-group's LDS.

    Raises:
        OutOfRange: past the work-group's LDS. (The hardware reads 0 and drops the write; it is always a mistake.)
    """
    if not every:
        address = _with_safe_lanes(address, lanes)
    bits = _bits(address)
    # No address is larger than all their bits together, and that is often enough to know.
    if bits + size > batch.lds_bytes and int(address.max()) + size > batch.lds_bytes:
        _raise_lds(batch, waves, address, lanes, size, kind)
    return Place(batch.lds_flat.view, batch.lds_start[waves] + address, bits, None if every else lanes)


def _raise_lds(batch: Batch, waves: Selection, address, lanes, size: int, kind: str) -> None:
    row, lane = np.argwhere(lanes & (address.astype(np.int64) + size > batch.lds_bytes))[0]
    wave = int(np.arange(batch.waves)[waves][row])
    raise OutOfRange(
        f"{size}-byte {kind} at LDS byte {int(address[row, lane]):#x} by lane {lane} of wave "
        f"{batch.wave_in_group[wave]}, work-group {batch.workgroup_ids[batch.group_of[wave]]}: "
        f"it has {batch.lds_bytes} bytes"
    )


def _element(place: Place, size: int) -> int:
    """The largest power of two, at most 16, that divides the size and all addresses."""
    bits = place.low_bits | size | 16
    return bits & -bits


def load(place: Place, size: int) -> list[np.ndarray]:
    """Read `size` bytes per lane as uint32 [waves, 64] words; a byte or short is zero-extended."""
    view, at = place.view, place.at
    element = _element(place, size)
    if element == size and size <= 2:
        return [view(_ELEMENTS[size]).take(at >> (size - 1)).astype(np.uint32)]
    if element < 4:
        parts = np.zeros((*at.shape, max(4, size)), np.uint8)
        for i in range(size):
            parts[..., i] = view(np.uint8).take(at + i)
        parts = parts.view(np.uint32)
        return [parts[..., i] for i in range(parts.shape[-1])]
    memory, first = view(_ELEMENTS[element]), at >> (element.bit_length() - 1)
    words = []
    for i in range(size // element):
        got = memory.take(first + i if i else first).view(np.uint32).reshape(*at.shape, element // 4)
        words += [got[..., j] for j in range(element // 4)]
    return words


def store(place: Place, size: int, words: Sequence[np.ndarray]) -> None:
    """Write `size` bytes per active lane. words: uint32 [waves, 64]; of the lanes with one address the last wins."""
    view, at = place.view, place.at
    if place.lanes is not None:
        chosen = np.flatnonzero(place.lanes)
        at, words = at.reshape(-1).take(chosen), [word.reshape(-1).take(chosen) for word in words]
    element = _element(place, size)
    if element == size and size <= 2:
        view(_ELEMENTS[size])[at >> (size - 1)] = words[0].astype(_ELEMENTS[size])
    elif element == 4:
        memory, first = view(np.uint32), at >> 2
        for i, word in enumerate(words):
            memory[first + i if i else first] = word
    elif element < 4:
        parts = np.stack(words, -1).view(np.uint8)
        for i in range(size):
            view(np.uint8)[at + i] = parts[..., i]
    else:
        memory, first, per = view(_ELEMENTS[element]), at >> (element.bit_length() - 1), element // 4
        for i in range(size // element):
            packed = np.empty((*at.shape, per), np.uint32)
            for j in range(per):
                packed[..., j] = words[i * per + j]
            memory[first + i if i else first] = packed.view(_ELEMENTS[element])[..., 0]


def register_of(instruction: Instruction, name: str, accumulator: bool = True) -> int:
    """The row of Batch.vgpr of a VGPR field; `accumulator`: the ACC bit makes it an AGPR."""
    base = AGPR if accumulator and instruction.optional("acc") else 0
    return instruction.field(name) - FIRST_VGPR + base


def read_words(batch: Batch, waves: Selection, register: int, transfer: Transfer) -> list[np.ndarray]:
    """The registers that a store moves, uint32 [waves, 64] each."""
    words = [batch.vgpr[register + i][waves] for i in range(transfer.registers)]
    return [words[0] >> np.uint32(16)] if transfer.half == "high" else words


def write_words(
    batch: Batch, waves: Selection, register: int, words: Sequence[np.ndarray], lanes: np.ndarray | None
) -> None:
    """Write uint32 [waves, 64] words to consecutive registers, in `lanes` (None: all)."""
    for i, word in enumerate(words):
        target = batch.vgpr[register + i]
        if lanes is None:
            target[waves] = word
        elif isinstance(waves, slice):
            np.copyto(target, word, where=lanes)
        else:
            target[waves] = np.where(lanes, word, target[waves])


def extend(word: np.ndarray, transfer: Transfer) -> np.ndarray:
    """A loaded word of less than 32 bits, sign-extended if the transfer says so."""
    if not transfer.signed:
        return word
    shift = 32 - 8 * transfer.size
    return ((word << np.uint32(shift)).view(np.int32) >> np.int32(shift)).view(np.uint32)


def write_loaded(
    batch: Batch,
    waves: Selection,
    register: int,
    words: list[np.ndarray],
    transfer: Transfer,
    lanes: np.ndarray | None,
) -> None:
    """Bring what `load` gave into registers."""
    if transfer.signed or transfer.half:
        word = extend(words[0], transfer)
        if transfer.half:
            old = batch.vgpr[register][waves]
            low, high = (word, old) if transfer.half == "low" else (old, word << np.uint32(16))
            word = low & _LOW_HALF | high & _HIGH_HALF
        words = [word]
    write_words(batch, waves, register, words, lanes)


def write_direct_to_lds(
    batch: Batch,
    waves: Selection,
    instruction: Instruction,
    word: np.ndarray,
    offset: int,
    lanes: np.ndarray,
    every: bool,
) -> None:
    """Store the dword that a load with LDS as its destination got, and report it.

    Lane n of the wave goes to byte M0[15:0] + instruction offset + 4 n, also for bytes and shorts. (ISA guide, "Memory
    buffer load to LDS"; the LLVM intrinsics' documentation: the immediate offset applies to both addresses.)
    """
    base = (batch.sgpr[M0][waves] & _LOW_HALF) + np.uint32(offset & 0xFFFFFFFF)
    address = base[:, None] + LANE.astype(np.uint32) * np.uint32(4)
    store(lds_place(batch, waves, address, lanes, every, 4, "write"), 4, [word])
    tell_lds(batch, waves, instruction, address, lanes, 4, "write")


def tell_lds(
    batch: Batch,
    waves: Selection,
    instruction: Instruction,
    address: np.ndarray,
    lanes: np.ndarray,
    size: int,
    kind: str,
) -> None:
    """Report an LDS access to the observers. Call it before registers are written: `address` may be one of them."""
    if batch.observers:
        address = address.astype(np.int64)
        for observer in batch.observers:
            observer.lds(batch, waves, instruction, address, lanes, size, kind)


def tell_vmem(
    batch: Batch,
    waves: Selection,
    instruction: Instruction,
    address: np.ndarray,
    lanes: np.ndarray,
    size: int,
    kind: str,
) -> None:
    """Report a global or scratch access to the observers."""
    for observer in batch.observers:
        observer.vmem(batch, waves, instruction, address, lanes, size, kind)
