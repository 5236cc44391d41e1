"""Fixed matrices of benchmark cells: ``python -m sglang_dflash_rocm.evaluation.matrix prefill|mimo-prefill|decode``.

Settings are environment variables (``--variables`` lists them). A cell that passed is not measured again by a later run
with the same ``OUT_DIR``; one that fails is recorded with the ends of the logs and the others go on. Exit codes: 0 all
passed, 1 some failed, 2 wrong settings or the wrong kind of server, 130 interrupted.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_dflash_rocm.evaluation import bench_client, bench_server, records
from sglang_dflash_rocm.evaluation.bench_client import Cell, CellFailed
from sglang_dflash_rocm.evaluation.bench_records import CELLS, CellRecord, Figures
from sglang_dflash_rocm.evaluation.bench_server import ServerFacts
from sglang_dflash_rocm.evaluation.bench_settings import MATRIX_KINDS, Run
from sglang_dflash_rocm.evaluation.records import Outcome, Provenance
from sglang_dflash_rocm.evaluation.server_info import ServerRefused
from sglang_dflash_rocm.evaluation.variables import Reader, WrongSettings, plain_table

PASSED, SOME_FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
#: A simulated accept length may be off by this share: the last step of a request is cut at its length.
_ACCEPT_TOLERANCE = 0.1
#: Of each log of a failed cell, on the terminal; the record has more.
_SHOWN_LINES = 5

screen = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True)
class Bench:
    """A run on one server: measures cells and records them."""

    tool: str
    run: Run
    server: ServerFacts
    simulated: tuple[str, ...]

    @property
    def file(self) -> Path:
        return self.run.out / CELLS

    def passed(self) -> dict[str, CellRecord]:
        """Cells that need not be measured again.

        Raises:
            ServerRefused: they were measured on another server or with other simulations.
        """
        if self.run.force:
            return {}
        latest = records.latest(records.read(self.file, CellRecord))
        done = {key: record for key, record in latest.items() if record.outcome == "passed"}
        here = {**self.server.facts, "simulated": self.simulated}
        for record in done.values():
            there = {**record.provenance.server, "simulated": record.provenance.simulated}
            other = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
            if other:
                name = other[0]
                raise ServerRefused(
                    f"OUT_DIR={self.run.out}: holds cells of another server ({name} {there.get(name)}, now "
                    f"{here.get(name)}); take another OUT_DIR, or FORCE=1 to measure them again"
                )
        return done

    def measure(self, cell: Cell) -> CellRecord:
        """Run one cell and record it, whatever becomes of it.

        Raises:
            KeyboardInterrupt: after the client was ended and the cell recorded as interrupted.
        """
        output, log = output_file(self.run, cell), client_log(self.run, cell)
        origin = bench_server.provenance(self.tool, self.server, self.simulated)
        figures, lengths = None, ()
        try:
            figures, info = bench_client.run(cell, self.run.work, output, log, self.run.cell_timeout_s)
            lengths = bench_server.accept_lengths(info)
            self._check_accept(lengths)
        except CellFailed as error:
            return self._record(cell, origin, "failed", str(error), figures, lengths)
        except KeyboardInterrupt:
            self._record(cell, origin, "interrupted", "interrupted by a signal")
            raise
        return self._record(cell, origin, "passed", "", figures, lengths)

    def give_up(self, cell: Cell, reason: str) -> CellRecord:
        """Record a cell as failed that was not tried."""
        origin = bench_server.provenance(self.tool, self.server, self.simulated)
        return self._record(cell, origin, "failed", reason, tried=False)

    def _check_accept(self, lengths: tuple[float | None, ...]) -> None:
        wanted = self.run.declared_accept or self.server.simulated_accept
        for length in lengths:
            if wanted and length and abs(length / wanted - 1) > _ACCEPT_TOLERANCE:
                raise CellFailed(
                    f"SGLANG_SIMULATE_ACC_LEN={wanted:g}, but a DP rank reports an accept length of {length:.2f}: "
                    "the server does not simulate that"
                )

    def _record(
        self,
        cell: Cell,
        origin: Provenance,
        outcome: Outcome,
        reason: str = "",
        figures: Figures | None = None,
        lengths: tuple[float | None, ...] = (),
        tried: bool = True,
    ) -> CellRecord:
        work, bad = self.run.work, outcome != "passed" and tried
        record = CellRecord(
            key=cell.key(work),
            outcome=outcome,
            provenance=origin,
            reason=reason,
            phase=cell.phase,
            matrix=cell.matrix,
            dataset=work.dataset,
            input_len=cell.input_len,
            output_len=cell.output_len,
            range_ratio=work.range_ratio if cell.input_len else None,
            concurrency=cell.concurrency,
            request_rate=cell.request_rate,
            num_prompts=cell.num_prompts,
            seed=work.seed + cell.repeat,
            command=tuple(bench_client.command(cell, work, output_file(self.run, cell))),
            ended=records.utc_now(),
            figures=figures,
            accept_lengths=lengths,
            client_log=bench_client.tail(client_log(self.run, cell)) if bad else (),
            server_log=bench_client.tail(self.run.server_log) if bad and self.run.server_log else (),
        )
        records.append(self.file, record)
        return record


def client_log(run: Run, cell: Cell) -> Path:
    """Where the client of a cell logs to."""
    return run.out / "logs" / (re.sub(r"[^\w.-]+", "_", cell.key(run.work)) + ".log")


def output_file(run: Run, cell: Cell) -> Path:
    """Where the client of a cell leaves its result, until it was read."""
    return client_log(run, cell).with_suffix(".jsonl")


def prepare(tool: str, run: Run) -> Bench:
    """Ask the server what it is.

    Raises:
        ServerRefused: it does not answer, or is of the wrong kind.
    """
    server = bench_server.ask(run.work.base_url)
    bench_server.check_mode(server, run.work.fake_prefill)
    return Bench(tool, run, server, bench_server.simulated(server, run.work.fake_prefill, run.declared_accept))


def run_matrix(bench: Bench, grid: list[Cell]) -> int:
    """Measure what has not passed yet; the exit code.

    Raises:
        ServerRefused: ``OUT_DIR`` belongs to another server.
        KeyboardInterrupt: see :meth:`Bench.measure`.
    """
    done = bench.passed()
    todo = [cell for cell in grid if cell.key(bench.run.work) not in done]
    if len(todo) < len(grid):
        screen.print(
            f"{len(grid) - len(todo)} of {len(grid)} cells passed before and are skipped (FORCE=1 repeats them)"
        )
    failed, gone = 0, ""
    with progress(len(todo)) as step:
        for cell in todo:
            if gone:
                record = bench.give_up(cell, f"not run: {gone}")
            else:
                record = bench.measure(cell)
            if record.outcome == "failed":
                failed += 1
                if not bench_server.listening(bench.run.work.base_url):
                    gone = f"nothing listens at {bench.run.work.base_url}"
            screen.print(describe(record))
            for line in record.client_log[-_SHOWN_LINES:]:
                screen.print(f"    client: {line}")
            for line in record.server_log[-_SHOWN_LINES:]:
                screen.print(f"    server: {line}")
            step()
    screen.print(f"{len(grid) - failed} of {len(grid)} cells passed; records: {bench.file}")
    return SOME_FAILED if failed else PASSED


@contextmanager
def progress(total: int) -> Iterator:
    """A bar on a terminal; ``step()`` moves it on by one."""
    columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task("cells", total=total)
        yield lambda: bar.advance(task)


def describe(record: CellRecord) -> str:
    """One line for the terminal."""
    stamp = f" [{', '.join(record.provenance.simulated)}]" if record.provenance.simulated else ""
    if record.figures is None or record.outcome != "passed":
        return f"{record.key}: {record.outcome}: {record.reason}{stamp}"
    made = record.figures
    ttft = f"TTFT p50 {made.ttft_ms.p50:.0f} ms, p90 {made.ttft_ms.p90:.0f} ms" if made.ttft_ms else "no TTFT"
    speed = f"{made.input_throughput:.0f} input tok/s, {made.output_throughput:.0f} output tok/s"
    return f"{record.key}: {speed}, {ttft}{stamp}"


def as_interrupt(number: int, frame: object) -> None:
    """SIGTERM ends a run as Ctrl-C does: client stopped, cell recorded."""
    raise KeyboardInterrupt


@contextmanager
def exit_codes(interrupted: str) -> Iterator[None]:
    """Inside, wrong settings, the wrong server and signals end the command with its exit code and one message."""
    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        yield
    except (WrongSettings, ServerRefused, records.RecordError) as error:
        screen.print(str(error))
        raise typer.Exit(WRONG) from None
    except KeyboardInterrupt:
        screen.print(interrupted)
        raise typer.Exit(INTERRUPTED) from None


def main(
    kind: Annotated[str, typer.Argument(help=f"one of {', '.join(MATRIX_KINDS)}")],
    variables: Annotated[bool, typer.Option("--variables", help="list the environment variables and stop")] = False,
) -> None:
    """A matrix of benchmark cells against a running server; settings are environment variables (--variables)."""
    if kind not in MATRIX_KINDS:
        screen.print(f"{kind}: no such matrix; one of {', '.join(MATRIX_KINDS)}")
        raise typer.Exit(WRONG)
    read, table = MATRIX_KINDS[kind]
    if variables:
        print(plain_table(table))
        return
    with exit_codes("interrupted; the same command goes on with what is missing"):
        reader = Reader()
        run, grid = read(reader)
        reader.finish()
        if run.dry_run:
            for cell in grid:
                print(bench_client.shell_line(cell, run.work, output_file(run, cell)))
            return
        code = run_matrix(prepare(f"matrix {kind}", run), grid)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
