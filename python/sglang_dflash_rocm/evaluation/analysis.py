"""Figures of a run from its server logs and its records: what ``analysis.json`` holds and every report shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from sglang_dflash_rocm.evaluation.bench_records import CellRecord, SweepRecord
from sglang_dflash_rocm.evaluation.server_logs import Batch, Log

#: A gap without a line, in seconds, from which on a rank counts as idle for the "busy" figures.
IDLE_S = 5.0


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second from the first line to the last, idle gaps counted; ``window_s`` is that time in seconds and
    ``tokens`` what was done in it. The first line's own tokens are left out: their time began before the load.
    ``busy``: gaps longer than ``IDLE_S`` left out."""

    per_s: float
    busy: float | None
    tokens: float
    window_s: float


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity over a rank's lines: plain mean and largest value."""

    mean: float
    peak: float


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One DP rank. None where the log has nothing: too few lines for a rate, no speculation, no SWA pool.

    accept_length, accept_rate: of decode lines, weighted with their running requests (a line covers a fixed number of
    steps, so that weighs by verify forwards). usages are shares of a pool.
    """

    dp_rank: int
    prefill_lines: int
    decode_lines: int
    prefill: Rate | None
    decode: Rate | None
    new_tokens: int
    cached_tokens: int
    accept_length: float | None
    accept_rate: float | None
    queue: Level
    running: Level
    full_usage: Level | None
    swa_usage: Level | None
    graph_share: float | None


class LogFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks. The total rates are over the time from the first line of any rank to the last of any.

    accept_length_*: mean of the ranks' values, smallest of them, and over all verify forwards.
    positions: share of verify steps in which at least the first, second, .. draft was right; empty if not recorded.
    """

    ranks: tuple[RankFigures, ...]
    prefill_per_s: float | None
    decode_per_s: float | None
    accept_length_mean: float | None
    accept_length_min: float | None
    accept_length_all: float | None
    positions: tuple[float, ...]
    unread_lines: int
    peer_lines: int
    time_resolution_s: float


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """One report folder. ``simulated``: what was not real, of log and records together."""

    name: str
    simulated: tuple[str, ...]
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    log: LogFigures | None = None
    cells: tuple[CellRecord, ...] = ()
    sweeps: tuple[SweepRecord, ...] = ()


def log_figures(log: Log) -> LogFigures:
    """Figures of at least one batch line."""
    by_rank = {rank: [b for b in log.batches if b.dp_rank == rank] for rank in sorted({b.dp_rank for b in log.batches})}
    ranks = tuple(_rank(number, batches) for number, batches in by_rank.items())
    lengths = [rank.accept_length for rank in ranks if rank.accept_length is not None]
    return LogFigures(
        ranks=ranks,
        prefill_per_s=_total(log.of("prefill"), [rank.prefill for rank in ranks]),
        decode_per_s=_total(log.of("decode"), [rank.decode for rank in ranks]),
        accept_length_mean=_mean(lengths),
        accept_length_min=min(lengths, default=None),
        accept_length_all=_by_requests(log.of("decode"), "accept_length"),
        positions=position_acceptance(log.histograms),
        unread_lines=log.unread,
        peer_lines=log.peers,
        time_resolution_s=0.001 if log.milliseconds else 1.0,
    )


def _rank(number: int, batches: Sequence[Batch]) -> RankFigures:
    prefill = [b for b in batches if b.kind == "prefill"]
    decode = [b for b in batches if b.kind == "decode"]
    graphs = [b.graph for b in decode if b.graph is not None]
    return RankFigures(
        dp_rank=number,
        prefill_lines=len(prefill),
        decode_lines=len(decode),
        prefill=prefill_rate(prefill),
        decode=decode_rate(decode),
        new_tokens=sum(b.new_tokens for b in prefill),
        cached_tokens=sum(b.cached_tokens for b in prefill),
        accept_length=_by_requests(decode, "accept_length"),
        accept_rate=_by_requests(decode, "accept_rate"),
        queue=_level(b.queue for b in batches),
        running=_level(b.running for b in batches),
        full_usage=_level(b.full_usage for b in batches),
        swa_usage=_level(b.swa_usage for b in batches),
        graph_share=_mean([float(used) for used in graphs]),
    )


def decode_rate(batches: Sequence[Batch]) -> Rate | None:
    """A line's throughput is tokens over the time since the line before, so throughput times that time is tokens. Lines
    with one time share the time since the previous one evenly. None with fewer than two different times."""
    intervals = []
    last = None
    for time, group in groupby(batches, key=lambda batch: batch.time):
        if last is not None:
            gap = (time - last).total_seconds()
            intervals.append((_mean([batch.throughput for batch in group]) * gap, gap))
        last = time
    return _rate(intervals)


def prefill_rate(batches: Sequence[Batch]) -> Rate | None:
    """Tokens of a line are exact and its throughput is tokens over its interval, which gives the interval, finer than
    the log's times. None with fewer than two lines."""
    intervals = []
    for before, batch in zip(batches, batches[1:], strict=False):
        tokens = batch.new_tokens + batch.replay_tokens
        known = tokens > 0 and batch.throughput > 0
        gap = tokens / batch.throughput if known else (batch.time - before.time).total_seconds()
        intervals.append((tokens, gap))
    return _rate(intervals)


def _rate(intervals: Sequence[tuple[float, float]]) -> Rate | None:
    tokens, window = sum(t for t, _ in intervals), sum(gap for _, gap in intervals)
    if window <= 0:
        return None
    short = [(t, gap) for t, gap in intervals if gap <= IDLE_S]
    busy_s = sum(gap for _, gap in short)
    busy = sum(t for t, _ in short) / busy_s if busy_s > 0 else None
    return Rate(per_s=tokens / window, busy=busy, tokens=tokens, window_s=window)


def _total(batches: Sequence[Batch], rates: Sequence[Rate | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    if not known:
        return None
    span = (batches[-1].time - batches[0].time).total_seconds()
    return sum(rate.tokens for rate in known) / max(span, *(rate.window_s for rate in known))


def _by_requests(batches: Iterable[Batch], name: str) -> float | None:
    """Mean of a decode line's value; a line whose last request just ended counts as one request."""
    pairs = [(getattr(b, name), max(1, b.running)) for b in batches if getattr(b, name) is not None]
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs) if pairs else None


def position_acceptance(histograms: Iterable[Sequence[int]]) -> tuple[float, ...]:
    """Of histograms of right drafts per verify step (index 0: none), the share of steps with at least k right, k = 1..

    1 plus the sum of these shares is the accept length.
    """
    rows = list(histograms)
    counts = [sum(row[k] for row in rows if k < len(row)) for k in range(max(map(len, rows), default=0))]
    steps = sum(counts)
    return tuple(sum(counts[k:]) / steps for k in range(1, len(counts))) if steps else ()


def _level(values: Iterable[float | None]) -> Level | None:
    known = [value for value in values if value is not None]
    return Level(mean=sum(known) / len(known), peak=max(known)) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def analyse(
    name: str,
    log: Log | None,
    cells: Sequence[CellRecord] = (),
    sweeps: Sequence[SweepRecord] = (),
    sources: Sequence[str] = (),
    simulated: Sequence[str] = (),
) -> Analysis:
    """One analysis of a log, records, or both. ``simulated``: what the caller knows and neither tells."""
    stamps = [*simulated, *(log.simulated if log else ())]
    for record in (*cells, *sweeps):
        stamps += record.provenance.simulated
    return Analysis(
        name=name,
        simulated=tuple(dict.fromkeys(stamps)),
        sources=tuple(sources),
        notes=tuple(_notes(log, cells)),
        log=log_figures(log) if log else None,
        cells=tuple(cells),
        sweeps=tuple(sweeps),
    )


def _notes(log: Log | None, cells: Sequence[CellRecord]) -> Iterable[str]:
    if log is not None:
        if not log.of("decode"):
            yield "no decode lines: a rank logs one every --decode-log-interval (40) decode steps"
        if not log.of("prefill"):
            yield "no prefill lines: the server computed no prefill"
        for path in log.without:
            yield f"no batch lines in {path}"
        if log.unread:
            yield f"{log.unread} batch lines are cut or of an unknown form and are left out"
        if any(batch.accept_length is not None for batch in log.batches) and not log.histograms:
            yield "acceptance per position: not recorded; SGLang logs it per request with --log-requests"
        if not log.milliseconds:
            yield "log times are whole seconds: rates of short windows are rough; SGLANG_LOG_MS=1 makes them finer"
    if len({tuple(sorted(cell.provenance.server.items(), key=str)) for cell in cells}) > 1:
        yield "the cells were measured on servers with different settings"
    failed = sum(cell.outcome != "passed" for cell in cells)
    if failed:
        yield f"{failed} of {len(cells)} cells did not pass"
    missing = sum(cell.figures.ttft_missing for cell in cells if cell.figures)
    if missing:
        yield f"{missing} answers had no text and so no time to first token"
    if any(cell.range_ratio is not None and cell.range_ratio < 1 for cell in cells):
        yield "random-range-ratio below 1: prompts are shorter than the cell's length; see the measured input tokens"
