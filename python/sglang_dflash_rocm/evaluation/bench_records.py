"""What the benchmarks write: one record per cell of a matrix or measurement of a sweep, one per finished sweep."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang_dflash_rocm.evaluation import records

Phase = Literal["prefill", "decode", "sweep"]

#: Files of one output folder.
CELLS, SWEEPS = "cells.jsonl", "sweeps.jsonl"


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """One latency over the requests of a cell, in ms; percentiles interpolate linearly between neighbours."""

    mean: float
    p50: float
    p90: float
    p99: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What the client measured; throughputs are per second of the cell's wall time.

    input_tokens: as the server counted them, which is not what was asked for when lengths are drawn from a range.
    ttft_missing: answered requests without a time to first token: the client takes it from the first piece of text,
        and a token may have none. They are left out of ``ttft_ms``.
    """

    duration_s: float
    sent: int
    completed: int
    input_tokens: int
    output_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread
    ttft_missing: int


class CellRecord(records.Record, tag="bench_cell", frozen=True, kw_only=True):
    """One run of the client. Lengths in tokens; ``input_len`` is None where the data set decides.

    ended: ISO 8601, UTC; the start is in the provenance.
    accept_lengths: SGLang's ``avg_spec_accept_length`` of each DP rank since the flush before the cell, None on a rank
        that logged no decode interval; SGLang does not say which is whose.
    client_log, server_log: last lines, of a cell that did not pass.
    """

    phase: Phase
    matrix: str
    dataset: str
    input_len: int | None
    output_len: int
    range_ratio: float | None
    concurrency: int | None
    request_rate: float | None
    num_prompts: int
    seed: int
    command: tuple[str, ...]
    ended: str
    figures: Figures | None = None
    accept_lengths: tuple[float | None, ...] = ()
    client_log: tuple[str, ...] = ()
    server_log: tuple[str, ...] = ()


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements of one rate (requests per second); ``ttft_ms`` is their median."""

    rate: float
    measured_ms: tuple[float, ...]
    ttft_ms: float
    passed: bool


class SweepRecord(records.Record, tag="bench_sweep", frozen=True, kw_only=True):
    """A finished search. ``rate``: highest request rate that keeps the target, None if none does.
    ``flagged``: pairs of rates where the lower one failed with a worse TTFT than the higher one, after repeats."""

    target_ms: float
    percentile: str
    rate: float | None
    first_failing_rate: float | None
    stopped: str
    points: tuple[SweepPoint, ...]
    flagged: tuple[tuple[float, float], ...] = ()


def percentile(values: list[float], share: float) -> float:
    """The ``share`` (0..1) percentile, interpolated linearly, as numpy's default does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: list[float]) -> Spread | None:
    """Mean and percentiles in ms of times in seconds; None if there are none."""
    if not seconds:
        return None
    p50, p90, p99 = (percentile(seconds, share) * 1000 for share in (0.5, 0.9, 0.99))
    return Spread(mean=sum(seconds) / len(seconds) * 1000, p50=p50, p90=p90, p99=p99)
