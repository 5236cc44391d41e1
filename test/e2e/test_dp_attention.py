"""DFLASH under DP attention: tokens and accepted counts of every request equal the run without DP."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from checks import (
    Load,
    check_accepted,
    check_all_answer,
    check_drafts_help,
    check_log,
    check_no_slot_is_lost,
    check_tokens,
)
from conftest import DRAFT, with_models
from sglang_dflash_rocm.testing.client import chat, generate, generate_many
from sglang_dflash_rocm.testing.server import ServerConfig

NO_OVERLAP = "--disable-overlap-schedule"
#: SWA eviction by tokens, with and without overlap.
EVICT_OFTEN = {"SGLANG_DFLASH_SWA_TOKEN_INTERVAL": "16"}
CHUNKED = ("--page-size", "16", "--chunked-prefill-size", "64")
CONFIGS = {
    "tp2-dp2": ServerConfig("base", DRAFT, tp=2, dp=2),
    "tp2-dp2-no-overlap": ServerConfig("base", DRAFT, tp=2, dp=2, extra=(*CHUNKED, NO_OVERLAP), env=EVICT_OFTEN),
    # The layout of the real checkpoint: fused QKV, interleaved for the attention TP size, which is why DP is needed.
    "tp4-dp2-fused": ServerConfig("fused", DRAFT, tp=4, dp=2, extra=CHUNKED, env=EVICT_OFTEN),
    "tp4-dp4-no-overlap": ServerConfig("base", DRAFT, tp=4, dp=4, extra=(NO_OVERLAP,)),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "tp4-dp2-fused" else [pytest.mark.slow]) for name in CONFIGS],
)
def server(request, models, start_server):
    with start_server(request.param, with_models(CONFIGS[request.param], models)) as running:
        yield running


def test_tokens_and_accepted_counts_equal_the_run_without_dp(server, load, single_rank_answers):
    answers = check_all_answer(server, lambda: load.ask(server.url), 120)
    check_tokens(answers, load.expected)
    check_accepted(answers, single_rank_answers)
    check_drafts_help(answers)
    assert {a.dp_rank for a in answers} == set(range(server.config.dp))
    check_log(server)


def test_one_busy_rank_and_the_others_idle(server, load, single_rank_answers):
    """Idle ranks take part in every collective of the busy one, or the request never ends."""
    for rank in range(server.config.dp):
        answers = check_all_answer(server, lambda rank=rank: load.ask(server.url, dp_rank=rank), 120)
        assert {a.dp_rank for a in answers} == {rank}
        check_tokens(answers, load.expected)
        check_accepted(answers, single_rank_answers)


def test_ranks_fall_idle_one_after_another_and_work_again(server, load):
    """C08: requests that end at different steps until every rank is idle, twice."""
    lengths = [3, 37, 11, 1, 29, 2, 19, 7]
    expected = [tokens[:n] for tokens, n in zip(load.expected, lengths, strict=True)]
    for _ in range(2):
        answers = check_all_answer(server, lambda: generate_many(server.url, load.prompts, lengths), 120)
        check_tokens(answers, expected)


def test_staggered_requests_with_shared_prefixes(server, reference):
    """Prefill on one rank while others decode, prefix hits on and off page multiples, prompts beyond a chunk."""
    rnd = random.Random(11)
    base = [rnd.randrange(1, 500) for _ in range(96)]
    prompts = [base[: rnd.choice((0, 16, 32, 33, 48, 95))] + _words(rnd, rnd.randrange(1, 60)) for _ in range(10)]
    lengths = [rnd.randrange(1, 24) for _ in prompts]
    delays = [rnd.random() * 2 for _ in prompts]
    load = Load(prompts, lengths, [reference.greedy(p, n) for p, n in zip(prompts, lengths, strict=True)])

    def late(prompt, n, delay):
        time.sleep(delay)
        return generate(server.url, prompt, n)

    def ask():
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(late, prompts, lengths, delays))

    check_tokens(check_all_answer(server, ask, 180), load.expected)


def test_prefix_reuse_at_page_multiples(server, reference):
    """C17: a prompt whose length is a page multiple, hit on all its pages; what others share stays as it was."""
    rnd = random.Random(5)
    shared = _words(rnd, 64)
    first = generate(server.url, shared + [7], 12, dp_rank=0)
    again = generate(server.url, shared + [9], 12, dp_rank=0)
    third = generate(server.url, shared + [7], 12, dp_rank=0)
    check_tokens([first, again, third], [reference.greedy(shared + [last], 12) for last in (7, 9, 7)])
    assert again.cached_tokens >= 48, f"only {again.cached_tokens} of 64 shared tokens came from the cache"
    assert (first.accepted, first.verify_steps) == (third.accepted, third.verify_steps)


def test_aborted_requests_do_not_disturb_the_others(server, load, single_rank_answers):
    with ThreadPoolExecutor(12) as pool:
        victims = [pool.submit(_swallow, server.url, load.prompts[i], f"victim-{i}") for i in range(4)]
        kept = [pool.submit(generate, server.url, p, n) for p, n in zip(load.prompts, load.new_tokens, strict=True)]
        time.sleep(0.5)
        for i in range(4):
            requests.post(f"{server.url}/abort_request", json={"rid": f"victim-{i}"}, timeout=10).raise_for_status()
        answers = check_all_answer(server, lambda: [future.result() for future in kept], 120)
        for victim in victims:
            assert victim.result(timeout=60) < 400, "an aborted request ran to its end"
    check_tokens(answers, load.expected)
    check_accepted(answers, single_rank_answers)


def test_both_routes_stream_and_give_logprobs(server, load):
    answer = generate(server.url, load.prompts[1], 24, logprobs=True)
    check_tokens([answer], [load.expected[1][:24]])
    assert answer.chunks > 1 and len(answer.logprobs) == 24 and max(answer.logprobs) <= 0
    by_chat = chat(server.url, "w10 w20 w30", 24)
    assert by_chat.chunks > 1 and len(by_chat.tokens) == 24 and by_chat.verify_steps < 24


def test_no_kv_slot_is_leaked(server):
    """After all the above: every rank idle, its cache flushed, not one token slot in use; and the scheduler, which
    checks its own pools when idle, found nothing either."""
    check_no_slot_is_lost(server)
    check_log(server)


def _swallow(url: str, prompt: list[int], rid: str) -> int:
    """Tokens that a request got before it was aborted."""
    try:
        return len(generate(url, prompt, 400, rid=rid).tokens)
    except (RuntimeError, requests.RequestException):
        return 0


def _words(rnd: random.Random, n: int) -> list[int]:
    return [rnd.randrange(1, 500) for _ in range(n)]
