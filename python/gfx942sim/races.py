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
        narrow = size < 4 or bool(int(np.bitwise_or.reduce(address[active], initial=0)) & 3)
        if narrow:
            shadow.to_bytes()
        group = batch.group_of[selection][:, None]
        wave = batch.wave_in_group[selection][:, None].astype(np.int8)
        first = group * shadow.writer.shape[1] + (address >> shadow.shift)
        step = 1 << shadow.shift
        if active.all():
            cells, waves = first.reshape(-1), np.broadcast_to(wave, active.shape).reshape(-1)
        else:
            cells, waves = first[active], np.broadcast_to(wave, active.shape)[active]
        for offset in range(size // step if shadow.shift else size):
            self._touch(shadow, cells + offset, waves, instruction.address, kind)

    def _touch(self, shadow: _Shadow, cells: np.ndarray, waves: np.ndarray, address: int, kind: str) -> None:
        """One cell per lane. `waves` int8: the wave in its work-group."""
        writer, readers = shadow.writer.reshape(-1), shadow.readers.reshape(-1)
        mark = address | (_ATOMIC if kind == "atomic" else 0)
        last = writer[cells]
        foreign = (last != _NOBODY) & (last != waves)
        if foreign.any():
            self._report(
                "RAW" if kind == "read" else "WAW", shadow, cells[foreign], last[foreign], waves[foreign], mark
            )
        bit = np.uint16(1) << waves.astype(np.uint16)
        if kind == "read":
            _or_at(readers, cells, bit)
            shadow.read_at.reshape(-1)[cells] = mark
            return
        others = readers[cells] & ~bit
        if others.any():
            at = others != 0
            first = np.log2(others[at] & -others[at].astype(np.int32)).astype(np.int8)
            self._report("WAR", shadow, cells[at], first, waves[at], mark)
        writer[cells] = waves
        shadow.written_at.reshape(-1)[cells] = mark
        # Waves in step run one call together: of two that write a cell, one finds the other's mark.
        overwritten = writer[cells] != waves
        if overwritten.any():
            self._report("WAW", shadow, cells[overwritten], writer[cells][overwritten], waves[overwritten], mark)

    def _report(self, kind, shadow, cells, first_waves, second_waves, mark: int) -> None:
        before = (shadow.read_at if kind == "WAR" else shadow.written_at).reshape(-1)[cells]
        if mark & _ATOMIC:
            real = before & _ATOMIC == 0
            if not real.any():
                return
            cells, first_waves, second_waves, before = (x[real] for x in (cells, first_waves, second_waves, before))
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
                    int(second_waves[i]),
                ),
            )


def _or_at(target: np.ndarray, cells: np.ndarray, bits: np.ndarray) -> None:
    """target[cells] |= bits where a cell may come more than once: once per distinct bit is enough."""
    for bit in np.unique(bits):
        mine = cells if len(bits) == 1 else cells[bits == bit]
        target[mine] |= bit
