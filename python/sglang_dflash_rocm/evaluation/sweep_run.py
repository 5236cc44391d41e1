"""Find the highest request rate that keeps a target time to first token on a running server:
``python -m sglang_dflash_rocm.evaluation.sweep_run`` (settings are environment variables, ``--variables`` lists them).

Arrivals are SGLang's client's: a Poisson process, seeded, with another seed for each repeat. Every measurement is a
cell record and a later run with the same ``OUT_DIR`` does not repeat it. Exit codes: 0 found, 1 the lowest rate misses
the target or a measurement failed, 2 wrong settings or server, 130 interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from sglang_dflash_rocm.evaluation import bench_client, bench_records, bench_server, records
from sglang_dflash_rocm.evaluation import bench_settings as settings
from sglang_dflash_rocm.evaluation.bench_client import Cell, CellFailed
from sglang_dflash_rocm.evaluation.bench_records import SWEEPS, SweepPoint, SweepRecord
from sglang_dflash_rocm.evaluation.bench_settings import Run
from sglang_dflash_rocm.evaluation.matrix import (
    PASSED,
    SOME_FAILED,
    Bench,
    describe,
    exit_codes,
    output_file,
    prepare,
    screen,
)
from sglang_dflash_rocm.evaluation.sweep import Found, Search, find_rate, requests_for
from sglang_dflash_rocm.evaluation.variables import Reader, plain_table


@dataclass(frozen=True)
class Sweep:
    """Measurements for one search. ``percentile``: p50, p90 or p99 of the time to first token."""

    run: Run
    input_len: int | None
    output_len: int
    duration_s: float
    percentile: str

    def cell(self, rate: float, repeat: int = 0) -> Cell:
        prompts = requests_for(rate, self.duration_s)
        return Cell("sweep", "sweep", self.input_len, self.output_len, prompts, request_rate=rate, repeat=repeat)

    def measure(self, bench: Bench, search: Search) -> Found:
        """Search on a server.

        Raises:
            CellFailed: a measurement gave no time to first token; it is recorded.
        """
        done = bench.passed()

        def ttft(rate: float, repeat: int) -> float:
            cell = self.cell(rate, repeat)
            record = done.get(cell.key(self.run.work)) or bench.measure(cell)
            screen.print(describe(record))
            if record.outcome != "passed":
                raise CellFailed(f"at {rate:.3f} requests/s: {record.reason}")
            if record.figures.ttft_ms is None:
                raise CellFailed(f"at {rate:.3f} requests/s: no answer had text, so there is no time to first token")
            return getattr(record.figures.ttft_ms, self.percentile)

        return find_rate(search, ttft)


def read(reader: Reader) -> tuple[Sweep, Search]:
    """The sweep's variables; problems stay in the reader."""
    get, problems = reader.get, reader.problems
    run = settings.read_run(reader, "sweep")
    settings.check_input_variable(reader, run, settings.INPUT_LEN)
    target = get(settings.TARGET_TTFT_MS)
    low, start, high = get(settings.MIN_RATE), get(settings.START_RATE), get(settings.MAX_RATE)
    if target is None and not reader.given(settings.TARGET_TTFT_MS):
        problems.append("TARGET_TTFT_MS: not set; set the time to first token to keep, in milliseconds, such as 2000")
    if not low <= start <= high:
        problems.append(
            f"START_RATE={start:g}: must be from MIN_RATE={low:g} to MAX_RATE={high:g}; change one of the three"
        )
    own = run.work.dataset in bench_client.OWN_LENGTH_DATASETS
    input_len = None if own else get(settings.INPUT_LEN)
    percentile, duration = get(settings.TTFT_PERCENTILE), get(settings.DURATION_S)
    sweep = Sweep(run, input_len, get(settings.SWEEP_OUTPUT_LEN), duration, percentile)
    search = Search(target or 0.0, start, low, high, get(settings.TOLERANCE), get(settings.REPEATS))
    return sweep, search


def write_down(bench: Bench, sweep: Sweep, search: Search, found: Found) -> SweepRecord:
    """Record a finished search."""
    first = sweep.cell(search.start)
    row = SweepRecord(
        key=f"{first.key(sweep.run.work)}/{sweep.percentile}-{search.target_ms:g}ms",
        outcome="failed" if found.rate is None else "passed",
        provenance=bench_server.provenance(bench.tool, bench.server, bench.simulated),
        reason=found.stopped if found.rate is None else "",
        target_ms=search.target_ms,
        percentile=sweep.percentile,
        rate=found.rate,
        first_failing_rate=found.failing,
        stopped=found.stopped,
        points=tuple(
            SweepPoint(
                rate=rate,
                measured_ms=tuple(values),
                ttft_ms=bench_records.percentile(values, 0.5),
                passed=bench_records.percentile(values, 0.5) <= search.target_ms,
            )
            for rate, values in sorted(found.points.items())
        ),
        flagged=found.flagged,
    )
    records.append(sweep.run.out / SWEEPS, row)
    return row


def report(row: SweepRecord, duration_s: float) -> None:
    """The answer, for the terminal."""
    goal = f"TTFT {row.percentile} <= {row.target_ms:g} ms over {duration_s:g} s"
    for low, high in row.flagged:
        screen.print(f"not monotone: {low:.3f} requests/s misses the target by more than {high:.3f} requests/s does")
    if row.rate is None:
        screen.print(
            f"{goal}: {row.stopped} ({row.first_failing_rate:.3f} requests/s); lower MIN_RATE or raise the target"
        )
        return
    until = f", first miss at {row.first_failing_rate:.3f}" if row.first_failing_rate else ""
    screen.print(f"{goal}: {row.rate:.3f} requests/s ({row.stopped}{until})")


def main(
    variables: Annotated[bool, typer.Option("--variables", help="list the environment variables and stop")] = False,
) -> None:
    """The highest request rate that keeps TARGET_TTFT_MS; settings are environment variables (--variables)."""
    if variables:
        print(plain_table(settings.SWEEP))
        return
    with exit_codes("interrupted; the same command goes on from what was measured"):
        reader = Reader()
        sweep, search = read(reader)
        reader.finish()
        if sweep.run.dry_run:
            cell = sweep.cell(search.start)
            print(bench_client.shell_line(cell, sweep.run.work, output_file(sweep.run, cell)))
            screen.print("the first measurement; the rates of the others follow from its result")
            return
        bench = prepare("sweep", sweep.run)
        try:
            row = write_down(bench, sweep, search, sweep.measure(bench, search))
        except CellFailed as error:
            screen.print(f"{error}; records: {sweep.run.out}")
            raise typer.Exit(SOME_FAILED) from None
    report(row, sweep.duration_s)
    raise typer.Exit(SOME_FAILED if row.rate is None else PASSED)


if __name__ == "__main__":
    typer.run(main)
