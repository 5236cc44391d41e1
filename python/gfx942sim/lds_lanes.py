"""DS instructions that move data between the lanes of a wave and touch no memory: permute, bpermute, swizzle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .access import register_of, write_words
from .decode import Instruction
from .state import LANE, LANES, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

_FFT, _ROTATE, _QUAD = 0xE000, 0xC000, 0x8000


def _offset(instruction: Instruction) -> int:
    return instruction.field("offset0") | instruction.field("offset1") << 8


def _lane_numbers(batch: Batch, waves: Selection, register: int, offset: int) -> np.ndarray:
    return ((batch.vgpr[register][waves] + np.uint32(offset)) >> np.uint32(2) & np.uint32(LANES - 1)).astype(np.int64)


def _every(lanes: np.ndarray) -> np.ndarray | None:
    return None if lanes.all() else lanes


def _bpermute(instruction: Instruction) -> Handler:
    """Each lane reads the lane that its address names. A lane that is off gives 0."""
    address, offset = register_of(instruction, "addr", accumulator=False), _offset(instruction)
    source, target = register_of(instruction, "data0"), register_of(instruction, "vdst")

    def bpermute(batch: Batch, waves: Selection) -> None:
        lanes = _every(batch.exec[waves])
        index = _lane_numbers(batch, waves, address, offset)
        data = batch.vgpr[source][waves]
        if lanes is not None:
            data = np.where(lanes, data, np.uint32(0))
        index += np.arange(len(index))[:, None] * LANES
        write_words(batch, waves, target, [data.reshape(-1).take(index)], lanes)

    return bpermute


def _permute(instruction: Instruction) -> Handler:
    """Each active lane sends to the lane that its address names; the highest sender wins; nobody's target gets 0."""
    address, offset = register_of(instruction, "addr", accumulator=False), _offset(instruction)
    source, target = register_of(instruction, "data0"), register_of(instruction, "vdst")

    def permute(batch: Batch, waves: Selection) -> None:
        lanes = _every(batch.exec[waves])
        index = _lane_numbers(batch, waves, address, offset)
        index += np.arange(len(index))[:, None] * LANES
        data = batch.vgpr[source][waves]
        sent = np.zeros(data.size, np.uint32)
        if lanes is None:
            sent[index] = data
        else:
            sent[index[lanes]] = data[lanes]
        write_words(batch, waves, target, [sent.reshape(data.shape)], lanes)

    return permute


def swizzle_source(offset: int) -> np.ndarray:
    """The lane that each lane reads for the 16-bit offset of ds_swizzle_b32, int64 [64].

    Modes, all within groups of 32 lanes: bit masks (and, or, xor), four consecutive lanes, rotation, and the bit
    reversal that a fast Fourier transform needs.
    """
    within, group = LANE & 31, LANE & 32
    low, middle, high = offset & 31, offset >> 5 & 31, offset >> 10 & 31
    if offset >= _FFT:
        reverse = np.array([int(f"{lane:05b}"[::-1], 2) for lane in within])
        return group | (reverse >> low.bit_count()) | (within & low)
    if offset >= _ROTATE:
        step = -middle if offset >> 10 & 1 else middle
        return group | (within & low) | ((within + step) & 31 & ~low)
    if offset >= _QUAD:
        return (LANE & ~3) | (offset >> (2 * (LANE & 3)) & 3)
    return group | (((within & low) | middle) ^ high)


def _swizzle(instruction: Instruction) -> Handler:
    """A fixed exchange between lanes. A lane that is off gives 0."""
    source, target = register_of(instruction, "addr", accumulator=False), register_of(instruction, "vdst")
    index = swizzle_source(_offset(instruction))

    def swizzle(batch: Batch, waves: Selection) -> None:
        lanes = _every(batch.exec[waves])
        data = batch.vgpr[source][waves]
        if lanes is not None:
            data = np.where(lanes, data, np.uint32(0))
        write_words(batch, waves, target, [data.take(index, axis=1)], lanes)

    return swizzle


TABLE: dict[str, Callable[[Instruction], Handler]] = {
    "ds_bpermute_b32": _bpermute,
    "ds_permute_b32": _permute,
    "ds_swizzle_b32": _swizzle,
}
