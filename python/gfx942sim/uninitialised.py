"""Reads of LDS bytes and of registers that nobody wrote."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .decode import Instruction
from .errors import Uninitialised
from .registers import vgpr_reads, vgpr_writes
from .state import AGPR, Batch, Selection


@dataclass(frozen=True)
class UninitialisedRead:
    """what: "LDS byte 12" or "v3"/"a3". wave: its number in the work-group. address: of the instruction."""

    what: str
    address: int
    mnemonic: str
    wave: int
    lane: int
    workgroup: tuple[int, int, int]

    def __str__(self) -> str:
        return (
            f"{self.what} is read at {self.address:#x}, {self.mnemonic}, before anything was written there "
            f"(wave {self.wave}, lane {self.lane}, work-group {self.workgroup})"
        )


class _Findings:
    def __init__(self, stop: bool):
        self.stop = stop
        self.found: list[UninitialisedRead] = []
        self._seen: set[int] = set()

    def add(self, batch: Batch, selection: Selection, instruction: Instruction, what: str, row: int, lane: int) -> None:
        if instruction.address in self._seen and not self.stop:
            return
        self._seen.add(instruction.address)
        wave = int(np.arange(batch.waves)[selection][row])
        group = batch.workgroup_ids[batch.group_of[wave]]
        name = instruction.mnemonic
        read = UninitialisedRead(what, instruction.address, name, int(batch.wave_in_group[wave]), int(lane), group)
        if self.stop:
            raise Uninitialised(str(read))
        self.found.append(read)


class LdsWriteCheck(_Findings):
    """Observer: every byte of LDS that is read was written before, by any wave of the work-group.

    Args:
        stop: raise Uninitialised at the first one; else collect in `found`, one per instruction.
    """

    def __init__(self, stop: bool):
        super().__init__(stop)
        self._batch: Batch | None = None
        self._written: np.ndarray | None = None

    def vmem(self, batch, selection, instruction, address, active, size, kind) -> None:
        """Global memory is not looked at."""

    def barrier(self, batch, workgroups) -> None:
        """What was written stays written."""

    def lds(self, batch: Batch, selection, instruction, address, active, size: int, kind: str) -> None:
        if self._batch is not batch:
            self._batch, self._written = batch, np.zeros(batch.lds.shape, bool)
        flat = self._written.reshape(-1)
        at = address + batch.lds_start[selection]
        where = at[active]
        if kind in ("read", "atomic"):
            # A dword at a time: written bytes of an aligned dword are seen as one uint32.
            aligned = size % 4 == 0 and not int(np.bitwise_or.reduce(where, initial=0)) & 3
            cells = flat.view(np.uint32) if aligned else flat
            unit, whole = (4, 0x01010101) if aligned else (1, True)
            for offset in range(0, size, unit):
                missing = cells[(where + offset) // unit] != whole
                if missing.any():
                    first = int(np.flatnonzero(missing)[0])
                    row, lane = np.argwhere(active)[first]
                    start = int(where[first]) + offset
                    byte = address[row, lane] + offset + int(np.argmin(flat[start : start + unit]))
                    self.add(batch, selection, instruction, f"LDS byte {byte}", row, lane)
        if kind != "read":
            for offset in range(size):
                flat[where + offset] = True


class RegisterWriteCheck(_Findings):
    """Instruction check (scheduler.InstructionCheck): every VGPR lane that is read was written before."""

    def begin(self, batch: Batch) -> None:
        self._written = np.zeros(batch.vgpr.shape, bool)
        self._written[0] = True  # the work-item id

    def before(self, batch: Batch, waves: Selection, instruction: Instruction) -> None:
        everywhere = "mfma" in instruction.mnemonic
        active = np.ones_like(batch.exec[waves]) if everywhere else batch.exec[waves]
        for registers in vgpr_reads(instruction):
            for register in registers:
                missing = active & ~self._written[register][waves]
                if missing.any():
                    row, lane = np.argwhere(missing)[0]
                    name = f"a{register - AGPR}" if register >= AGPR else f"v{register}"
                    self.add(batch, waves, instruction, name, row, lane)
        for registers in vgpr_writes(instruction):
            for register in registers:
                self._written[register][waves] |= active
