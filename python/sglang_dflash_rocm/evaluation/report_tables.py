"""The tables of a report, once as data: CSV, Markdown and HTML show the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_dflash_rocm.evaluation.analysis import Analysis, Level, Rate
from sglang_dflash_rocm.evaluation.bench_records import CellRecord, Spread

Value = str | int | float | None


@dataclass(frozen=True)
class Table:
    """``name`` is its CSV file's; units are in the headers. None: not recorded."""

    name: str
    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


def text(value: Value) -> str:
    """A value for people: four significant digits, whole numbers from 1000 on, "not recorded" for None."""
    if value is None:
        return "not recorded"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def summary(run: Analysis) -> dict[str, Value]:
    """The figures of a whole run by name; names are the same in every run, so that two can be compared."""
    log = run.log
    done = [cell for cell in run.cells if cell.outcome == "passed"]
    ranks = log.ranks if log else ()
    found: dict[str, Value] = {
        "decode throughput, all ranks (token/s)": log.decode_per_s if log else None,
        "prefill throughput, all ranks (token/s)": log.prefill_per_s if log else None,
        "decode throughput while busy, sum of ranks (token/s)": _busy(rank.decode for rank in ranks),
        "prefill throughput while busy, sum of ranks (token/s)": _busy(rank.prefill for rank in ranks),
        "accept length, mean of ranks": log.accept_length_mean if log else None,
        "accept length, lowest rank": log.accept_length_min if log else None,
        "accept length, all verify steps": log.accept_length_all if log else None,
        "queue, mean of ranks (requests)": _mean(rank.queue.mean for rank in ranks),
        "queue, largest (requests)": max((rank.queue.peak for rank in ranks), default=None),
        "full KV pool, largest use (share)": _peak(rank.full_usage for rank in ranks),
        "SWA KV pool, largest use (share)": _peak(rank.swa_usage for rank in ranks),
        "best input throughput of a cell (token/s)": _best(done, "input_throughput"),
        "best output throughput of a cell (token/s)": _best(done, "output_throughput"),
        "cells passed": len(done) if run.cells else None,
    }
    for sweep in run.sweeps:
        goal = f"highest rate with TTFT {sweep.percentile} <= {sweep.target_ms:g} ms (requests/s)"
        found[goal] = "none" if sweep.rate is None else sweep.rate
    return found


def tables(run: Analysis) -> list[Table]:
    """All tables that have rows."""
    rows = tuple(summary(run).items())
    made = [Table("summary", "Summary", ("figure", "value"), rows), *_log_tables(run)]
    made += [_cells(run.cells), _failed(run.cells), _sweeps(run)]
    return [table for table in made if table.rows]


def _log_tables(run: Analysis) -> Iterable[Table]:
    if run.log is None:
        return
    headers = (
        "DP rank",
        "decode (token/s)",
        "decode while busy (token/s)",
        "prefill (token/s)",
        "prefill while busy (token/s)",
        "prefilled tokens",
        "cached tokens",
        "accept length",
        "accept rate",
        "queue mean",
        "queue max",
        "running mean",
        "running max",
        "full KV mean",
        "full KV max",
        "SWA KV mean",
        "SWA KV max",
        "decode lines by graph",
        "decode lines",
        "prefill lines",
    )
    rows = tuple(
        (
            rank.dp_rank,
            *_rates(rank.decode),
            *_rates(rank.prefill),
            rank.new_tokens,
            rank.cached_tokens,
            rank.accept_length,
            rank.accept_rate,
            *_levels(rank.queue),
            *_levels(rank.running),
            *_levels(rank.full_usage),
            *_levels(rank.swa_usage),
            rank.graph_share,
            rank.decode_lines,
            rank.prefill_lines,
        )
        for rank in run.log.ranks
    )
    yield Table("ranks", "DP ranks, from the server's log", headers, rows)
    positions = tuple(enumerate(run.log.positions, 1))
    yield Table(
        "positions", "Acceptance per draft position", ("position", "accepted (share of verify steps)"), positions
    )


def _cells(cells: Sequence[CellRecord]) -> Table:
    headers = (
        "cell",
        "input length",
        "output length",
        "concurrency",
        "rate (requests/s)",
        "mean input tokens",
        "input (token/s)",
        "output (token/s)",
        "TTFT p50 (ms)",
        "TTFT p90 (ms)",
        "TTFT p99 (ms)",
        "TPOT p50 (ms)",
        "end to end p50 (ms)",
        "accept length per rank",
        "simulated",
    )
    rows = tuple(
        (
            cell.key,
            "data set's" if cell.input_len is None else cell.input_len,
            cell.output_len,
            cell.concurrency or "",
            "" if cell.request_rate is None else cell.request_rate,
            made.input_tokens / made.completed,
            made.input_throughput,
            made.output_throughput,
            *_spread(made.ttft_ms),
            made.tpot_ms.p50 if made.tpot_ms else "",
            made.e2e_ms.p50,
            " ".join("not recorded" if length is None else f"{length:.2f}" for length in cell.accept_lengths),
            ", ".join(cell.provenance.simulated),
        )
        for cell in cells
        if (made := cell.figures) and cell.outcome == "passed"
    )
    return Table("cells", "Cells", headers, rows)


def _failed(cells: Sequence[CellRecord]) -> Table:
    headers = ("cell", "outcome", "reason", "end of the client's log", "end of the server's log")
    rows = tuple(
        (cell.key, cell.outcome, cell.reason, "\n".join(cell.client_log[-8:]), "\n".join(cell.server_log[-8:]))
        for cell in cells
        if cell.outcome != "passed"
    )
    return Table("failed", "Cells that did not pass", headers, rows)


def _sweeps(run: Analysis) -> Table:
    headers = ("search", "rate (requests/s)", "TTFT, median of repeats (ms)", "measured (ms)", "keeps the target")
    rows = tuple(
        (
            f"TTFT {sweep.percentile} <= {sweep.target_ms:g} ms",
            point.rate,
            point.ttft_ms,
            " ".join(f"{value:.0f}" for value in point.measured_ms),
            "yes" if point.passed else "no",
        )
        for sweep in run.sweeps
        for point in sweep.points
    )
    return Table("sweeps", "Rate search", headers, rows)


def compare(one: Analysis, other: Analysis) -> list[Table]:
    """Two runs side by side; the ratio is the second over the first. Cells are compared where both ran the same one."""
    first, second = summary(one), summary(other)
    names = [*first, *(name for name in second if name not in first)]
    rows = tuple((name, a := first.get(name), b := second.get(name), _ratio(a, b)) for name in names)
    made = [Table("comparison", "Comparison", ("figure", f"A: {one.name}", f"B: {other.name}", "B / A"), rows)]
    mine, theirs = _passed(one), _passed(other)
    cells = []
    for key in (key for key in mine if key in theirs):
        a, b = mine[key].figures, theirs[key].figures
        for label, x, y in (
            ("input (token/s)", a.input_throughput, b.input_throughput),
            ("output (token/s)", a.output_throughput, b.output_throughput),
            ("TTFT p50 (ms)", _spread(a.ttft_ms)[0], _spread(b.ttft_ms)[0]),
            ("TTFT p90 (ms)", _spread(a.ttft_ms)[1], _spread(b.ttft_ms)[1]),
        ):
            cells.append((key, label, x, y, _ratio(x, y)))
    if cells:
        made.append(Table("cells", "Cells that both ran", ("cell", "figure", "A", "B", "B / A"), tuple(cells)))
    only = tuple((key, "A" if key in mine else "B") for key in sorted(mine.keys() ^ theirs.keys()))
    if only:
        made.append(Table("only", "Cells that passed in one of the runs only", ("cell", "run"), only))
    return made


def _passed(run: Analysis) -> dict[str, CellRecord]:
    return {cell.key: cell for cell in run.cells if cell.outcome == "passed" and cell.figures}


def _ratio(a: Value, b: Value) -> Value:
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return b / a if numbers and a else ""


def _rates(rate: Rate | None) -> tuple[Value, Value]:
    return (rate.per_s, rate.busy) if rate else (None, None)


def _busy(rates: Iterable[Rate | None]) -> Value:
    known = [rate.busy for rate in rates if rate is not None and rate.busy is not None]
    return sum(known) if known else None


def _levels(level: Level | None) -> tuple[Value, Value]:
    return (level.mean, level.peak) if level else (None, None)


def _spread(times: Spread | None) -> tuple[Value, Value, Value]:
    return (times.p50, times.p90, times.p99) if times else (None, None, None)


def _best(cells: Sequence[CellRecord], name: str) -> Value:
    return max((getattr(cell.figures, name) for cell in cells if cell.figures), default=None)


def _peak(levels: Iterable[Level | None]) -> Value:
    return max((level.peak for level in levels if level is not None), default=None)


def _mean(values: Iterable[float]) -> Value:
    known = list(values)
    return sum(known) / len(known) if known else None
