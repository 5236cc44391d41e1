"""Named checks of answers. Tests use them to pass; the fault tests use the same ones to show that they fail."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import requests

from sglang_dflash_rocm.testing.client import Answer, generate_many
from sglang_dflash_rocm.testing.draft_reference import DraftRun
from sglang_dflash_rocm.testing.server import Server

#: With SGLANG_LOG_DECODE_GRAPH_KEY: DP rank, worker, bucket, mode, requests.
REPLAY = re.compile(
    r"(?: DP(\d) TP\d)?\] Decode graph replay: worker=(\w+) key_size=(\d+) \(bs\) mode=(\w+) raw_bs=(\d+)"
)


@dataclass(frozen=True)
class Load:
    """Prompts, how many tokens each asks for, and the tokens that are right."""

    prompts: list[list[int]]
    new_tokens: list[int]
    expected: list[list[int]]

    def ask(self, url: str, **kwargs) -> list[Answer]:
        """All prompts at once."""
        return generate_many(url, self.prompts, self.new_tokens, **kwargs)


def check_tokens(answers: Sequence[Answer], expected: Sequence[Sequence[int]]) -> None:
    """Every answer is the expected one, token by token."""
    wrong = {
        index: next((i for i, (a, b) in enumerate(zip(answer.tokens, want, strict=False)) if a != b), "length")
        for index, (answer, want) in enumerate(zip(answers, expected, strict=True))
        if answer.tokens != list(want)
    }
    assert not wrong, f"tokens differ; first difference by request: {wrong}"


def check_accepted(answers: Sequence[Answer], baseline: Sequence[Answer | DraftRun]) -> None:
    """Accepted drafts and verify steps of each request are those of a run without DP, or of the reference."""
    got, want = [_counts(answer) for answer in answers], [_counts(run) for run in baseline]
    assert got == want, f"(accepted, verify steps) by request: got {got}, must be {want}"


def _counts(run: Answer | DraftRun) -> tuple[int, int]:
    return (sum(run.accepted) if isinstance(run, DraftRun) else run.accepted), run.verify_steps


def check_drafts_help(answers: Sequence[Answer], least: float = 2.0) -> None:
    """Speculation is worth something on every DP rank that answered: tokens per verify step above ``least``."""
    for rank in {a.dp_rank for a in answers}:
        mine = [a for a in answers if a.dp_rank == rank]
        rate = sum(len(a.tokens) for a in mine) / sum(a.verify_steps for a in mine)
        assert rate > least, f"DP rank {rank}: {rate:.2f} tokens per verify step, must be above {least}"


def check_log(server: Server) -> None:
    """No plugin or hook error was swallowed, and every process that runs SGLang's loader has our hooks."""
    assert not server.swallowed_errors(), server.swallowed_errors()
    processes = server.config.tp + (3 if server.config.dp > 1 else 2)
    assert len(server.plugin_lines()) >= processes, f"hooks active in {len(server.plugin_lines())} of {processes}"


def check_all_answer(server: Server, call: Callable[[], list[Answer]], within_s: float) -> list[Answer]:
    """The answers of ``call``, which must arrive in time; a server that hangs or dies fails with its log."""
    result: list = []
    worker = threading.Thread(target=lambda: result.append(_outcome(call)), daemon=True)
    worker.start()
    worker.join(within_s)
    assert result, str(server.failure(f"no answer within {within_s:.0f} s"))
    assert not isinstance(result[0], Exception), str(server.failure(f"a request failed: {result[0]}"))
    return result[0]


def _outcome(call):
    try:
        return call()
    except Exception as error:
        return error


def wait_for(condition: Callable[[], bool], within_s: float, what: str) -> float:
    """Seconds until ``condition()`` holds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within_s, f"{what}: not within {within_s:.0f} s"
        time.sleep(0.2)
    return time.monotonic() - start


def wait_for_idle(server: Server) -> None:
    """No rank has a running request."""
    wait_for(lambda: _over_ranks(server, "num_running_reqs") == 0, 60, "all ranks idle")


def check_no_slot_is_lost(server: Server) -> None:
    """Every rank idle and its cache flushed: no token slot is in use, and the scheduler's own check found nothing."""
    wait_for_idle(server)
    assert requests.post(f"{server.url}/flush_cache", timeout=30).status_code == 200
    wait_for(lambda: _over_ranks(server, "num_used_tokens") == 0, 20, "all token slots are free")
    assert "memory leak" not in server.log_text()


def _over_ranks(server: Server, key: str) -> int:
    loads = requests.get(f"{server.url}/v1/loads", timeout=30).json()["loads"]
    assert len(loads) == server.config.dp
    return sum(rank[key] for rank in loads)


def replays(server: Server) -> Counter:
    """(worker, mode) of all graph replays in the server's log."""
    return Counter((worker, mode) for _dp, worker, _key, mode, _raw in REPLAY.findall(server.log_text()))
