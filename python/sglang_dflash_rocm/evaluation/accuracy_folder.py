"""The folder of one accuracy run: what it is a run of, so that it is only gone on with as the same run; its records."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from . import records
from .gates import Figures, Gate, Thresholds
from .server_info import Fact


class AccuracyRecord(records.Record, tag="gsm8k_accuracy", frozen=True, kw_only=True):
    """One attempt at a run. accuracy: share of the questions asked, 0 to 1. The lengths are tokens per verify step,
    bonus token included. figures is None where the run did not come to its end."""

    accuracy: float | None = None
    mean_worker_accept_length: float | None = None
    min_worker_accept_length: float | None = None
    accept_length: float | None = None
    thresholds: Thresholds
    asked: dict[str, Fact]
    gates: tuple[Gate, ...] = ()
    figures: Figures | None = None
    notes: tuple[str, ...] = ()
    work_dir: str = ""


class _AnyRecord(msgspec.Struct):
    provenance: records.Provenance


class FolderRefused(Exception):
    """The folder cannot be used for this run; the message says why and what to do."""


class RunFolder:
    """Layout: `run.json` (what the run is), `evalscope/` (its outputs), `evalscope.log`, `records.jsonl` (one line per
    attempt), `summary.json` (the last one)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outputs = path / "evalscope"
        self.task_file = path / "task.json"
        self.log = path / "evalscope.log"
        self._summary = path / "summary.json"
        self._lock: IO | None = None

    def open(self, identity: Mapping[str, Fact]) -> bool:
        """Create the folder, or take up the run in it; whether there was one.

        Raises:
            FolderRefused: in use, the folder of another run, or its records are of a simulated one.
        """
        refuse_simulated(self.path)
        known = self.path / "run.json"
        if self.path.exists() and not known.exists() and any(self.path.iterdir()):
            raise FolderRefused(
                f"WORK_DIR={self.path}: has files and no run.json, so it is not an accuracy run; name another"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FolderRefused(f"WORK_DIR={self.path}: another process runs in it") from None
        resumed = known.exists()
        if resumed and (different := _differences(json.loads(known.read_text()), identity)):
            raise FolderRefused(
                f"WORK_DIR={self.path} is another run; it goes on only as the same one. Name another folder, or use "
                f"its settings:\n{different}"
            )
        known.write_text(json.dumps(identity, indent=1) + "\n")
        return resumed

    def close(self) -> None:
        """Give the folder free for others."""
        if self._lock is not None:
            self._lock.close()

    def add(self, record: AccuracyRecord) -> None:
        """Append the record and make it the summary."""
        records.append(self.path / "records.jsonl", record)
        self._summary.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")

    def summary_text(self) -> str:
        """The last record, one JSON object over several lines."""
        return self._summary.read_text().rstrip()


def refuse_simulated(folder: Path) -> None:
    """Raise `FolderRefused` if a record in the folder is of a run in which something was not real."""
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                simulated = msgspec.json.decode(line, type=_AnyRecord).provenance.simulated
            except msgspec.DecodeError:
                continue
            if simulated:
                raise FolderRefused(
                    f"{path}, line {number}: a record with {', '.join(simulated)}; that is never an accuracy result. "
                    "Name another WORK_DIR"
                )


def dataset_digest(folder: Path) -> str:
    """SHA-256 over the two splits, so that another data set is another run."""
    digest = hashlib.sha256()
    for name in ("train.jsonl", "test.jsonl"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _differences(before: Mapping[str, Fact], now: Mapping[str, Fact]) -> str:
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return "\n".join(f"  {name}: there {before.get(name)!r}, now {now.get(name)!r}" for name in names)
