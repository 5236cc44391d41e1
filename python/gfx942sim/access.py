"""Gather and scatter on byte-addressed memory: the address space, LDS or scratch, at any alignment."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from .buffers import LOWEST, view_of
from .errors import UnknownInstruction
from .state import Batch

u8, u16, u32, i32, i64 = np.uint8, np.uint16, np.uint32, np.int32, np.int64


class Memory:
    """Views of one stretch of bytes in each width. Offsets are bytes from its start, int64 [waves, 64]."""

    def __init__(self, octets, halves, words, pairs, quads):
        self.octets, self.halves, self.words, self.pairs, self.quads = octets, halves, words, pairs, quads

    @classmethod
    def over(cls, flat: np.ndarray) -> Memory:
        """Views of a contiguous uint8 array whose size is a multiple of 16."""
        # complex128 only moves 16 bytes at a time; nothing computes with it.
        return cls(*(flat.view(kind) for kind in (u8, u16, u32, np.uint64, np.complex128)))

    def load_words(self, at: np.ndarray, count: int) -> list[np.ndarray]:
        """`count` dwords from each offset, as that many uint32 arrays of its shape."""
        low = int(np.bitwise_or.reduce(at, axis=None))
        if count == 4 and not low & 15:
            found = self.quads[at >> 4].view(u32).reshape(*at.shape, 4)
            return [found[..., j] for j in range(4)]
        if count % 2 == 0 and not low & 7:
            both = [self.pairs[(at >> 3) + j].view(u32).reshape(*at.shape, 2) for j in range(count // 2)]
            return [pair[..., j] for pair in both for j in range(2)]
        if not low & 3:
            return [self.words[(at >> 2) + j] for j in range(count)]
        return [self._unaligned(at + 4 * j) for j in range(count)]

    def _unaligned(self, at: np.ndarray) -> np.ndarray:
        parts = [self.octets[at + j].astype(u32) << u32(8 * j) for j in range(4)]
        return parts[0] | parts[1] | parts[2] | parts[3]

    def store_words(self, at: np.ndarray, active: np.ndarray, values: list[np.ndarray]) -> None:
        """Dwords to each active offset. Of two lanes that write one place the higher lane wins, as on the hardware."""
        whole = bool(active.all())
        where = at if whole else at[active]
        low = int(np.bitwise_or.reduce(where, axis=None))
        values = [np.broadcast_to(v, active.shape) for v in values]
        if not whole:
            values = [v[active] for v in values]
        if len(values) == 4 and not low & 15:
            self.quads[where >> 4] = np.stack(values, -1).view(np.complex128)[..., 0]
        elif len(values) == 2 and not low & 7:
            self.pairs[where >> 3] = np.stack(values, -1).view(np.uint64)[..., 0]
        elif not low & 3:
            for j, value in enumerate(values):
                self.words[(where >> 2) + j] = value
        else:
            for j, value in enumerate(values):
                for k in range(4):
                    self.octets[where + 4 * j + k] = (value >> u32(8 * k)).astype(u8)

    def load_small(self, at: np.ndarray, size: int) -> np.ndarray:
        """One or two bytes, zero-extended to uint32."""
        if size == 1:
            return self.octets[at].astype(u32)
        if not int(np.bitwise_or.reduce(at, axis=None)) & 1:
            return self.halves[at >> 1].astype(u32)
        return self.octets[at].astype(u32) | self.octets[at + 1].astype(u32) << u32(8)

    def store_small(self, at: np.ndarray, active: np.ndarray, size: int, value: np.ndarray) -> None:
        where, value = at[active], np.broadcast_to(value, active.shape)[active]
        for k in range(size):
            self.octets[where + k] = (value >> u32(8 * k)).astype(u8)


# Offsets into this one are addresses minus LOWEST.
ADDRESS_SPACE = Memory(*(view_of(kind) for kind in (u8, u16, u32, np.uint64, np.complex128)))


def lds_memory(batch: Batch) -> Memory:
    """The LDS of all work-groups of the batch; offsets are batch.lds_start + the byte in the work-group's LDS."""
    if getattr(batch, "_lds_memory", None) is None:
        batch._lds_memory = Memory.over(batch.lds_flat)
    return batch._lds_memory


def scratch_memory(batch: Batch) -> Memory:
    if getattr(batch, "_scratch_memory", None) is None:
        batch._scratch_memory = Memory.over(batch.scratch.reshape(-1))
    return batch._scratch_memory


@dataclass(frozen=True)
class Width:
    """What a load or store instruction moves per lane.

    unit: bytes of the smallest piece (1, 2 or 4); words: registers; signed: a small load is sign-extended; half: None,
    "low" or "high": the half of the register that a 16-bit piece goes to or comes from.
    """

    unit: int
    words: int
    signed: bool = False
    half: str | None = None

    @property
    def size(self) -> int:
        """Bytes per lane."""
        return self.unit * self.words if self.unit == 4 else self.unit


_KINDS = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2}


def width_of(name: str) -> Width:
    """The width of a mnemonic that ends in `load_...` or `store_...`, as buffer, global, flat and scratch name them."""
    match = re.search(r"(?:load|store)_(?:lds_)?(dword|ubyte|sbyte|byte|ushort|sshort|short)(x\d)?(_d16)?(_hi)?$", name)
    if not match:
        raise UnknownInstruction(f"{name} is not implemented")
    kind, count, d16, high = match.groups()
    if kind == "dword":
        return Width(4, int(count[1]) if count else 1)
    return Width(_KINDS[kind], 1, kind[0] == "s" and kind != "short", "high" if high else "low" if d16 else None)


def extend(value: np.ndarray, width: Width) -> np.ndarray:
    """Sign-extend what was loaded, if the width says so."""
    if not width.signed:
        return value
    shift = 32 - 8 * width.unit
    extended = (value.view(i32) << shift >> shift).view(u32)
    return extended & u32(0xFFFF) if width.half else extended


def merge(value: np.ndarray, old: np.ndarray, width: Width) -> np.ndarray:
    """A loaded 16-bit piece with the half of the register that stays."""
    if width.half == "high":
        return old & u32(0xFFFF) | value << u32(16)
    if width.half == "low":
        return old & u32(0xFFFF0000) | value
    return value


def stored(value: np.ndarray, width: Width) -> np.ndarray:
    return value >> u32(16) if width.half == "high" else value


def safe_offsets(at: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Offsets in which an inactive lane repeats an active one, so that a gather touches nothing else."""
    return at if active.all() else np.where(active, at, at[active][0])


def load_to_registers(
    batch: Batch, waves, memory: Memory, at: np.ndarray, active: np.ndarray, width: Width, register: int, default=None
) -> None:
    """Load into VGPRs of the lanes in EXEC; `default` (0) goes to those that are not `active`, if given."""
    if not active.any():
        values = [np.zeros(active.shape, u32)] * width.words
    else:
        at = safe_offsets(at, active)
        values = memory.load_words(at, width.words) if width.unit == 4 else [memory.load_small(at, width.unit)]
        values = [extend(v, width) for v in values]
        if default is not None and not active.all():
            values = [np.where(active, v, u32(default)) for v in values]
    if default is None:
        for j, value in enumerate(values):
            batch.write_vgpr(waves, register + j, merge(value, batch.vgpr[register + j][waves], width), active)
        return
    for j, value in enumerate(values):
        batch.write_vgpr(waves, register + j, merge(value, batch.vgpr[register + j][waves], width))


def store_from_registers(
    batch: Batch, waves, memory: Memory, at: np.ndarray, active: np.ndarray, width: Width, register: int
) -> None:
    if not active.any():
        return
    values = [batch.vgpr[register + j][waves] for j in range(width.words)]
    if width.unit == 4:
        memory.store_words(at, active, values)
    else:
        memory.store_small(at, active, width.unit, stored(values[0], width))


def global_offsets(address: np.ndarray) -> np.ndarray:
    return address - LOWEST


def notify_vmem(batch: Batch, waves, instruction, address, active, size: int, kind: str) -> None:
    for observer in batch.observers:
        observer.vmem(batch, waves, instruction, address, active, size, kind)


def notify_lds(batch: Batch, waves, instruction, address, active, size: int, kind: str) -> None:
    for observer in batch.observers:
        observer.lds(batch, waves, instruction, address, active, size, kind)
