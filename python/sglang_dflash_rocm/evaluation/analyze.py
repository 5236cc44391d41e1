"""Analyse server logs and benchmark records: ``evaluation/analyze_server_output_throughput.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_dflash_rocm.evaluation import analysis, records, report_files, server_logs
from sglang_dflash_rocm.evaluation.bench_records import CELLS, SWEEPS, CellRecord, SweepRecord
from sglang_dflash_rocm.evaluation.plots import NoPlots

screen = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


def main(
    logs: Annotated[
        list[Path] | None, typer.Argument(help="log files of one server: all DP ranks, one file or one per node")
    ] = None,
    records_dir: Annotated[
        Path | None, typer.Option("--records", help="OUT_DIR of the benchmark scripts [default: none]")
    ] = None,
    out: Annotated[Path, typer.Option(help="report folder")] = Path("report"),
    name: Annotated[str | None, typer.Option(help="title of the run [default: the report folder's name]")] = None,
    simulated: Annotated[
        list[str] | None, typer.Option(help='what was not real, such as "simulated acceptance 5.56"; repeatable')
    ] = None,
    plots: Annotated[bool, typer.Option(help="draw PNG plots (needs matplotlib)")] = True,
) -> None:
    """Throughput, accept length, queueing and KV use of a run, from its server logs, its records, or both.

    Exits 1 if there is nothing to report, 2 for wrong options.
    """
    if not logs and records_dir is None:
        screen.print("give the server's log files, --records OUT_DIR, or both")
        raise typer.Exit(2)
    try:
        log = server_logs.read(logs) if logs else None
        cells, sweeps = read_records(records_dir) if records_dir else ([], [])
        sources = [path.name for path in logs or ()] + ([f"records in {records_dir.name}"] if records_dir else [])
        run = analysis.analyse(name or out.resolve().name, log, cells, sweeps, sources, simulated or ())
        report_files.write(out, run, log, plots)
    except (server_logs.LogError, records.RecordError, report_files.ReportError, NoPlots) as error:
        screen.print(str(error))
        raise typer.Exit(1) from None
    for note in run.notes:
        screen.print(f"note: {note}")
    if run.simulated:
        screen.print(report_files.stamp(run.simulated))
    print(f"{out / 'report.md'}")


def read_records(folder: Path) -> tuple[list[CellRecord], list[SweepRecord]]:
    """The last record of every cell and search.

    Raises:
        report_files.ReportError: the folder has none.
    """
    cells = list(records.latest(records.read(folder / CELLS, CellRecord)).values())
    sweeps = list(records.latest(records.read(folder / SWEEPS, SweepRecord)).values())
    if not cells and not sweeps:
        raise report_files.ReportError(f"--records {folder}: no {CELLS} or {SWEEPS} with a record in it")
    return cells, sweeps


if __name__ == "__main__":
    typer.run(main)
