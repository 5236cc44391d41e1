"""What an evaluation writes to disk: one JSON object per line, each with where it came from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

Outcome = Literal["passed", "failed", "interrupted"]


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a figure comes from.

    tool: name of the script. started: ISO 8601, UTC. versions: of this package, SGLang, torch and the client.
    server: what the server says of itself, as far as it changes a result (model, tp_size, dp_size, backends, ...).
    simulated: what was not real, in words ("fake prefill", "simulated acceptance 5.56"); empty for a real run. A record
    with anything here is never an accuracy result, and no report shows it without saying so.
    """

    tool: str
    started: str
    versions: dict[str, str]
    server: dict[str, str | int | float | bool | None] = {}
    simulated: tuple[str, ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """Base of every record. `key` names the cell of a run (same key: the same work), so that a run can be resumed."""

    key: str
    outcome: Outcome
    provenance: Provenance
    reason: str = ""
    """Why it did not pass; empty if it did."""


R = TypeVar("R", bound=Record)


class RecordError(ValueError):
    """A file of records that cannot be read; the message names the file, the line and the fault."""


def utc_now() -> str:
    """ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def append(path: Path, record: Record) -> None:
    """Add a record to a file, whole or not at all: one write, and on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _drop_unfinished_line(file)
        file.write(msgspec.json.encode(record) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _drop_unfinished_line(file) -> None:
    """What a killed writer left behind would otherwise run into the next record."""
    file.seek(0)
    data = file.read()
    if data and not data.endswith(b"\n"):
        file.truncate(data.rfind(b"\n") + 1)


def read(path: Path, kind: type[R]) -> list[R]:
    """All records of a file. A last line without its end (the writer was killed) is left out.

    Raises:
        RecordError: any other line that is not a record of this kind.
    """
    return list(_read(path, kind))


def _read(path: Path, kind: type[R]) -> Iterator[R]:
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise RecordError(f"{path}, line {number}: not a {kind.__name__} record: {error}") from None


def latest(records: list[R]) -> Mapping[str, R]:
    """The last record of every key: a repeated cell replaces what it repeats."""
    return {record.key: record for record in records}
