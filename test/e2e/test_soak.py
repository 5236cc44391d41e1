"""Long mixed load: ``make test-soak``. Every answer is the model's own, no slot is lost, drafts help as without DP."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from checks import check_log, check_no_slot_is_lost, check_tokens, wait_for_idle
from conftest import DRAFT, with_models
from sglang_dflash_rocm.testing.client import Answer, generate
from sglang_dflash_rocm.testing.server import ServerConfig

REQUESTS = int(os.environ.get("DFLASH_SOAK_REQUESTS", "2000"))
WAVE, CLIENTS, PAGE, LONGEST = 100, 10, 16, 40
EVERYTHING = {
    "SGLANG_DFLASH_CPU_GRAPH": "1",
    "SGLANG_DFLASH_DRAFT_GRAPH": "on",
    "SGLANG_DFLASH_IDLE_VERIFY_GRAPH": "1",
    "SGLANG_DFLASH_SWA_TOKEN_INTERVAL": "32",
}


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    new_tokens: int
    delay_s: float
    abort: bool


def make_requests(rnd: random.Random, count: int) -> list[Request]:
    """Ragged prompts of which many share page multiples, ragged lengths, gaps in which ranks fall idle, some aborts."""
    stems = [[rnd.randrange(5, 500) for _ in range(6 * PAGE)] for _ in range(6)]
    prompts = []
    for _ in range(max(20, count // 8)):
        shared = rnd.choice(stems)[: PAGE * rnd.randrange(0, 6) + rnd.choice((0, 0, 1, 7))]
        prompts.append((*shared, *(rnd.randrange(5, 500) for _ in range(rnd.randrange(1, 40)))))
    return [
        Request(rnd.choice(prompts), rnd.choice((1, 5, 17, LONGEST)), rnd.choice((0, 0, 0, 0.3)), rnd.random() < 0.05)
        for _ in range(count)
    ]


def serve(url: str, request: Request, rid: str) -> Answer | None:
    """The answer, or ``None`` where the request was aborted half-way."""
    time.sleep(request.delay_s)
    if not request.abort:
        return generate(url, list(request.prompt), request.new_tokens)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(generate, url, list(request.prompt), 300, rid=rid)
        time.sleep(0.2)
        requests.post(f"{url}/abort_request", json={"rid": rid}, timeout=30).raise_for_status()
        try:
            future.result(60)
        except (RuntimeError, requests.RequestException):
            pass
    return None


def check_greedy(reference, known: dict, request: Request, answer: Answer) -> None:
    """The answer is what the reference says greedily: one forward over prompt and answer shows it for all tokens."""
    right = known.get(request.prompt, [])
    if len(right) < request.new_tokens:
        logits = reference.logits([*request.prompt, *answer.tokens[:-1]])
        right = known[request.prompt] = logits[len(request.prompt) - 1 :].argmax(-1).tolist()
    check_tokens([answer], [right[: request.new_tokens]])


def soak(server, todo: list[Request], reference, known: dict) -> tuple[int, int]:
    """Send everything in waves with idle phases in between; tokens and verify steps of the kept answers."""
    tokens = steps = 0
    for start in range(0, len(todo), WAVE):
        wave = todo[start : start + WAVE]
        with ThreadPoolExecutor(CLIENTS) as pool:
            rids = [f"soak-{start}-{i}" for i in range(len(wave))]
            answers = list(pool.map(serve, [server.url] * len(wave), wave, rids))
        kept = [(request, answer) for request, answer in zip(wave, answers, strict=True) if answer is not None]
        for request, answer in sorted(kept, key=lambda pair: -pair[0].new_tokens):
            check_greedy(reference, known, request, answer)
        # An answer of one token comes from the prefill and has no verify step.
        verified = [answer for _, answer in kept if answer.verify_steps]
        tokens += sum(len(answer.tokens) for answer in verified)
        steps += sum(answer.verify_steps for answer in verified)
        wait_for_idle(server)
        if (start // WAVE) % 3 == 2:
            check_no_slot_is_lost(server)
    check_no_slot_is_lost(server)
    check_log(server)
    return tokens, steps


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak(models, reference, start_server):
    todo = make_requests(random.Random(3), REQUESTS)
    known: dict = {}
    rates = {}
    alone = ServerConfig("base", DRAFT, extra=("--page-size", str(PAGE)))
    dp = dataclasses.replace(
        alone, tp=4, dp=2, env=EVERYTHING, extra=(*alone.extra, "--cuda-graph-bs-decode", "1", "2", "4")
    )
    for name, config in (("alone", alone), ("dp", dp)):
        with start_server(f"soak-{name}", with_models(config, models)) as server:
            begun = time.monotonic()
            tokens, steps = soak(server, todo, reference, known)
            rates[name] = tokens / steps
            print(f"{name}: {tokens} tokens in {steps} verify steps, {time.monotonic() - begun:.0f} s")
    assert abs(rates["dp"] / rates["alone"] - 1) < 0.01, rates
