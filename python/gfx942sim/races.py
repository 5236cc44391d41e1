"""Finds LDS races: two waves of a work-group touch the same byte, one of them writes, and no barrier is in between.

What is remembered since the last barrier is kept per cell of LDS (a dword; halves or bytes once a kernel makes accesses
that small), per kind of access and per wave of the work-group: which instruction touched it last. Groups that do the
same thing at the same time, which is nearly always all of them, share one such record, so that the check looks at one
group's accesses instead of at all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import SimulationError
from .state import LANES, Batch, Selection

if TYPE_CHECKING:
    from .code_object import CodeObject
    from .decode import Instruction

# What an access of one kind must not meet, and what that is called. Atomics do not race with each other.
_CONFLICTS = {
    "read": {"write": "RAW", "atomic": "RAW"},
    "write": {"read": "WAR", "write": "WAW", "atomic": "WAW"},
    "atomic": {"read": "WAR", "write": "WAW"},
}
_CLEAN = 0


@dataclass(frozen=True)
class LdsRace:
    """Two accesses without a barrier in between, in the order in which this run made them.

    kind: "RAW" (the second reads what the first wrote), "WAR" or "WAW"; an atomic counts as a write. Addresses are of
    instructions, bytes from the start of the image. offset: a byte of the group's LDS that both touch (more may be).
    Waves are counted inside the work-group.
    """

    kind: str
    first_address: int
    first_mnemonic: str
    second_address: int
    second_mnemonic: str
    offset: int
    workgroup: tuple[int, int, int]
    first_wave: int
    second_wave: int

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.first_mnemonic} at {self.first_address:#x} by wave {self.first_wave}, then "
            f"{self.second_mnemonic} at {self.second_address:#x} by wave {self.second_wave}, LDS byte {self.offset:#x} "
            f"of work-group {self.workgroup}"
        )


class LdsRaces(SimulationError):
    """The races of one launch, in `races`."""

    def __init__(self, kernel: str, races: Sequence[LdsRace]):
        lines = "".join(f"\n  {race}" for race in races)
        super().__init__(f"{kernel}: {len(races)} LDS race{'s' if len(races) > 1 else ''}{lines}")
        self.kernel, self.races = kernel, list(races)


class RaceCheck:
    """An observer of one launch. `code` and `kernel` say what is launched."""

    def __init__(self, code: CodeObject | None, kernel: str):
        self.code, self.kernel = code, kernel
        self._found: dict[tuple[str, int, int], LdsRace] = {}
        # Number in the records -> instruction. 0 means that a cell was not touched.
        self._instructions: list[Instruction | None] = [None]
        self._numbers: dict[int, int] = {}
        self._batch: Batch | None = None
        self._record: _Record | None = None

    def found(self) -> list[LdsRace]:
        """One race for each kind and pair of instructions, in the order of discovery."""
        return list(self._found.values())

    def vmem(self, batch, selection, instruction, address, active, size: int, kind: str) -> None:
        """Global memory is not looked at."""

    def lds(
        self, batch: Batch, selection: Selection, instruction: Instruction, address, active, size: int, kind: str
    ) -> None:
        if batch.waves_per_group == 1:
            return
        if batch is not self._batch:
            cell = self._record.cell_bytes if self._record is not None else 4
            self._batch, self._record = batch, _Record(batch, cell)
        number = self._numbers.get(instruction.address)
        if number is None:
            number = self._numbers[instruction.address] = len(self._instructions)
            self._instructions.append(instruction)
        touch = self._record.touch(selection, address, active, size)
        if touch is None:
            return
        # After the update, the record also has what other waves write in this very step.
        self._record.update(touch, kind, number)
        for earlier, name in _CONFLICTS[kind].items():
            seen = self._record.by_others(touch, earlier)
            if seen is not None and seen.any():
                self._report(name, touch, seen, instruction)

    def barrier(self, batch: Batch, workgroups: np.ndarray) -> None:
        if batch is self._batch:
            self._record.forget(workgroups)

    def _report(self, kind: str, touch: _Touch, seen: np.ndarray, second: Instruction) -> None:
        """seen: uint64 [accesses, cells, words], four waves' instruction numbers in a word."""
        numbers = seen.view(np.uint16)
        where = np.argwhere(numbers)
        which, at = np.unique(numbers[tuple(where.T)], return_index=True)
        batch, record = self._batch, self._record
        for number, (access, cell, wave) in zip(which.tolist(), where[at].tolist(), strict=True):
            first = self._instructions[number]
            key = kind, first.address, second.address
            if key not in self._found:
                self._found[key] = LdsRace(
                    kind,
                    first.address,
                    first.mnemonic,
                    second.address,
                    second.mnemonic,
                    offset=int(touch.cells[access, cell]) % record.cells * record.cell_bytes,
                    workgroup=tuple(batch.workgroup_ids[touch.groups[access]]),
                    first_wave=wave,
                    second_wave=int(touch.slots[access]),
                )


@dataclass
class _Touch:
    """Accesses of one instruction, one per active lane. cells: int64 [accesses, cells of each], indices into the
    flattened record. slots (wave in its group) and groups: [accesses]."""

    cells: np.ndarray
    slots: np.ndarray
    groups: np.ndarray


class _Record:
    """Who touched what in one batch since the last barrier.

    Every group has a row (`row_of`); groups with the same history share one. Row 0 is that of groups that did nothing
    since their barrier, and is never written. planes: kind -> uint16 [rows, cells, waves rounded up to 4, 8 or 16].
    """

    def __init__(self, batch: Batch, cell_bytes: int):
        self.batch, self.cell_bytes = batch, cell_bytes
        self.bytes = batch.lds.shape[1]
        self.slots = next(n for n in (4, 8, 16) if batch.waves_per_group <= n)
        self.planes: dict[str, np.ndarray] = {}
        self.row_of = np.full(batch.groups, _CLEAN)
        self.members = np.zeros(batch.groups + 1, np.int64)
        self.dirty = np.zeros(batch.groups + 1, bool)
        others = np.full((self.slots, self.slots), 0xFFFF, np.uint16)
        np.fill_diagonal(others, 0)
        self.others = others.view(np.uint64)[:, None, :]

    @property
    def cells(self) -> int:
        return self.bytes // self.cell_bytes

    def forget(self, groups: np.ndarray) -> None:
        np.subtract.at(self.members, self.row_of[groups], 1)
        self.row_of[groups] = _CLEAN

    def touch(self, selection: Selection, address: np.ndarray, active: np.ndarray, size: int) -> _Touch | None:
        """The accesses as cells of the record, one group for all that share their history. None: there are none."""
        batch = self.batch
        groups, slots = batch.group_of[selection], batch.wave_in_group[selection]
        waves, rows = self._representatives(selection, groups, slots, address, active)
        address, active, groups, slots = address[waves], active[waves], groups[waves], slots[waves]
        # Accesses outside of the LDS are the business of whoever makes them.
        taking_part = active & (address >= 0) & (address <= self.bytes - size)
        if taking_part.all():
            lane_address, wave = address.ravel(), np.repeat(np.arange(len(groups)), LANES)
        else:
            wave, lane = np.nonzero(taking_part)
            lane_address = address[wave, lane]
        if lane_address.size == 0:
            return None
        self._refine(int(np.bitwise_or.reduce(lane_address)) | size)
        cells = rows[wave] * self.cells + lane_address // self.cell_bytes
        count = size // self.cell_bytes
        return _Touch(cells[:, None] + np.arange(count), slots[wave], groups[wave])

    def by_others(self, touch: _Touch, kind: str) -> np.ndarray | None:
        """Numbers of the instructions with which other waves touched each cell: uint64 [accesses, cells, words]."""
        plane = self.planes.get(kind)
        if plane is None:
            return None
        return plane.reshape(-1, self.slots).view(np.uint64)[touch.cells] & self.others[touch.slots]

    def update(self, touch: _Touch, kind: str, number: int) -> None:
        if kind not in self.planes:
            self.planes[kind] = np.zeros((self.batch.groups + 1, self.cells, self.slots), np.uint16)
        self.planes[kind].reshape(-1)[touch.cells * self.slots + touch.slots[:, None]] = number

    def _refine(self, bits: int) -> None:
        """Make the cells as small as an access with these bits in its address or size wants them."""
        smaller = min(self.cell_bytes, bits & -bits)
        if smaller < self.cell_bytes:
            factor = self.cell_bytes // smaller
            self.planes = {kind: plane.repeat(factor, axis=1) for kind, plane in self.planes.items()}
            self.cell_bytes = smaller

    def _representatives(self, selection, groups, slots, address, active) -> tuple[Selection, np.ndarray]:
        """Which of the waves to look at, and the row of each of these. Their groups' rows may be written."""
        per_group = self._waves_per_group(selection, groups, slots)
        if per_group and _all_alike(address, active, len(groups) // per_group):
            leaders = self._share(groups[::per_group])
            if len(leaders) == 1:
                waves = slice(0, per_group)
            else:
                waves = (leaders[:, None] * per_group + np.arange(per_group)).ravel()
        else:
            for group in np.unique(groups).tolist():
                row = self.row_of[group]
                if row == _CLEAN or self.members[row] > 1:
                    self._move(np.array([group]), row)
            waves = slice(None)
        return waves, self.row_of[groups[waves]]

    def _waves_per_group(self, selection: Selection, groups, slots) -> int:
        """How many waves of each group are selected, if they are the same ones in all of them, else 0."""
        if isinstance(selection, slice):
            return self.batch.waves_per_group
        per_group = int(np.count_nonzero(groups == groups[0]))
        if len(groups) % per_group:
            return 0
        by_group = groups.reshape(-1, per_group)
        # Each block of `per_group` waves is one group, and no group has two blocks.
        if not (by_group == by_group[:, :1]).all() or not (np.diff(by_group[:, 0]) > 0).all():
            return 0
        return per_group if (slots.reshape(-1, per_group) == slots[:per_group]).all() else 0

    def _share(self, present: np.ndarray) -> np.ndarray:
        """Groups that do the same thing now: the ones that had a row in common keep one in common.

        Returns the index in `present` of one group for each row.
        """
        row_of = self.row_of[present]
        if (row_of == row_of[0]).all():
            rows, leaders, counts = row_of[:1], np.zeros(1, np.int64), np.array([len(present)])
        else:
            rows, leaders, counts = np.unique(row_of, return_index=True, return_counts=True)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            if row == _CLEAN or count < self.members[row]:
                self._move(present[row_of == row], row)
        return leaders

    def _move(self, groups: np.ndarray, row: int) -> None:
        """Give `groups`, which share `row`, a row of their own with the same content."""
        free = 1 + int(np.argmin(self.members[1:]))
        if row != _CLEAN:
            self.members[row] -= len(groups)
        if row != _CLEAN or self.dirty[free]:
            for plane in self.planes.values():
                plane[free] = plane[row]
        self.members[free], self.dirty[free] = len(groups), True
        self.row_of[groups] = free


def _all_alike(address: np.ndarray, active: np.ndarray, groups: int) -> bool:
    """Whether the lanes that are on, and their offsets, are the same in each of `groups` equal parts of the waves."""
    if groups == 1:
        return True
    address, active = address.reshape(groups, -1), active.reshape(groups, -1)
    same = address == address[0]
    return bool((same.all() or (same | ~active).all()) and (active == active[0]).all())
