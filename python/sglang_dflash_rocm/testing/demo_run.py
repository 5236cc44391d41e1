"""What ``dflash-rocm demo`` does, without its screen: two servers, the same prompts, one row per request."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sglang_dflash_rocm.testing.client import Answer, chat, generate
from sglang_dflash_rocm.testing.server import Server, ServerConfig
from sglang_dflash_rocm.testing.tiny_models import build_tiny_models, tiny_prompts

ROUTES = ("/v1/chat/completions", "/generate")

#: The tiny draft is built to be right more often than this; a rank below it has a broken draft, not bad luck.
MIN_ACCEPT_LENGTH = 2.0

#: ``progress(stage, done, total, detail)``; ``total`` 0 means that the end is not known.
Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class DemoOptions:
    """``tp`` ranks in ``dp`` attention groups; ``timeout_s`` bounds each wait (start-up, every request)."""

    tp: int = 4
    dp: int = 2
    prompts: int = 8
    new_tokens: int = 48
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.dp < 1 or self.tp < 1 or self.tp % self.dp:
            raise ValueError(f"--dp {self.dp} must divide --tp {self.tp}: use for example --tp 4 --dp 2")
        if self.tp // self.dp not in (1, 2, 4) or self.tp > 8:
            raise ValueError(
                f"--tp {self.tp} --dp {self.dp} gives attention groups of {self.tp // self.dp} ranks; the tiny model "
                "has heads for groups of 1, 2 or 4, and 8 ranks are the most: use for example --tp 4 --dp 2"
            )
        if self.prompts < self.dp or self.new_tokens < 1:
            raise ValueError(
                f"--prompts {self.prompts} must be at least --dp {self.dp} so that every rank is asked, and "
                f"--new-tokens {self.new_tokens} at least 1"
            )


@dataclass(frozen=True)
class Row:
    """One request: what the DFLASH server answered, beside the target-only server's tokens."""

    prompt: int
    route: str
    dp_rank: int
    prompt_tokens: int
    tokens: list[int]
    expected: list[int]
    verify_steps: int
    chunks: int

    @property
    def equal(self) -> bool:
        return self.tokens == self.expected

    @property
    def accept_length(self) -> float:
        """Tokens per verify step, bonus included; 0 where nothing was verified."""
        return len(self.tokens) / self.verify_steps if self.verify_steps else 0.0


@dataclass
class DemoReport:
    """Rows, seconds per stage, and what went wrong, in plain words. ``ok`` only when nothing did."""

    options: DemoOptions
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    plugin_line: str = ""
    logs: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and not self.problems

    @property
    def equal_prompts(self) -> int:
        """Prompts whose answers are equal on both routes."""
        return self.options.prompts - len({row.prompt for row in self.rows if not row.equal})

    def rank_means(self) -> dict[int, dict[str, float]]:
        """Per DP rank: requests, tokens, verify steps, mean of the requests' accept lengths, tokens per verify step."""
        means = {}
        for rank in range(self.options.dp):
            rows = [row for row in self.rows if row.dp_rank == rank]
            steps = sum(row.verify_steps for row in rows)
            tokens = sum(len(row.tokens) for row in rows)
            means[rank] = {
                "requests": len(rows),
                "tokens": tokens,
                "verify_steps": steps,
                "mean_accept_length": sum(row.accept_length for row in rows) / len(rows) if rows else 0.0,
                "tokens_per_step": tokens / steps if steps else 0.0,
            }
        return means

    def as_json(self) -> dict:
        """Everything, as plain data."""
        return {
            "ok": self.ok,
            "problems": self.problems,
            "options": asdict(self.options),
            "equal_prompts": self.equal_prompts,
            "rows": [
                {**asdict(row), "equal": row.equal, "accept_length": round(row.accept_length, 3)} for row in self.rows
            ],
            "ranks": self.rank_means(),
            "seconds": {stage: round(seconds, 1) for stage, seconds in self.seconds.items()},
            "plugin": self.plugin_line,
            "logs": self.logs,
        }


def run_demo(
    options: DemoOptions,
    workdir: Path,
    progress: Progress,
    while_serving: Callable[[Server, DemoReport], None] | None = None,
) -> DemoReport:
    """Build the models, serve them target-only and with DFLASH under DP attention, compare every answer.

    ``while_serving`` is called with the DFLASH server still up (``--keep``). Whatever happens, no process of a server
    is left when this returns or raises.

    Raises:
        ServerError: a server did not start. Request failures are not raised but reported.
    """
    report = DemoReport(options)
    with _timed(report, "models"):
        progress("building the tiny models", 0, 0, "")
        models = build_tiny_models(workdir / "models")
        prompts = tiny_prompts(options.prompts)

    common = {"max_running_requests": 2 * max(8, options.prompts), "watchdog_s": 120}
    plain = ServerConfig(models.target, **common)
    with _serving(report, plain, workdir / "logs" / "target-only.log", "target-only", progress) as server:
        expected = _ask_all(report, server, prompts, 1, "target-only answers", progress)

    dflash = ServerConfig(models.target, models.draft, tp=options.tp, dp=options.dp, **common)
    stage = f"DFLASH, TP{options.tp}/DP{options.dp}"
    with _serving(report, dflash, workdir / "logs" / "dflash.log", stage, progress) as server:
        answers = _ask_all(report, server, prompts, options.dp, "DFLASH answers", progress)
        report.rows = _rows(prompts, answers, expected)
        _check(report, server)
        if while_serving is not None:
            while_serving(server, report)
    return report


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``SystemExit`` so that servers are stopped on the way out, as on Ctrl-C."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _timed(report: DemoReport, stage: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        report.seconds[stage] = time.monotonic() - start


@contextmanager
def _serving(report: DemoReport, config: ServerConfig, log: Path, stage: str, progress: Progress) -> Iterator[Server]:
    report.logs.append(str(log))
    timeout_s = int(report.options.timeout_s)
    with Server(config, log) as server:
        with _timed(report, f"{stage} start"):
            server.wait_ready(timeout_s, lambda s, line: progress(f"starting {stage}", int(s), timeout_s, line))
        yield server


def _ask_all(
    report: DemoReport, server: Server, prompts: Sequence[list[int]], dp: int, stage: str, progress: Progress
) -> dict[tuple[int, str], Answer]:
    """Every prompt on both routes, all at once. A request that fails is a problem of the report, not an exception."""
    done = 0
    lock = threading.Lock()
    total = len(prompts) * len(ROUTES)

    def one(job: tuple[int, str]) -> tuple[tuple[int, str], Answer | None]:
        nonlocal done
        index, route = job
        try:
            answer = _ask(server.url, route, prompts[index], index % dp if dp > 1 else None, report.options)
        except Exception as error:
            answer = None
            with lock:
                report.problems.append(f"{stage}: prompt {index} on {route} got no answer: {error}")
        with lock:
            done += 1
            progress(stage, done, total, "")
        return job, answer

    jobs = [(index, route) for index in range(len(prompts)) for route in ROUTES]
    progress(stage, 0, total, "")
    pool = ThreadPoolExecutor(total)
    try:
        with _timed(report, stage):
            answers = {job: answer for job, answer in pool.map(one, jobs) if answer is not None}
    finally:
        # On Ctrl-C do not wait for answers: the server is stopped next, which ends the requests.
        pool.shutdown(wait=False, cancel_futures=True)
    if (code := server.exit_code()) is not None:
        report.problems.append(f"{stage}: the server ended by itself with exit code {code}, see {server.log}")
    return answers


def _ask(url: str, route: str, prompt: list[int], dp_rank: int | None, options: DemoOptions) -> Answer:
    if route == "/generate":
        return generate(url, prompt, options.new_tokens, timeout_s=options.timeout_s)
    # The chat route does not report the rank that answered, so it is told one.
    words = " ".join(f"w{token}" for token in prompt)
    return chat(url, words, options.new_tokens, timeout_s=options.timeout_s, dp_rank=dp_rank)


def _rows(prompts: Sequence[list[int]], answers: dict, expected: dict) -> list[Row]:
    rows = []
    for (index, route), answer in answers.items():
        plain = expected.get((index, route))
        rows.append(
            Row(
                prompt=index,
                route=route,
                dp_rank=answer.dp_rank or 0,
                prompt_tokens=len(prompts[index]),
                tokens=answer.tokens,
                expected=plain.tokens if plain else [],
                verify_steps=answer.verify_steps or 0,
                chunks=answer.chunks,
            )
        )
    return rows


def _check(report: DemoReport, server: Server) -> None:
    options = report.options
    for row in report.rows:
        where = f"prompt {row.prompt} on {row.route}"
        if not row.equal:
            pairs = zip(row.tokens, row.expected, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(row.tokens), len(row.expected)))
            report.problems.append(f"{where}: tokens differ from target-only from position {first} on")
        if len(row.tokens) != options.new_tokens:
            report.problems.append(f"{where}: {len(row.tokens)} tokens instead of {options.new_tokens}")
        if row.chunks < 2:
            report.problems.append(f"{where}: the answer was not streamed ({row.chunks} chunk)")
    for rank, mean in report.rank_means().items():
        if mean["mean_accept_length"] <= MIN_ACCEPT_LENGTH:
            report.problems.append(
                f"DP rank {rank}: mean accept length {mean['mean_accept_length']:.2f} over {mean['requests']} "
                f"requests, must be above {MIN_ACCEPT_LENGTH}"
            )
    report.problems += [f"server log: {line.strip()}" for line in server.swallowed_errors()]
    lines = server.plugin_lines()
    report.plugin_line = lines[0] if lines else ""
    # Launcher, detokenizer, every scheduler, and the DP controller where there is one.
    wanted = options.tp + (3 if options.dp > 1 else 2)
    if len(lines) < wanted:
        report.problems.append(f"only {len(lines)} of {wanted} server processes report that our hooks are applied")
