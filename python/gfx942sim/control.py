"""Program flow: branches, barriers, the end of a wave, and what has no effect in a functional model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .code_object import Descriptor
from .decode import Instruction
from .errors import UnknownInstruction
from .state import EXEC, VCC, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

# Timing, priorities, caches and debugging: nothing that a result can depend on here.
_NO_EFFECT = frozenset(
    ("s_nop", "s_waitcnt", "s_setprio", "s_sleep", "s_ttracedata", "s_icache_inv", "s_wakeup", "s_sethalt")
    + ("s_incperflevel", "s_decperflevel")
)

_CONDITIONS: dict[str, Callable[[Batch, Selection], np.ndarray]] = {
    "scc0": lambda b, w: b.scc[w] == 0,
    "scc1": lambda b, w: b.scc[w] != 0,
    "vccz": lambda b, w: (b.sgpr[VCC][w] | b.sgpr[VCC + 1][w]) == 0,
    "vccnz": lambda b, w: (b.sgpr[VCC][w] | b.sgpr[VCC + 1][w]) != 0,
    "execz": lambda b, w: (b.sgpr[EXEC][w] | b.sgpr[EXEC + 1][w]) == 0,
    "execnz": lambda b, w: (b.sgpr[EXEC][w] | b.sgpr[EXEC + 1][w]) != 0,
}


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """SOPP instructions."""
    name, after = instruction.mnemonic, instruction.address + instruction.size
    if name in _NO_EFFECT:
        return None
    if name.startswith("s_cbranch_") and name[10:] in _CONDITIONS:
        taken, target = _CONDITIONS[name[10:]], instruction.branch_target

        def conditional(batch: Batch, waves: Selection) -> None:
            batch.pc[waves] = np.where(taken(batch, waves), target, after)

        return conditional
    if name == "s_branch":
        target = instruction.branch_target

        def branch(batch: Batch, waves: Selection) -> None:
            batch.pc[waves] = target

        return branch
    if name == "s_barrier":

        def barrier(batch: Batch, waves: Selection) -> None:
            batch.pc[waves] = after
            batch.waiting[waves] = True

        return barrier
    if name == "s_endpgm":

        def end(batch: Batch, waves: Selection) -> None:
            batch.done[waves] = True

        return end
    raise UnknownInstruction(f"{name} is not implemented")
