"""One report folder: ``analysis.json``, a CSV per table, ``timeline.csv``, ``report.md`` and the plots."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import msgspec

from sglang_dflash_rocm.evaluation.analysis import Analysis
from sglang_dflash_rocm.evaluation.plots import check, draw
from sglang_dflash_rocm.evaluation.report_tables import Table, tables, text
from sglang_dflash_rocm.evaluation.server_logs import Batch, Log

ANALYSIS = "analysis.json"


class ReportError(ValueError):
    """A folder that is not a report, or cannot become one; the message says what to do."""


def write(folder: Path, run: Analysis, log: Log | None, plots: bool = True) -> list[Path]:
    """Write the folder and return its files. A folder that is a report already loses its CSV and PNG files first.

    Raises:
        NoPlots: ``plots`` without matplotlib; nothing was changed.
    """
    if plots:
        check()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / ANALYSIS).exists():
        for old in (*folder.glob("*.csv"), *folder.glob("*.png")):
            old.unlink()
    pictures = draw(folder, run, log) if plots else []
    made = tables(run)
    written = [*(_csv(folder, table, run.simulated) for table in made), *pictures]
    if log is not None:
        written.append(_timeline(folder, log.batches, run.simulated))
    page = folder / "report.md"
    page.write_text(markdown(run, made, pictures))
    data = folder / ANALYSIS
    data.write_bytes(msgspec.json.format(msgspec.json.encode(run)))
    return [*written, page, data]


def read(folder: Path) -> Analysis:
    """The analysis of a report folder.

    Raises:
        ReportError: there is none, or it cannot be read.
    """
    file = folder / ANALYSIS
    try:
        return msgspec.json.decode(file.read_bytes(), type=Analysis)
    except OSError as error:
        raise ReportError(
            f"{file}: {error.strerror}; make it with evaluation/analyze_server_output_throughput.py --out {folder}"
        ) from None
    except msgspec.DecodeError as error:
        raise ReportError(f"{file}: not an analysis of this version ({error}); analyse the run again") from None


def stamp(simulated: Sequence[str]) -> str:
    """What every output says of a run that is not real; empty for a real one."""
    return f"SIMULATED: {', '.join(simulated)}. No accuracy or acceptance result." if simulated else ""


def markdown(run: Analysis, made: Sequence[Table], pictures: Sequence[Path]) -> str:
    lines = [f"# {_plain(run.name)}", ""]
    if run.simulated:
        lines += [f"**{_plain(stamp(run.simulated))}**", ""]
    lines += [f"- source: {_plain(source)}" for source in run.sources]
    lines += [f"- note: {_plain(note)}" for note in run.notes]
    for table in made:
        lines += ["", f"## {table.title}", "", _row(table.headers), _row(["---"] * len(table.headers))]
        lines += [_row(text(value) for value in row) for row in table.rows]
    for picture in pictures:
        lines += ["", f"![{picture.stem}]({picture.name})"]
    return "\n".join(lines) + "\n"


def _row(cells) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(value: str) -> str:
    for mark in "\\`*_<>|":
        value = value.replace(mark, f"\\{mark}")
    return " ".join(value.split())


def _csv(folder: Path, table: Table, simulated: Sequence[str]) -> Path:
    """Every row of a simulated run says so, because rows are copied without their head."""
    file = folder / f"{table.name}.csv"
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow([*table.headers, "run simulated"])
        writer.writerows(
            [*("" if value is None else value for value in row), "; ".join(simulated)] for row in table.rows
        )
    return file


def _timeline(folder: Path, batches: Sequence[Batch], simulated: Sequence[str]) -> Path:
    names = tuple(field.name for field in fields(Batch))
    rows = tuple(tuple(_cell(value) for value in asdict(batch).values()) for batch in batches)
    return _csv(folder, Table("timeline", "", names, rows), simulated)


def _cell(value: object) -> str | int | float | None:
    return value if isinstance(value, (str, int, float)) or value is None else str(value)
