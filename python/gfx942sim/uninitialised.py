"""Finds reads of LDS bytes and of vector registers that nobody wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import Uninitialised
from .registers import ignores_exec, vgpr_reads, vgpr_writes
from .state import AGPR, LANES, Batch, Selection

if TYPE_CHECKING:
    from .decode import Instruction


@dataclass(frozen=True)
class UninitialisedRead:
    """One read of what nobody wrote.

    what: "LDS" or "VGPR". where: byte of the work-group's LDS, or register (AGPR n is 256 + n). address: of the
    instruction, bytes from the start of the image. wave: counted inside the work-group.
    """

    what: str
    where: int
    address: int
    mnemonic: str
    workgroup: tuple[int, int, int]
    wave: int
    lane: int

    @property
    def name(self) -> str:
        """The place in words: "LDS byte 0x40", "v12", "a3"."""
        if self.what == "LDS":
            return f"LDS byte {self.where:#x}"
        return f"v{self.where}" if self.where < AGPR else f"a{self.where - AGPR}"

    def __str__(self) -> str:
        return (
            f"{self.mnemonic} at {self.address:#x} reads {self.name}, which nobody wrote (wave {self.wave}, lane "
            f"{self.lane} of work-group {self.workgroup})"
        )


class _Findings:
    """Raises at the first finding (`stop`), or keeps one for each instruction in `found`."""

    def __init__(self, stop: bool):
        self.stop = stop
        self.found: list[UninitialisedRead] = []
        self._seen: set[int] = set()

    def _knows(self, instruction: Instruction) -> bool:
        return instruction.address in self._seen

    def _add(self, batch: Batch, instruction: Instruction, what: str, where: int, wave: int, lane: int) -> None:
        """wave: index in the batch."""
        workgroup = tuple(batch.workgroup_ids[batch.group_of[wave]])
        number = int(batch.wave_in_group[wave])
        read = UninitialisedRead(what, where, instruction.address, instruction.mnemonic, workgroup, number, lane)
        if self.stop:
            raise Uninitialised(f"reads {read.name}, which nobody wrote (wave {number}, lane {lane} of {workgroup})")
        self._seen.add(instruction.address)
        self.found.append(read)


class LdsWriteCheck(_Findings):
    """An observer: LDS that is read before any wave of the work-group wrote it.

    Args:
        stop: raise Uninitialised at once, instead of keeping the findings in `found`.
    """

    def __init__(self, stop: bool):
        super().__init__(stop)
        self._batch: Batch | None = None
        self._written = np.zeros(0, np.uint8)  # 255 for each byte of each group, as they lie in Batch.lds

    def lds(
        self, batch: Batch, selection: Selection, instruction: Instruction, address, active, size: int, kind: str
    ) -> None:
        if batch is not self._batch:
            self._batch, self._written = batch, np.zeros(batch.lds.size, np.uint8)
        if kind == "read" and self._knows(instruction):
            return
        # Accesses outside of the LDS are the business of whoever makes them.
        row_bytes = batch.lds.shape[1]
        active = active & (address >= 0) & (address <= row_bytes - size)
        everywhere = active.all()
        lanes = (address + batch.lds_start[selection])[... if everywhere else active].ravel()
        if lanes.size == 0:
            return
        # As few pieces as the alignment allows, each of them one element of a wider view.
        step = int(np.bitwise_or.reduce(lanes)) | size
        width = min(8, step & -step)
        view = self._written.view(f"u{width}")
        full = view.dtype.type((1 << 8 * width) - 1)
        pieces = lanes // width
        for piece in range(size // width):
            if kind != "write" and not self._knows(instruction):
                missing = view[pieces + piece] != full
                if missing.any():
                    first = int(np.argmax(missing))
                    self._report(batch, selection, instruction, active, first, lanes, piece * width)
            if kind != "read":
                view[pieces + piece] = full

    def _report(self, batch, selection, instruction, active, first: int, lanes, offset: int) -> None:
        """first: number of the access among those of active lanes."""
        start = int(lanes[first]) + offset
        while self._written[start]:
            start += 1
        wave, lane = divmod(int(np.flatnonzero(active)[first]), LANES)
        number = int(np.arange(batch.waves)[selection][wave])
        self._add(batch, instruction, "LDS", start % batch.lds.shape[1], number, lane)

    def vmem(self, batch, selection, instruction, address, active, size: int, kind: str) -> None:
        """Global memory is not looked at."""

    def barrier(self, batch, workgroups) -> None:
        """What was written stays written."""


class RegisterWriteCheck(_Findings):
    """A scheduler.InstructionCheck: lanes of vector registers that are read before they were written.

    A lane that moves data from other lanes (DPP, readlane, permutes) is looked at as if it read its own.

    Args:
        stop: raise Uninitialised at once, instead of keeping the findings in `found`.
    """

    def __init__(self, stop: bool):
        super().__init__(stop)
        self._written = np.zeros((0, 0, LANES), bool)
        self._known: dict[int, tuple[tuple[range, ...], tuple[range, ...], bool]] = {}

    def begin(self, batch: Batch) -> None:
        """A new batch: only v0, which holds the work-item's ids, is written."""
        self._written = np.zeros(batch.vgpr.shape, bool)
        self._written[0] = True

    def before(self, batch: Batch, waves: Selection, instruction: Instruction) -> None:
        known = self._known.get(instruction.address)
        if known is None:
            known = vgpr_reads(instruction), vgpr_writes(instruction), ignores_exec(instruction)
            self._known[instruction.address] = known
        reads, writes, all_lanes = known
        if not reads and not writes:
            return
        active = np.ones_like(batch.exec[waves]) if all_lanes else batch.exec[waves]
        if not self._knows(instruction):
            self._check(batch, waves, instruction, reads, active)
        if instruction.mnemonic == "v_writelane_b32":
            # One lane is written, whatever EXEC is; which one is often in an SGPR: all count as written.
            active = np.ones_like(active)
        for register in (register for registers in writes for register in registers):
            if isinstance(waves, slice):
                self._written[register] |= active
            else:
                self._written[register, waves] |= active

    def _check(self, batch: Batch, waves: Selection, instruction, reads: tuple[range, ...], active) -> None:
        for register in (register for registers in reads for register in registers):
            missing = active & ~self._written[register, waves]
            if missing.any():
                row, lane = np.argwhere(missing)[0].tolist()
                wave = int(np.arange(batch.waves)[waves][row])
                self._add(batch, instruction, "VGPR", register, wave, lane)
                return
