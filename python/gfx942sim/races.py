"""LDS races: two waves of a work-group on one byte, one of them writing, with no barrier in between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .code_object import CodeObject
from .decode import Instruction
from .errors import SimulationError
from .state import Batch, Selection

_NOBODY = -1
_ATOMIC = 1 << 30


@dataclass(frozen=True)
class LdsRace:
    """One race. kind: "RAW" (read after another wave's write), "WAR" or "WAW", in the order in which they ran here.

    Addresses are of the two instructions, bytes from the start of the image; `byte` is in the work-group's LDS.
    """

    kind: str
    first_address: int
    first_mnemonic: str
    second_address: int
    second_mnemonic: str
    byte: int
    workgroup: tuple[int, int, int]
    first_wave: int
    second_wave: int

    def __str__(self) -> str:
        return (
            f"{self.kind}: wave {self.first_wave} {self.first_mnemonic} at {self.first_address:#x}, then wave "
            f"{self.second_wave} {self.second_mnemonic} at {self.second_address:#x}, LDS byte {self.byte} of "
            f"work-group {self.workgroup}"
        )


class LdsRaces(SimulationError):
    """A launch had races. `races` lists them."""

    def __init__(self, kernel: str, races: list[LdsRace]):
        lines = "\n  ".join(str(race) for race in races[:8])
        more = f"\n  and {len(races) - 8} more" if len(races) > 8 else ""
        super().__init__(f"{kernel}: {len(races)} LDS race(s) without a barrier in between:\n  {lines}{more}")
        self.races = races


class _Shadow:
    """Who touched each cell of the LDS of a batch since the last barrier. A cell is a dword, or a byte once a narrow
    access was seen.

    writer: wave in the work-group, or -1. readers: a bit per wave. written_at, read_at: instruction address (the last
    reader's), with _ATOMIC set for an atomic.
    """

    def __init__(self, batch: Batch):
        self.groups, self.row = batch.lds.shape
        self.shift = 2
        self._allocate(self.row >> 2)

    def _allocate(self, cells: int) -> None:
        shape = (self.groups, cells)
        self.writer = np.full(shape, _NOBODY, np.int8)
        self.readers = np.zeros(shape, np.uint16)
        self.written_at = np.zeros(shape, np.int32)
        self.read_at = np.zeros(shape, np.int32)

    def to_bytes(self) -> None:
        if self.shift:
            self.shift = 0
            for name in ("writer", "readers", "written_at", "read_at"):
                setattr(self, name, np.repeat(getattr(self, name), 4, axis=1))

    def forget(self, groups: np.ndarray) -> None:
        self.writer[groups] = _NOBODY
        self.readers[groups] = 0


class RaceCheck:
    """Observer that finds LDS races in any order of the waves, for the accesses that were executed."""

    def __init__(self, code: CodeObject | None, kernel: str):
        self.kernel = kernel
        self._batch: Batch | None = None
        self._shadow: _Shadow | None = None
        self._races: dict[tuple[str, int, int], LdsRace] = {}
        self._mnemonics: dict[int, str] = {}

    def found(self) -> list[LdsRace]:
        """One race per kind and pair of instructions."""
        return list(self._races.values())

    def vmem(self, batch, selection, instruction, address, active, size, kind) -> None:
        """Global memory is not looked at."""

    def barrier(self, batch: Batch, workgroups: np.ndarray) -> None:
        if self._batch is batch and self._shadow is not None:
            self._shadow.forget(workgroups)

    def lds(
        self,
        batch: Batch,
        selection: Selection,
        instruction: Instruction,
        address: np.ndarray,
        active: np.ndarray,
        size: int,
        kind: str,
    ) -> None:
        if batch.waves_per_group == 1:
            return
        if self._batch is not batch:
            self._batch, self._shadow = batch, _Shadow(batch)
        shadow = self._shadow
        self._mnemonics[instruction.address] = instruction.mnemonic
        whole = bool(active.all())
        if size < 4 or int(np.bitwise_or.reduce(address if whole else address[active], axis=None)) & 3:
            shadow.to_bytes()
        first = (batch.group_of[selection] * shadow.writer.shape[1])[:, None] + (address >> shadow.shift)
        offsets = np.arange(max(1, size >> shadow.shift))
        in_group = batch.wave_in_group[selection]
        # Wave after wave: of two that run this call in step and touch one cell, the second finds the first's mark.
        for wave in range(batch.waves_per_group):
            rows = in_group == wave
            if rows.any():
                cells = first[rows].reshape(-1) if whole else first[rows][active[rows]]
                if cells.size:
                    self._touch(shadow, (cells[:, None] + offsets).reshape(-1), wave, instruction.address, kind)

    def _touch(self, shadow: _Shadow, cells: np.ndarray, wave: int, address: int, kind: str) -> None:
        """One wave's access to the cells of one instruction."""
        writer, readers = shadow.writer.reshape(-1), shadow.readers.reshape(-1)
        mark = address | (_ATOMIC if kind == "atomic" else 0)
        last = writer[cells]
        foreign = (last != wave) & (last != _NOBODY)
        if foreign.any():
            self._report("RAW" if kind == "read" else "WAW", shadow, cells[foreign], last[foreign], wave, mark)
        read = readers[cells]
        bit = np.uint16(1 << wave)
        if kind == "read":
            readers[cells] = read | bit
            shadow.read_at.reshape(-1)[cells] = mark
            return
        others = read & ~bit
        if others.any():
            at = others != 0
            lowest = others[at] & (~others[at] + np.uint16(1))
            self._report("WAR", shadow, cells[at], np.log2(lowest).astype(np.int8), wave, mark)
        writer[cells] = wave
        shadow.written_at.reshape(-1)[cells] = mark

    def _report(self, kind: str, shadow: _Shadow, cells, first_waves, second_wave: int, mark: int) -> None:
        before = (shadow.read_at if kind == "WAR" else shadow.written_at).reshape(-1)[cells]
        if mark & _ATOMIC:
            real = before & _ATOMIC == 0
            if not real.any():
                return
            cells, first_waves, before = cells[real], first_waves[real], before[real]
        for earlier in np.unique(before):
            i = int(np.flatnonzero(before == earlier)[0])
            first, second = int(earlier) & ~_ATOMIC, mark & ~_ATOMIC
            group, cell = divmod(int(cells[i]), shadow.writer.shape[1])
            self._races.setdefault(
                (kind, first, second),
                LdsRace(
                    kind,
                    first,
                    self._mnemonics.get(first, "?"),
                    second,
                    self._mnemonics.get(second, "?"),
                    cell << shadow.shift,
                    self._batch.workgroup_ids[group],
                    int(first_waves[i]),
                    second_wave,
                ),
            )
