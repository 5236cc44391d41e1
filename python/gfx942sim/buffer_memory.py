"""MUBUF: loads, stores and atomics through a buffer resource (V#)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import access
from .atomics import global_operation, perform
from .code_object import Descriptor
from .decode import Instruction
from .errors import UnknownInstruction
from .flat_memory import _write, move_to_lds, operands_of
from .operands import scalar
from .state import AGPR, LANES, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

u32, i64 = np.uint32, np.int64
_NO_EFFECT = frozenset(("buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol"))


class _Address:
    """Where a MUBUF instruction goes, and which of its lanes lie inside the resource.

    Raw buffers (stride 0) are checked by bytes: offset + size <= num_records - soffset, as the ISA guide's "range
    checking" has it for gfx9; structured ones (idxen, stride) by index. Swizzled ones are refused.
    """

    def __init__(self, instruction: Instruction):
        self.resource = instruction.field("srsrc")
        self.offen, self.idxen = bool(instruction.field("offen")), bool(instruction.field("idxen"))
        vector = instruction.field("vaddr") - 256
        self.index_register = vector
        self.offset_register = vector + 1 if self.idxen else vector
        self.constant = instruction.field("offset")
        self.scalar = scalar(instruction.field("soffset"))

    def __call__(self, batch: Batch, waves: Selection) -> _Place:
        sgpr, resource = batch.sgpr, self.resource
        high = sgpr[resource + 1][waves]
        base = sgpr[resource][waves].astype(i64) | (high & u32(0xFFFF)).astype(i64) << 32
        records = sgpr[resource + 2][waves].astype(i64)[:, None]
        stride = (high >> u32(16) & u32(0x3FFF)).astype(i64)[:, None]
        if (high >> u32(31)).any() or (sgpr[resource + 3][waves] >> u32(23) & u32(1)).any():
            raise UnknownInstruction("swizzled buffer, or one that adds the thread id")
        active = batch.exec[waves]
        offset: np.ndarray | int = self.constant
        if self.offen:
            offset = batch.vgpr[self.offset_register][waves].astype(i64) + self.constant
        from_scalar = self.scalar(batch, waves).astype(i64)[:, None]
        index = None
        if self.idxen:
            index = batch.vgpr[self.index_register][waves].astype(i64)
            offset = offset + index * stride
        address = base[:, None] + from_scalar + offset
        if address.shape != active.shape:
            address = np.ascontiguousarray(np.broadcast_to(address, active.shape))
        if index is not None and stride.any():
            return _Place(address, active & (index < records), None)
        # Bytes left from each lane's address to the end of the resource.
        return _Place(address, active, records - from_scalar - offset)


@dataclass
class _Place:
    """Addresses int64 [waves, 64], the lanes that take part, and the bytes left from there in a raw buffer."""

    address: np.ndarray
    active: np.ndarray
    left: np.ndarray | None

    def inside(self, size: int) -> np.ndarray:
        """The active lanes whose first `size` bytes lie inside the resource."""
        return self.active if self.left is None else self.active & (self.left >= size)


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """MUBUF instructions."""
    name = instruction.mnemonic
    if name in _NO_EFFECT:
        return None
    if "_format_" in name:
        raise UnknownInstruction(f"{name}: formatted buffers are not implemented")
    address = _Address(instruction)
    accumulator = AGPR if instruction.field("acc") else 0
    register = instruction.field("vdata") - 256 + accumulator
    if "_atomic_" in name:
        return _atomic(instruction, address, register)
    width = access.width_of(name)
    if instruction.field("lds"):
        return _to_lds(instruction, address, width)
    if "_store_" in name:

        def store(batch: Batch, waves: Selection) -> None:
            for piece, at, inside in _pieces(address, batch, waves, width):
                batch.registry.check(at, inside, piece.size, "write")
                access.notify_vmem(batch, waves, instruction, at, inside, piece.size, "write")
                offsets, first = access.global_offsets(at), register + piece.first
                access.store_from_registers(batch, waves, access.ADDRESS_SPACE, offsets, inside, piece.width, first)

        return store

    def load(batch: Batch, waves: Selection) -> None:
        found = []
        for piece, at, inside in _pieces(address, batch, waves, width):
            batch.registry.check(at, inside, piece.size, "read")
            access.notify_vmem(batch, waves, instruction, at, inside, piece.size, "read")
            found.append((piece, access.global_offsets(at), inside))
        # The addresses are all computed by now, so the destination may be the address register.
        for piece, at, inside in found:
            first = register + piece.first
            access.load_to_registers(batch, waves, access.ADDRESS_SPACE, at, inside, piece.width, first, default=0)

    return load


class _Piece:
    """A part of an access that is range-checked by itself: the whole, or one dword of it."""

    def __init__(self, width: access.Width, first: int):
        self.width, self.first, self.size = width, first, width.size


def _pieces(address: _Address, batch: Batch, waves: Selection, width: access.Width):
    """The whole access; or dword by dword, as the hardware checks them, where a lane crosses the resource's end."""
    place = address(batch, waves)
    inside = place.inside(width.size)
    if width.words > 1 and inside is not place.active and not np.array_equal(inside, place.inside(4)):
        for j in range(width.words):
            yield _Piece(access.Width(4, 1), j), place.address + 4 * j, place.inside(4 * (j + 1))
        return
    yield _Piece(width, 0), place.address, inside


def _to_lds(instruction: Instruction, address: _Address, width: access.Width) -> Handler:
    if width.unit != 4 or width.words != 1:
        raise UnknownInstruction(f"{instruction.mnemonic} to LDS; implemented: buffer_load_dword")
    constant = instruction.field("offset")

    def load(batch: Batch, waves: Selection) -> None:
        active = batch.exec[waves]
        place = address(batch, waves)
        at, inside = place.address, place.inside(4)
        batch.registry.check(at, inside, 4, "read")
        access.notify_vmem(batch, waves, instruction, at, inside, 4, "read")
        value = np.zeros((active.shape[0], LANES), u32)
        if inside.any():
            offsets = access.safe_offsets(access.global_offsets(at), inside)
            value = np.where(inside, access.ADDRESS_SPACE.load_words(offsets, 1)[0], u32(0))
        move_to_lds(batch, waves, instruction, [value], active, constant, 1)

    return load


def _atomic(instruction: Instruction, address: _Address, register: int) -> Handler:
    operation, words, two = global_operation(instruction.mnemonic.split("_atomic_")[1])
    returns = bool(instruction.field("sc0"))

    def atomic(batch: Batch, waves: Selection) -> None:
        place = address(batch, waves)
        at, inside = place.address, place.inside(4 * words)
        batch.registry.check(at, inside, 4 * words, "atomic")
        access.notify_vmem(batch, waves, instruction, at, inside, 4 * words, "atomic")
        first = operands_of(batch, waves, register, words)
        second = operands_of(batch, waves, register + words, words) if two else None
        before = perform(access.ADDRESS_SPACE, access.global_offsets(at), inside, operation, first, second)
        if returns:
            _write(batch, waves, register, before, batch.exec[waves])

    return atomic
