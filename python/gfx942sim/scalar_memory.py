"""SMEM: scalar loads from memory and from raw buffers, and the clock.

Source: AMD Instinct MI300 ISA guide, chapter "Scalar memory operations" and the SMEM encoding.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from .buffers import LOWEST, view_of
from .code_object import Descriptor
from .decode import Instruction
from .errors import OutOfRange, UnknownInstruction
from .operands import scalar, scalar64
from .state import EXEC, VCC, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

_LOAD = re.compile(r"s_(buffer_)?load_dword(?:x(2|4|8|16))?")
_NO_EFFECT = frozenset(("s_dcache_inv", "s_dcache_wb", "s_dcache_inv_vol", "s_dcache_wb_vol"))
_IMMEDIATE_BITS = 21
_ADDRESS_BITS = (1 << 48) - 1
_TICKS_PER_READ = 64

_memory = view_of(np.uint32)
_clocks: weakref.WeakKeyDictionary[Batch, Iterator[int]] = weakref.WeakKeyDictionary()

# Bytes to add to the base address: int64 [waves] or [1].
_Offset = Callable[[Batch, Selection], np.ndarray]


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """One SMEM instruction. Scalar stores, atomics and scratch loads do not exist on gfx942 and are not known."""
    name = instruction.mnemonic
    if name in _NO_EFFECT:
        return None
    if name in ("s_memtime", "s_memrealtime"):
        return _clock(instruction)
    form = _LOAD.fullmatch(name)
    if form is None:
        raise UnknownInstruction(f"{name} is not implemented")
    is_buffer, count = form[1] is not None, int(form[2] or 1)
    _check_destination(instruction, count)
    return (_buffer_load if is_buffer else _load)(instruction, count)


def _check_destination(instruction: Instruction, count: int) -> None:
    """The table does not say so, but M0 and EXEC cannot be loaded, and a load must not run over them."""
    register = instruction.field("sdata")
    if register + count > EXEC - 2 or register < VCC < register + count - 1:
        raise UnknownInstruction(f"{instruction.mnemonic} into SGPR code {register}")


def _offset(instruction: Instruction) -> _Offset:
    """The signed 21-bit constant, an SGPR, or both. Without a constant the SGPR's number is in its place."""
    constant = np.full(1, instruction.signed("offset", _IMMEDIATE_BITS), np.int64)
    has_constant, has_register = instruction.field("imm"), instruction.field("soffset_en")
    if has_constant and not has_register:
        return lambda batch, waves: constant
    register = scalar(instruction.field("soffset") if has_register else instruction.field("offset") & 0x7F)
    if not has_constant:
        return lambda batch, waves: register(batch, waves).astype(np.int64)
    return lambda batch, waves: register(batch, waves).astype(np.int64) + constant


def _load(instruction: Instruction, count: int) -> Handler:
    base, offset, register = scalar64(instruction.field("sbase")), _offset(instruction), instruction.field("sdata")

    def run(batch: Batch, waves: Selection) -> None:
        address = base(batch, waves).view(np.int64) + offset(batch, waves)
        first = int(address[0])
        if (address == first).all():
            # The usual case: kernel arguments, and everything else that does not depend on the work-group.
            _confirm(batch, waves, address[:1], 4 * count)
            at = (first - LOWEST) >> 2
            batch.sgpr[register : register + count, waves] = _memory[at : at + count, None]
            return
        _confirm(batch, waves, address, 4 * count)
        at = ((address - LOWEST) >> 2) + np.arange(count)[:, None]
        batch.sgpr[register : register + count, waves] = _memory[at]

    return run


def _buffer_load(instruction: Instruction, count: int) -> Handler:
    """Loads from a raw buffer: dwords that do not lie below num_records read 0, each for itself."""
    resource, offset, register = instruction.field("sbase"), _offset(instruction), instruction.field("sdata")

    def run(batch: Batch, waves: Selection) -> None:
        words = batch.sgpr[resource : resource + 3, waves].astype(np.int64)
        if (words[1] >> 16 & 0x3FFF).any():
            raise UnknownInstruction("scalar load from a buffer with a stride (structured buffer)")
        base = words[0] | words[1] << 32 & _ADDRESS_BITS
        inside_buffer = offset(batch, waves)
        if inside_buffer.min() < 0:
            raise UnknownInstruction(f"scalar buffer load with a negative offset ({int(inside_buffer.min())})")
        at = inside_buffer + 4 * np.arange(count)[:, None]
        valid = at + 4 <= words[2]
        address = np.broadcast_to(base + at, (count, len(base)))
        valid = np.broadcast_to(valid, address.shape)
        used = valid.any(0)
        if used.any():
            # What lies below num_records still has to be memory that the launch was given.
            low = np.where(valid, address, address.max()).min(0)
            bytes_read = 4 * valid.sum(0)
            rows = np.arange(batch.waves)[waves][used]
            for size in np.unique(bytes_read[used]):
                same = bytes_read[used] == size
                _confirm(batch, rows[same], low[used][same], int(size))
        result = np.zeros(address.shape, np.uint32)
        result[valid] = _memory[(address[valid] - LOWEST) >> 2]
        batch.sgpr[register : register + count, waves] = result

    return run


def _confirm(batch: Batch, waves: Selection, address: np.ndarray, size: int) -> None:
    """Raise OutOfRange unless `size` bytes from each address (int64 [waves], or [1] for all) are in one buffer."""
    low, high = int(address.min()), int(address.max())
    registry = batch.registry
    if low & 3 == 0 and (high == low or not (address & 3).any()):
        if any(high + size <= buffer.end for buffer in registry.holding(low)):
            return
    numbers = np.arange(batch.waves)[waves]
    for wave, one in zip(numbers.tolist(), np.broadcast_to(address, numbers.shape).tolist(), strict=True):
        place = f"{size}-byte scalar read at {one:#x} by wave {wave} of the batch (wave " + (
            f"{batch.wave_in_group[wave]} of work-group {batch.workgroup_ids[batch.group_of[wave]]})"
        )
        if one & 3:
            raise OutOfRange(f"{place}: not a multiple of 4")
        if not any(one + size <= buffer.end for buffer in registry.holding(one)):
            raise OutOfRange(f"{place}: {registry.nearest(one)}")


def _clock(instruction: Instruction) -> Handler:
    """s_memtime, s_memrealtime: a counter of the batch that advances with every read, not a time."""
    register = instruction.field("sdata")

    def run(batch: Batch, waves: Selection) -> None:
        counter = _clocks.setdefault(batch, itertools.count(_TICKS_PER_READ, _TICKS_PER_READ))
        now = next(counter)
        batch.write_sgpr_pair(waves, register, (now & 0xFFFFFFFF, now >> 32))

    return run
