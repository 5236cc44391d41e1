"""Scalar loads (SMEM): kernel arguments, page tables, descriptors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from .buffers import LOWEST, view_of
from .code_object import Descriptor
from .decode import Instruction
from .errors import OutOfRange, UnknownInstruction
from .state import Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

_WORDS = view_of(np.uint32)
i64 = np.int64
_LOAD = re.compile(r"s_(buffer_)?load_dword(?:x(\d+))?")
_NO_EFFECT = frozenset(("s_dcache_inv", "s_dcache_inv_vol", "s_dcache_wb", "s_dcache_wb_vol"))


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """SMEM instructions."""
    name = instruction.mnemonic
    if name in _NO_EFFECT:
        return None
    if name in ("s_memtime", "s_memrealtime"):
        register = instruction.field("sdata")

        def clock(batch: Batch, waves: Selection) -> None:
            # There is no time here; a counter that never stands still lets a program that waits for one go on.
            batch.clock = getattr(batch, "clock", 0) + 64
            batch.write_sgpr_pair(waves, register, (batch.clock & 0xFFFFFFFF, batch.clock >> 32))

        return clock
    match = _LOAD.fullmatch(name)
    if not match:
        raise UnknownInstruction(f"{name} is not implemented")
    count, buffered = int(match[2] or 1), bool(match[1])
    base, first = instruction.field("sbase"), instruction.field("sdata")
    constant = instruction.signed("offset", 21) if instruction.field("imm") else 0
    offset_register = _offset_register(instruction)

    def load(batch: Batch, waves: Selection) -> None:
        start = batch.sgpr[base][waves].astype(i64)
        start |= (batch.sgpr[base + 1][waves].astype(i64) & (0xFFFF if buffered else 0xFFFFFFFF)) << 32
        offset = np.full(start.shape, constant, i64)
        if offset_register is not None:
            offset += batch.sgpr[offset_register][waves].astype(i64)
        offset &= ~3
        address = (start & ~3) + offset
        if buffered:
            inside = [offset + 4 * j + 4 <= _records(batch, waves, base) for j in range(count)]
            _check(batch, address, np.count_nonzero(inside, axis=0) * 4)
            words = [np.zeros(len(address), np.uint32) for _ in range(count)]
            for j, lanes in enumerate(inside):
                words[j][lanes] = _WORDS[(address[lanes] + 4 * j - LOWEST) >> 2]
        else:
            _check(batch, address, np.full(len(address), 4 * count))
            words = [_WORDS[(address + 4 * j - LOWEST) >> 2] for j in range(count)]
        for j, word in enumerate(words):
            batch.sgpr[first + j][waves] = word

    return load


def _offset_register(instruction: Instruction) -> int | None:
    """The SGPR that holds an offset: soffset, or, without an immediate, what the offset field names."""
    if instruction.field("soffset_en"):
        return instruction.field("soffset")
    if not instruction.field("imm"):
        return instruction.field("offset") & 0x7F
    return None


def _records(batch: Batch, waves: Selection, base: int) -> np.ndarray:
    """Bytes of a buffer resource: num_records, times the stride for a structured one."""
    stride = batch.sgpr[base + 1][waves] >> np.uint32(16) & np.uint32(0x3FFF)
    return batch.sgpr[base + 2][waves].astype(i64) * np.maximum(stride, 1)


def _check(batch: Batch, address: np.ndarray, size: np.ndarray) -> None:
    """Each wave's bytes must lie in one registered buffer."""
    for start, length in set(zip(address.tolist(), size.tolist(), strict=True)):
        if length and not any(start + length <= b.end for b in batch.registry.holding(start)):
            wave = int(np.flatnonzero(address == start)[0])
            raise OutOfRange(
                f"{length}-byte scalar read at {start:#x} (row {wave} of the waves in step): "
                f"{batch.registry.nearest(start)}"
            )
