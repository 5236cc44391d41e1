"""Lane exchanges through the LDS crossbar. They touch no LDS memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .decode import Instruction
from .errors import UnknownInstruction
from .state import AGPR, LANE, LANES, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

u32 = np.uint32
NAMES = frozenset(("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"))


def translate(instruction: Instruction) -> Handler:
    accumulator = AGPR if instruction.field("acc") else 0
    target = instruction.field("vdst") - 256 + accumulator
    address, data = instruction.field("addr") - 256, instruction.field("data0") - 256 + accumulator
    constant = instruction.field("offset0") | instruction.field("offset1") << 8
    if instruction.mnemonic == "ds_swizzle_b32":
        source = swizzle_sources(constant)

        def swizzle(batch: Batch, waves: Selection) -> None:
            value = np.where(batch.exec[waves], batch.vgpr[address][waves], u32(0))
            batch.write_vgpr(waves, target, value[:, source])

        return swizzle

    def lanes(batch: Batch, waves: Selection) -> np.ndarray:
        return ((batch.vgpr[address][waves] + u32(constant)) >> u32(2) & u32(LANES - 1)).astype(np.intp)

    if instruction.mnemonic == "ds_bpermute_b32":

        def pull(batch: Batch, waves: Selection) -> None:
            # A lane that is off gives 0.
            value = np.where(batch.exec[waves], batch.vgpr[data][waves], u32(0))
            batch.write_vgpr(waves, target, np.take_along_axis(value, lanes(batch, waves), 1))

        return pull

    def push(batch: Batch, waves: Selection) -> None:
        active, value = batch.exec[waves], batch.vgpr[data][waves]
        result = np.zeros_like(value)
        row, lane = np.nonzero(active)  # ascending, so that the highest lane wins
        result[row, lanes(batch, waves)[row, lane]] = value[row, lane]
        batch.write_vgpr(waves, target, result)

    return push


def swizzle_sources(mode: int) -> np.ndarray:
    """Source lane per lane of ds_swizzle_b32's offset field: bit masks or quad permutation."""
    if mode & 0x8000:
        if mode >= 0xE000:
            raise UnknownInstruction(f"ds_swizzle mode {mode:#x} (FFT or rotate)")
        return (LANE & ~3) + np.array([mode >> 2 * (lane & 3) & 3 for lane in LANE])
    inside = LANE & 31
    return LANE & 32 | ((inside & mode & 31 | mode >> 5 & 31) ^ mode >> 10 & 31)
