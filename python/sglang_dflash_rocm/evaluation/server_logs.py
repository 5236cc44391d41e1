"""Batch lines of SGLang 0.5.23's server logs, of every DP rank.

A scheduler logs (``scheduler_components/metrics_reporter.py``), after ``[time DPn PPn ATTN_CPn MOE_DPn TPn EPn] ``,
each rank only where there is more than one of its kind:

    Prefill batch[ [iter]], #new-seq: .., #new-token: .., #cached-token: .., USAGE, #running-req: .., #queue-req: ..,
        #pending-token: ..[, #replay-token: ..][, PD counts], GRAPH: bool, input throughput (token/s): ..[, more]
    Decode batch[ [iter]], #running-req: .., USAGE, [accept len: .., accept rate: ..,][ PD counts,] GRAPH: bool,
        gen throughput (token/s): .., #queue-req: ..[, more]

USAGE is ``token usage`` of one pool, or ``full token usage`` and ``swa token usage`` of a hybrid model, with ``#token``
counts before each in decode lines. A prefill line is logged per batch, a decode line every ``--decode-log-interval``
steps; both throughputs are tokens over the time since the rank's last line of that kind, idle time included.

In 0.5.23 one rank of an attention-TP group logs, but every pipeline stage does. Of the lines with one DP rank only
those of the lowest other ranks are kept, so that no batch is counted twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

Kind = Literal["prefill", "decode"]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(
    r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(?P<ms>\d{3}))?(?P<ranks>(?: [A-Z_]+\d+)*)\] "
    r"(?P<kind>Prefill|Decode) batch(?: \[\d+\])?, (?P<fields>.*)$"
)
_MENTION = re.compile(r"\b(?:Prefill|Decode) batch\b")
_RANK = re.compile(r"([A-Z_]+)(\d+)")
_PAIR = re.compile(r"([^,:]+): ([^,]+)(?:, |$)")
_HISTOGRAM = re.compile(r"""['"]spec_correct_drafts_histogram['"]: \[([\d, ]+)\]""")
#: How the line with the resolved server arguments, a dict, shows what is not real.
_STAMPS = {"fake prefill": "'disaggregation_transfer_backend': 'fake'", "dummy weights": "'load_format': 'dummy'"}
_THROUGHPUT = {"prefill": "input throughput (token/s)", "decode": "gen throughput (token/s)"}


@dataclass(frozen=True)
class Batch:
    """One line. Counts of requests and tokens; throughput in tokens per second; usages are shares of a pool, None where
    the line has none. ``time`` is the server's local time."""

    kind: Kind
    time: datetime
    dp_rank: int
    running: int
    queue: int
    throughput: float
    new_tokens: int = 0
    replay_tokens: int = 0
    cached_tokens: int = 0
    full_usage: float | None = None
    swa_usage: float | None = None
    accept_length: float | None = None
    accept_rate: float | None = None
    graph: bool | None = None


@dataclass
class Log:
    """Everything read. ``unread``: lines that name a batch but are cut or of another form. ``peers``: lines left out
    because a peer of the same DP rank logged the batch. ``without``: files with no batch line. ``histograms``: per
    finished request, in how many verify steps 0, 1, 2 .. drafts were right; only with ``--log-requests``.
    ``milliseconds``: times are that fine (SGLANG_LOG_MS)."""

    batches: list[Batch] = field(default_factory=list)
    unread: int = 0
    peers: int = 0
    without: list[str] = field(default_factory=list)
    histograms: list[tuple[int, ...]] = field(default_factory=list)
    simulated: tuple[str, ...] = ()
    milliseconds: bool = False

    def of(self, kind: Kind) -> list[Batch]:
        return [batch for batch in self.batches if batch.kind == kind]


class LogError(ValueError):
    """A log that cannot be used; the message names the file and what to do."""


def read(paths: Iterable[Path]) -> Log:
    """All batches of all files (one file, or one per node or rank), by time.

    Raises:
        LogError: a file is missing or given twice, or none has a batch line.
    """
    files = list(paths)
    repeated = [str(path) for path, n in Counter(path.resolve() for path in files).items() if n > 1]
    if repeated:
        raise LogError(f"{repeated[0]}: given twice; its batches would count double")
    log, found = Log(), []
    for path in files:
        try:
            with path.open(errors="replace") as lines:
                rows = _read_lines(lines, log)
        except OSError as error:
            raise LogError(f"{path}: {error.strerror}") from None
        if not rows:
            log.without.append(str(path))
        found += rows
    if not found:
        raise LogError(
            f"no prefill or decode lines in {', '.join(log.without)} ({log.unread} cut or of an unknown form): is it "
            "the log of an SGLang 0.5.23 server at --log-level info, and did requests reach it? A rank logs decode "
            "once in --decode-log-interval (40) steps"
        )
    lowest: dict[int, tuple] = {}
    for batch, peer in found:
        lowest[batch.dp_rank] = min(lowest.get(batch.dp_rank, peer), peer)
    kept = [batch for batch, peer in found if peer == lowest[batch.dp_rank]]
    log.peers = len(found) - len(kept)
    log.batches = sorted(kept, key=lambda batch: batch.time)
    return log


def _read_lines(lines: Iterable[str], log: Log) -> list[tuple[Batch, tuple]]:
    rows = []
    for raw in lines:
        text = _ANSI.sub("", raw.rstrip("\n"))
        mentions = len(_MENTION.findall(text))
        if not mentions:
            _note(text, log)
            continue
        match = _LINE.search(text)
        # Two on one line: two processes wrote at once, and fields of one may stand behind those of the other.
        row = _batch(match) if match and mentions == 1 else None
        if row is None:
            log.unread += mentions
        else:
            log.milliseconds |= match["ms"] is not None
            rows.append(row)
    return rows


def _batch(match: re.Match) -> tuple[Batch, tuple] | None:
    kind: Kind = "prefill" if match["kind"] == "Prefill" else "decode"
    values = {name.strip(): value.strip() for name, value in _PAIR.findall(match["fields"])}
    ranks = {name: int(number) for name, number in _RANK.findall(match["ranks"])}
    time = datetime.strptime(match["time"], "%Y-%m-%d %H:%M:%S").replace(microsecond=int(match["ms"] or 0) * 1000)
    peer = tuple(ranks.get(name, 0) for name in ("PP", "ATTN_CP", "MOE_DP", "TP", "EP"))
    graph = next((value == "True" for name, value in values.items() if name.endswith(" graph")), None)
    try:
        return (
            Batch(
                kind=kind,
                time=time,
                dp_rank=ranks.get("DP", 0),
                running=int(values["#running-req"]),
                queue=int(values["#queue-req"]),
                throughput=float(values[_THROUGHPUT[kind]]),
                new_tokens=int(values["#new-token"]) if kind == "prefill" else 0,
                replay_tokens=int(values.get("#replay-token", 0)),
                cached_tokens=int(values.get("#cached-token", 0)),
                full_usage=_number(values.get("full token usage", values.get("token usage"))),
                swa_usage=_number(values.get("swa token usage")),
                accept_length=_number(values.get("accept len")),
                accept_rate=_number(values.get("accept rate")),
                graph=graph,
            ),
            peer,
        )
    except (KeyError, ValueError):
        return None


def _note(text: str, log: Log) -> None:
    """What other lines tell: finished requests' histograms, and that a run was not real."""
    log.histograms += [tuple(map(int, found.split(","))) for found in _HISTOGRAM.findall(text)]
    if "server_args={" in text:
        log.simulated += tuple(name for name, sign in _STAMPS.items() if sign in text and name not in log.simulated)


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)
