"""One HTML page of a report folder, or of two side by side: self-contained, everything from the data escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from sglang_dflash_rocm.evaluation import report_files
from sglang_dflash_rocm.evaluation.analysis import Analysis
from sglang_dflash_rocm.evaluation.report_tables import Table, Value, compare, tables, text

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 0.5rem 0 1.5rem }
th, td { border: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: left; vertical-align: top; white-space: pre-line }
td.number { text-align: right; font-variant-numeric: tabular-nums }
th { background: #f3f3f3 }
.runs { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem }
.stamp { background: #fff3cd; border: 1px solid #d39e00; padding: 0.5rem 1rem; font-weight: bold }
img { max-width: 100% }
"""


def page(folders: Sequence[Path]) -> str:
    """The page of one folder, or the comparison of two and then each.

    Raises:
        report_files.ReportError: a folder is not a report.
    """
    runs = [(folder, report_files.read(folder)) for folder in folders]
    title = " / ".join(run.name for _, run in runs)
    body = [f"<h1>{escape(title)}</h1>", *(_stamp(run) for _, run in runs)]
    if len(runs) == 2:
        (_, one), (_, other) = runs
        body += [_table(table) for table in compare(one, other)]
        body.append(_side_by_side(runs))
    for folder, run in runs:
        body += _run(folder, run, pictures=len(runs) == 1)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _run(folder: Path, run: Analysis, pictures: bool) -> Iterable[str]:
    yield f"<h2>{escape(run.name)}</h2>"
    yield "<ul>" + "".join(f"<li>source: {escape(source)}</li>" for source in run.sources)
    yield "".join(f"<li>note: {escape(note)}</li>" for note in run.notes) + "</ul>"
    yield from (_table(table) for table in tables(run))
    if pictures:
        yield from (_picture(file) for file in _pictures(folder))


def _side_by_side(runs: Sequence[tuple[Path, Analysis]]) -> str:
    """Plots of one name next to each other."""
    names = sorted({file.name for folder, _ in runs for file in _pictures(folder)})
    rows = []
    for name in names:
        cells = [_picture(folder / name) if (folder / name).is_file() else "<p>no such plot</p>" for folder, _ in runs]
        parts = [f"<div><h3>{escape(run.name)}</h3>{cell}</div>" for (_, run), cell in zip(runs, cells, strict=True)]
        rows.append(f'<div class="runs">{"".join(parts)}</div>')
    return "\n".join(rows)


def _pictures(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png"))


def _picture(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="{escape(file.stem)}" src="data:image/png;base64,{data}">'


def _stamp(run: Analysis) -> str:
    return (
        f'<p class="stamp">{escape(run.name)}: {escape(report_files.stamp(run.simulated))}</p>' if run.simulated else ""
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in table.headers)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in table.rows)
    return f"<h3>{escape(table.title)}</h3>\n<table>\n<tr>{head}</tr>\n{rows}</table>"


def _cell(value: Value) -> str:
    kind = ' class="number"' if isinstance(value, (int, float)) else ""
    return f"<td{kind}>{escape(text(value))}</td>"
