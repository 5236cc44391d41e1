"""Counts the work of a launch: `CostCounter` watches its memory accesses and turns everything into a `CostReport`."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from .buffers import BufferRegistry
from .code_object import Resources
from .cost_model import (
    LANES,
    LDS_CROSSBAR_CLOCKS,
    MI300X,
    instruction_class,
    is_quarter_rate,
    lds_clocks,
    lds_crossbar,
    mfma_clocks,
    valu_clocks,
    workgroups_per_cu,
)
from .cost_report import BadCostReport, Bounds, CostReport
from .decode import Instruction

if TYPE_CHECKING:
    from .translate import Program

__all__ = ["BadCostReport", "Bounds", "CostCounter", "CostReport"]

_LINE = MI300X().cache_line
_COMPACT_AT = 1 << 20
UNREGISTERED = "no registered buffer"
# What one kind of access adds to: an atomic reads and writes its line.
_DIRECTIONS = {"read": ("read",), "write": ("written",), "atomic": ("read", "written")}
_BYTES = {"read": "read_bytes", "write": "written_bytes", "atomic": "atomic_bytes"}


class _Lines:
    """A set of cache lines, filled with arrays."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._pending = 0

    def add(self, lines: np.ndarray) -> None:
        self._parts.append(np.unique(lines))
        self._pending += self._parts[-1].size
        if self._pending > _COMPACT_AT:
            self.all()

    def all(self) -> np.ndarray:
        """The lines, ascending, each once."""
        merged = np.unique(np.concatenate(self._parts)) if self._parts else np.empty(0, np.int64)
        self._parts, self._pending = [merged], 0
        return merged


class CostCounter:
    """An observer of one launch; see state.Observer for what it is told.

    Bytes count active lanes only. Cache lines are of 128 bytes: per wave-instruction (what the cache is asked for) and
    different ones over the whole launch (what HBM must deliver at least once). Scratch is counted in bytes and stays
    out of the cache lines.
    """

    def __init__(self) -> None:
        self._counted: Counter[str] = Counter()
        self._buffers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._lines: defaultdict[tuple[str, str], _Lines] = defaultdict(_Lines)
        self._barriers = 0

    def lds(self, batch, selection, instruction: Instruction, address, active, size: int, kind: str) -> None:
        counted = self._counted
        moved = int(np.count_nonzero(active)) * size
        for direction in _DIRECTIONS[kind.removeprefix("scratch_")]:
            counted[f"lds_{direction}_bytes"] += moved
        counted["lds_accesses"] += active.shape[0]
        counted["lds_clocks"] += lds_clocks(address, active, size, atomic=kind == "atomic")
        counted["lds_clocks_without_conflicts"] += active.shape[0] * _conflict_free_clocks(size)

    def vmem(self, batch, selection, instruction: Instruction, address, active, size: int, kind: str) -> None:
        lanes = int(np.count_nonzero(active))
        if instruction.encoding.startswith("SCRATCH"):
            for direction in _DIRECTIONS[kind.removeprefix("scratch_")]:
                self._counted[f"scratch_{direction}_bytes"] += lanes * size
            return
        self._counted[f"vmem_{_BYTES[kind]}"] += lanes * size
        self._counted["vmem_accesses"] += active.shape[0]
        if kind == "atomic":
            self._counted["vmem_atomics"] += active.shape[0]
        if not lanes:
            return
        lines = _lines_of_each_wave(address, active, size)
        for direction in _DIRECTIONS[kind.removeprefix("scratch_")]:
            self._counted[f"vmem_{direction}_lines"] += lines.size
        self._per_buffer(batch.registry, address if active.all() else address[active], size, kind)

    def barrier(self, batch, workgroups: np.ndarray) -> None:
        self._barriers += len(workgroups)

    def _per_buffer(self, registry: BufferRegistry, address: np.ndarray, size: int, kind: str) -> None:
        address = address.reshape(-1)
        for label, part in _by_buffer(registry, address):
            self._buffers[label][_BYTES[kind]] += part.size * size
            touched = np.concatenate([part // _LINE, (part + size - 1) // _LINE])
            for direction in _DIRECTIONS[kind.removeprefix("scratch_")]:
                self._lines[label, direction].add(touched)

    def report(
        self,
        program: Program,
        counts: Mapping[int, int],
        resources: Resources,
        threads: int,
        dynamic_lds: int,
        ran_workgroups: int,
        total_workgroups: int,
    ) -> CostReport:
        """The report of a finished launch.

        Args:
            counts: address -> executed wave-instructions. threads: work-items per work-group. dynamic_lds: bytes.
            ran_workgroups: how many were simulated, of the total_workgroups that the grid has.
        """
        counted, mnemonics = Counter(self._counted), Counter()
        for address, count in counts.items():
            _count_instruction(counted, mnemonics, program.steps[address].instruction, count)
        counted["barrier_releases"] = self._barriers
        buffers = {label: dict(found) for label, found in self._buffers.items()}
        for direction in ("read", "written"):
            sets = [lines.all() for (_, d), lines in self._lines.items() if d == direction]
            counted[f"hbm_{direction}_lines"] = np.unique(np.concatenate(sets)).size if sets else 0
        for (label, direction), lines in self._lines.items():
            buffers[label][f"{direction}_lines"] = int(lines.all().size)
        return CostReport(
            kernel=program.kernel,
            ran_workgroups=ran_workgroups,
            total_workgroups=total_workgroups,
            waves_per_workgroup=-(-threads // LANES),
            workgroups_per_cu=workgroups_per_cu(resources, threads, dynamic_lds),
            waves_per_simd=resources.waves_per_simd(threads, dynamic_lds),
            resources={**dataclasses.asdict(resources), "dynamic_lds": dynamic_lds},
            counted={name: int(value) for name, value in sorted(counted.items())},
            mnemonics={name: int(count) for name, count in mnemonics.most_common()},
            buffers=buffers,
        )


def _count_instruction(counted: Counter, mnemonics: Counter, instruction: Instruction, count: int) -> None:
    name, kind = instruction.mnemonic, instruction_class(instruction)
    counted["instructions"] += count
    counted[kind] += count
    mnemonics[name] += count
    if kind == "valu":
        counted["valu_clocks"] += count * valu_clocks(name)
        counted["valu_quarter_rate"] += count * is_quarter_rate(name)
    elif kind == "mfma":
        counted["mfma_clocks"] += count * mfma_clocks(name)
    elif kind == "lds" and lds_crossbar(name):
        counted["lds_crossbar"] += count
        counted["lds_clocks"] += count * LDS_CROSSBAR_CLOCKS
        counted["lds_clocks_without_conflicts"] += count * LDS_CROSSBAR_CLOCKS


def _conflict_free_clocks(size: int) -> int:
    return {1: 2, 2: 4}.get(max(1, size // 4), 8)


def _lines_of_each_wave(address: np.ndarray, active: np.ndarray, size: int) -> np.ndarray:
    """The cache lines that each wave touches, each once per wave (one flat array)."""
    first, last = address // _LINE, (address + size - 1) // _LINE
    if (first != last).any():
        first, active = np.concatenate([first, last], axis=1), np.concatenate([active, active], axis=1)
    lines = np.where(active, first, -1)
    new = lines[:, 1:] != lines[:, :-1]
    if (lines[:, 1:] < lines[:, :-1]).any():
        lines = np.sort(lines, axis=1)
        new = lines[:, 1:] != lines[:, :-1]
    keep = np.concatenate([np.ones((len(lines), 1), bool), new], axis=1) & (lines >= 0)
    return lines[keep]


def _by_buffer(registry: BufferRegistry, address: np.ndarray):
    """Split addresses by the registered buffer that holds them: pairs (label, addresses).

    Where views of one storage overlap, the one that starts last wins.
    """
    low, high = int(address.min()), int(address.max())
    inner = [buffer for buffer in registry.holding(low) if high < buffer.end]
    if inner and not any(inner[-1].start < buffer.start <= high for buffer in registry):
        yield inner[-1].label, address
        return
    left = address
    for buffer in sorted(registry, key=lambda b: (-b.start, b.end)):
        inside = (left >= buffer.start) & (left < buffer.end)
        if inside.any():
            yield buffer.label, left[inside]
            left = left[~inside]
            if not left.size:
                return
    yield UNREGISTERED, left
