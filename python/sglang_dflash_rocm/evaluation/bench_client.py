"""One cell: SGLang's own client, ``python -m sglang.benchmark.serving``, as a subprocess, and what it measured."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash_rocm.evaluation.bench_records import Figures, Phase, Spread, spread
from sglang_dflash_rocm.evaluation.bench_server import listening

#: Data sets whose lengths we choose, and those that bring their own.
RANDOM_DATASETS = ("random-ids", "random")
OWN_LENGTH_DATASETS = ("sharegpt", "custom")
#: The client takes no output length below this for a data set that brings its own lengths.
_LEAST_FIXED_OUTPUT = 4
TAIL_LINES = 25
_POLL_S = 0.5
#: Refused connections in a row, one per poll, after which a server is dead.
_DEAD_AFTER = 3
_ENV = {"PYTHONUNBUFFERED": "1"}


class CellFailed(Exception):
    """The client ended badly or measured nothing usable; the message is the record's reason."""


@dataclass(frozen=True)
class Workload:
    """What is the same in all cells. ``range_ratio``: the client draws lengths from [ratio * length, length]; its own
    default of 0 halves the mean length, so it is always passed."""

    base_url: str
    dataset: str
    dataset_path: str
    range_ratio: float
    seed: int
    tokenizer: str
    warmup_requests: int
    fake_prefill: bool
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One point of a matrix or a sweep: fixed concurrency, or a request rate. Lengths in tokens."""

    phase: Phase
    matrix: str
    input_len: int | None
    output_len: int
    num_prompts: int
    concurrency: int | None = None
    request_rate: float | None = None
    repeat: int = 0

    def key(self, work: Workload) -> str:
        """Names all that a cell's result depends on, the server aside; a data set goes by its file's name."""
        load = f"c{self.concurrency}" if self.concurrency else f"r{self.request_rate:.6g}"
        length = self.input_len or "own"
        ratio = f"-ratio{work.range_ratio:g}" if self.input_len else ""
        repeat = f"-try{self.repeat}" if self.repeat else ""
        data = f"{work.dataset}-{Path(work.dataset_path).name}" if work.dataset_path else work.dataset
        sizes = f"in{length}-out{self.output_len}-{load}-n{self.num_prompts}{repeat}"
        return "/".join((self.phase, self.matrix, f"{data}{ratio}-seed{work.seed}", sizes, *work.extra_args))


def command(cell: Cell, work: Workload, output: Path) -> list[str]:
    """The client's exact command line."""
    flags: dict[str, object] = {
        "--backend": "sglang",
        "--base-url": work.base_url,
        "--ready-check-timeout-sec": 0,
        "--dataset-name": work.dataset,
        "--num-prompts": cell.num_prompts,
        "--seed": work.seed + cell.repeat,
        "--warmup-requests": work.warmup_requests,
    }
    switches = ["--flush-cache", "--output-details", "--disable-tqdm"]
    if work.dataset_path:
        flags["--dataset-path"] = work.dataset_path
    if work.tokenizer:
        flags["--tokenizer"] = work.tokenizer
    if work.dataset in RANDOM_DATASETS:
        flags["--random-input-len"] = cell.input_len
        flags["--random-output-len"] = cell.output_len
        flags["--random-range-ratio"] = work.range_ratio
        # As ids: text made of random ids is tokenised again by the server, into another number of tokens.
        switches.append("--tokenize-prompt")
    elif cell.output_len >= _LEAST_FIXED_OUTPUT:
        flags["--sharegpt-output-len"] = cell.output_len
    else:
        sampling = {"temperature": 0.0, "max_new_tokens": cell.output_len, "ignore_eos": True}
        flags["--extra-request-body"] = json.dumps({"sampling_params": sampling})
    if cell.concurrency:
        flags["--max-concurrency"] = cell.concurrency
    if cell.request_rate:
        flags["--request-rate"] = f"{cell.request_rate:.6g}"
    if work.fake_prefill:
        switches.append("--fake-prefill")
    flags["--output-file"] = output
    words = [str(word) for pair in flags.items() for word in pair]
    return [sys.executable, "-m", "sglang.benchmark.serving", *words, *switches, *work.extra_args]


def shell_line(cell: Cell, work: Workload, output: Path) -> str:
    """The same, with the environment that is added, to paste into a shell."""
    return " ".join((*(f"{name}={value}" for name, value in _ENV.items()), shlex.join(command(cell, work, output))))


def run(cell: Cell, work: Workload, output: Path, log: Path, timeout_s: float) -> tuple[Figures, Mapping]:
    """Run the client to its end: figures, and the server's ``/server_info`` after the run.

    The client is gone when this returns or raises. Its result file, which holds every answer's text, is removed.

    Raises:
        CellFailed: the client ended with an error, too late, or with requests that failed; or the server is gone.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    if not listening(work.base_url):
        raise CellFailed(f"nothing listens at {work.base_url}")
    with log.open("wb") as out:
        client = subprocess.Popen(
            command(cell, work, output),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENV},
            start_new_session=True,
        )
        try:
            code = _wait(client, work.base_url, timeout_s)
        finally:
            stop(client)
    try:
        if code != 0:
            raise CellFailed(f"the client ended with exit code {code}: {last_error(log)}")
        return read_output(output, cell.num_prompts)
    except CellFailed as error:
        if not listening(work.base_url):
            raise CellFailed(f"the server at {work.base_url} is gone; {error}") from None
        raise
    finally:
        output.unlink(missing_ok=True)


def _wait(client: subprocess.Popen, url: str, timeout_s: float) -> int:
    """The client's exit code; it is not waited for once its server is dead."""
    end = time.monotonic() + timeout_s
    refused = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return client.wait(_POLL_S)
        refused = 0 if listening(url) else refused + 1
        if refused >= _DEAD_AFTER:
            raise CellFailed(f"the server at {url} went away during the cell")
        if time.monotonic() > end:
            raise CellFailed(f"not finished after CELL_TIMEOUT_S={timeout_s:g} s")


def stop(client: subprocess.Popen, grace_s: float = 5) -> None:
    """End the client and its children, and wait for it."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5)):
        if client.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(client.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(wait_s)


def read_output(output: Path, wanted: int) -> tuple[Figures, Mapping]:
    """Figures and server info of the client's result file (one JSON line, with ``--output-details``).

    Raises:
        CellFailed: no result, or not every request was sent and answered.
    """
    try:
        result = json.loads(output.read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise CellFailed(f"the client wrote no result: {error}") from None
    errors, times = result["errors"], result["ttfts"]
    failed = [text for text in errors if text]
    if failed:
        raise CellFailed(f"{len(failed)} of {len(errors)} requests failed, the first with: {_last_line(failed[0])}")
    if len(errors) < wanted:
        raise CellFailed(f"the data set gave {len(errors)} of {wanted} prompts: ask for fewer, or use a larger one")
    if result["completed"] < wanted:
        raise CellFailed(f"{result['completed']} of {wanted} requests were answered, without an error message")
    seconds = result["duration"]
    inputs, outputs = sum(result["input_lens"]), result["total_output_tokens"]
    known = [value for value in times if value > 0]
    return Figures(
        duration_s=seconds,
        sent=len(errors),
        completed=result["completed"],
        input_tokens=inputs,
        output_tokens=outputs,
        request_throughput=result["completed"] / seconds,
        input_throughput=inputs / seconds,
        output_throughput=outputs / seconds,
        ttft_ms=spread(known),
        tpot_ms=_client_spread(result, "tpot") if outputs > result["completed"] else None,
        itl_ms=spread([gap for gaps in result["itls"] for gap in gaps]),
        e2e_ms=_client_spread(result, "e2e_latency"),
        ttft_missing=len(times) - len(known),
    ), result.get("server_info") or {}


def _client_spread(result: Mapping, name: str) -> Spread:
    return Spread(
        mean=result[f"mean_{name}_ms"],
        p50=result[f"median_{name}_ms"],
        p90=result[f"p90_{name}_ms"],
        p99=result[f"p99_{name}_ms"],
    )


def tail(path: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log, each cut to 300 characters; empty if there is none."""
    if not path.is_file():
        return ()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64 * 1024))
        text = file.read().decode(errors="replace")
    return tuple(line[:300] for line in text.splitlines() if line.strip())[-lines:]


def last_error(log: Path) -> str:
    """The line that says most: the last of a traceback, or the last at all."""
    return (tail(log, 1) or ("it wrote nothing",))[0]


def _last_line(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or [text])[-1][:300]
