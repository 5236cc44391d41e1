"""`CostReport`: the counted work of a launch, scaled to its grid, and what each resource of an MI300X needs for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .cost_model import CLASSES, MI300X
from .errors import SimulationError

_FORMAT = "gfx942sim cost report 1"
_NOTE = "bounds from single resources, modelled on the code object; not a timing, not measured on hardware"


class BadCostReport(SimulationError):
    """A file that is not a saved cost report."""


@dataclass(frozen=True)
class Bounds:
    """The time that each resource of the machine is busy with the whole grid, in microseconds: bounds, not a timing.

    mfma, valu: matrix and vector units of all SIMDs; lds: LDS of all CUs; all evenly loaded. hbm: bytes of the launch's
    different cache lines, read and written, at peak bandwidth. largest: the name of the largest of the four ("mfma",
    ...), bound: its value. rounds: times that the machine is filled with work-groups, by what fits on a CU, rounded up.
    quantised: as bound, but for the CU (and its SIMDs) that gets the most whole work-groups (and waves).
    """

    mfma: float
    valu: float
    lds: float
    hbm: float
    largest: str
    bound: float
    rounds: int
    quantised: float


@dataclass(frozen=True)
class CostReport:
    """What the simulated work-groups of one launch did.

    ran_workgroups were simulated, of total_workgroups in the grid. workgroups_per_cu and waves_per_simd: how many fit
    at a time. resources: see code_object.Resources, plus dynamic_lds in bytes.

    counted: totals over the work-groups that ran. Wave-instructions per class ("mfma", "valu", "salu", "smem", "lds",
    "vmem", "scratch", "barrier", "wait", "control"; "instructions" is their sum; "valu_quarter_rate", "lds_crossbar",
    "vmem_atomics" are parts); busy clocks ("mfma_clocks", "valu_clocks" of one SIMD, "lds_clocks" of one CU, with and
    "..._without_conflicts"); bytes ("lds_read_bytes", "lds_written_bytes", "vmem_read_bytes", "vmem_written_bytes",
    "vmem_atomic_bytes", "scratch_read_bytes", "scratch_written_bytes"); cache lines of 128 bytes, different ones per
    wave-instruction ("vmem_read_lines", "vmem_written_lines") and in the launch ("hbm_read_lines",
    "hbm_written_lines"). What scalar loads read is not in the bytes and lines.

    buffers: label -> "read_bytes", "written_bytes", "atomic_bytes", and different "read_lines", "written_lines" in the
    launch. mnemonics: wave-instructions per mnemonic.

    Scaling to the grid is linear, also for cache lines: where work-groups share data and only some ran, HBM is
    overstated; run all of them for the exact figure.
    """

    kernel: str
    ran_workgroups: int
    total_workgroups: int
    waves_per_workgroup: int
    workgroups_per_cu: int
    waves_per_simd: int
    resources: dict[str, int]
    counted: dict[str, int]
    mnemonics: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, dict[str, int]] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """A figure of `counted`; 0 if nothing was counted."""
        return self.counted.get(name, 0)

    def per_workgroup(self, name: str) -> float:
        return self.count(name) / max(1, self.ran_workgroups)

    def per_wave(self, name: str) -> float:
        return self.per_workgroup(name) / self.waves_per_workgroup

    def grid(self, name: str) -> float:
        """A figure scaled from the work-groups that ran to the whole grid."""
        return self.per_workgroup(name) * self.total_workgroups

    def bounds(self, machine: MI300X | None = None) -> Bounds:
        """Resource bounds in microseconds for the whole grid on `machine` (default MI300X())."""
        machine = machine or MI300X()
        to_us = 1e6 / machine.clock
        simds = machine.compute_units * machine.simds_per_cu
        times = {
            "mfma": self.grid("mfma_clocks") / simds * to_us,
            "valu": self.grid("valu_clocks") / simds * to_us,
            "lds": self.grid("lds_clocks") / machine.compute_units * to_us,
            "hbm": self.hbm_bytes(machine) / machine.hbm_bandwidth * 1e6,
        }
        largest = max(times, key=times.__getitem__)
        on_busiest_cu = -(-self.total_workgroups // machine.compute_units)
        on_busiest_simd = -(-on_busiest_cu * self.waves_per_workgroup // machine.simds_per_cu)
        quantised = max(
            on_busiest_simd * self.per_wave("mfma_clocks") * to_us,
            on_busiest_simd * self.per_wave("valu_clocks") * to_us,
            on_busiest_cu * self.per_workgroup("lds_clocks") * to_us,
            times["hbm"],
        )
        rounds = -(-self.total_workgroups // (machine.compute_units * self.workgroups_per_cu))
        return Bounds(**times, largest=largest, bound=times[largest], rounds=rounds, quantised=quantised)

    def hbm_bytes(self, machine: MI300X | None = None) -> float:
        """Bytes of the launch's different cache lines, read and written, scaled to the grid."""
        lines = self.grid("hbm_read_lines") + self.grid("hbm_written_lines")
        return lines * (machine or MI300X()).cache_line

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> CostReport:
        """Raises BadCostReport if the text is not what to_json gives."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise BadCostReport(f"not JSON ({error})") from None
        if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
            raise BadCostReport(f'not a cost report: "format" is not "{_FORMAT}"')
        try:
            report = cls(**data)
        except TypeError as error:
            raise BadCostReport(f"not a cost report: {error}") from None
        report._check()
        return report

    def _check(self) -> None:
        for entry in dataclasses.fields(self):
            value, wanted = getattr(self, entry.name), entry.type.split("[")[0]
            if type(value).__name__ != wanted:
                raise BadCostReport(f"not a cost report: {entry.name} is not of type {wanted}")
        numbers = [*self.resources.values(), *self.counted.values(), *self.mnemonics.values()]
        if any(type(number) is not int for number in numbers) or any(
            type(b) is not dict for b in self.buffers.values()
        ):
            raise BadCostReport("not a cost report: a figure is not an integer")
        if min(self.total_workgroups, self.waves_per_workgroup, self.workgroups_per_cu) < 1:
            raise BadCostReport("not a cost report: work-groups and waves must be at least 1")

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostReport:
        """Raises BadCostReport if the file cannot be read or is not a saved report."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadCostReport(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
        try:
            return cls.from_json(text)
        except BadCostReport as error:
            raise BadCostReport(f"{path}: {error.message}") from None

    def figures(self) -> dict[str, float]:
        """What two reports are compared by: figures of the grid, and bounds in microseconds ("... bound us")."""
        bounds = self.bounds()
        found: dict[str, float] = {"workgroups": self.total_workgroups, "waves per SIMD": self.waves_per_simd}
        found |= {name: self.grid(name) for name in self.counted}
        for label, buffer in sorted(self.buffers.items()):
            scale = self.total_workgroups / max(1, self.ran_workgroups)
            found |= {f"{label}: {name}": value * scale for name, value in sorted(buffer.items())}
        found |= {f"{name} bound us": getattr(bounds, name) for name in ("mfma", "valu", "lds", "hbm", "quantised")}
        return found

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        bounds = self.bounds()
        yield (
            f"{self.kernel}: {self.ran_workgroups} of {self.total_workgroups} work-groups simulated, "
            f"{self.waves_per_workgroup} waves each; {self.workgroups_per_cu} work-groups per CU, "
            f"{self.waves_per_simd} waves per SIMD"
        )
        yield f"{'':32s}{'per wave':>14s}{'per work-group':>16s}{'grid':>18s}"
        order = [name for name in ("instructions", *CLASSES) if name in self.counted]
        for name in order + [name for name in self.counted if name not in order]:
            yield f"{name:32s}{self.per_wave(name):14,.1f}{self.per_workgroup(name):16,.1f}{self.grid(name):18,.0f}"
        scale = self.total_workgroups / max(1, self.ran_workgroups)
        for label, buffer in sorted(self.buffers.items()):
            values = ", ".join(f"{name} {value * scale:,.0f}" for name, value in sorted(buffer.items()))
            yield f"{label} (grid): {values}"
        yield (
            f"busy us: MFMA {bounds.mfma:.2f}, VALU {bounds.valu:.2f}, LDS {bounds.lds:.2f}, HBM {bounds.hbm:.2f}; "
            f"bound {bounds.bound:.2f} ({bounds.largest.upper()}), in whole work-groups {bounds.quantised:.2f}, "
            f"{bounds.rounds} rounds"
        )
        yield f"({_NOTE})"
