"""Jumps and calls through registers. `Batch.pc` counts from the start of the image, registers hold whole addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .decode import Instruction
from .errors import OutOfRange
from .operands import scalar64
from .state import Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler


def _getpc(instruction: Instruction) -> Handler:
    """The address of the next instruction."""
    after, register = instruction.address + instruction.size, instruction.field("sdst")

    def run(batch: Batch, waves: Selection) -> None:
        address = batch.image_base + after
        batch.write_sgpr_pair(waves, register, (address & 0xFFFFFFFF, address >> 32))

    return run


def _jump(batch: Batch, waves: Selection, target: np.ndarray) -> None:
    """Go to the addresses `target` (uint64 [waves]), which have to be in this image."""
    offset = target.view(np.int64) - batch.image_base
    if offset.min() < 0:
        raise OutOfRange(f"jump to {int(target[offset.argmin()]):#x}, which lies before the image")
    batch.pc[waves] = offset


def _setpc(instruction: Instruction) -> Handler:
    target = scalar64(instruction.field("ssrc0"))
    return lambda batch, waves: _jump(batch, waves, target(batch, waves))


def _swappc(instruction: Instruction) -> Handler:
    target, link = scalar64(instruction.field("ssrc0")), _getpc(instruction)

    def run(batch: Batch, waves: Selection) -> None:
        address = target(batch, waves)
        link(batch, waves)
        _jump(batch, waves, address)

    return run


def _call(instruction: Instruction) -> Handler:
    link, target = _getpc(instruction), instruction.branch_target

    def run(batch: Batch, waves: Selection) -> None:
        link(batch, waves)
        batch.pc[waves] = target

    return run


PROGRAM_COUNTER: dict[str, Callable[[Instruction], Handler]] = {
    "s_getpc_b64": _getpc,
    "s_setpc_b64": _setpc,
    "s_swappc_b64": _swappc,
    "s_call_b64": _call,
}
