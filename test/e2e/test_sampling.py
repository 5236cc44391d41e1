"""``temperature > 0`` with DFLASH: the target's own distribution, seeded, and no effect on greedy neighbours."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import requests
from scipy.stats import chisquare

from checks import check_all_answer, check_log, check_tokens
from conftest import DRAFT, with_models, with_plugin
from sglang_dflash_rocm.testing.client import generate_many
from sglang_dflash_rocm.testing.server import ServerConfig

TOP_K, DRAWS = 3, 900
HOOK = "sglang.srt.speculative.dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE"
SAMPLING = {"temperature": 1.0, "top_k": TOP_K, "max_new_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(models, start_server):
    extra = ("--random-seed", "7", "--max-running-requests", "64")
    config = with_models(ServerConfig("base", DRAFT, tp=2, dp=2, extra=extra), models)
    with start_server("sampling", config) as running:
        yield running


def draw(url: str, prompt: list[int], times: int, **sampling) -> list[tuple[int, ...]]:
    body = {"input_ids": [prompt] * times, "sampling_params": {**SAMPLING, **sampling}}
    answers = requests.post(f"{url}/generate", json=body, timeout=300).json()
    return [tuple(answer["output_ids"]) for answer in answers]


def next_token_probs(reference, tokens: list[int]) -> dict[int, float]:
    """The reference's distribution after ``tokens``, cut to the ``TOP_K`` most likely."""
    values, ids = reference.logits(tokens)[-1].double().topk(TOP_K)
    return dict(zip(ids.tolist(), values.softmax(0).tolist(), strict=True))


def test_sampled_tokens_follow_the_model_without_sglang(server, reference, load):
    """The first token comes from the prefill's sampler, the second and third from verify: a joint chi-square test."""
    prompt = load.prompts[0]
    answers = [tokens for _ in range(DRAWS // 60) for tokens in draw(server.url, prompt, 60)]
    expected = {}
    for first, p1 in next_token_probs(reference, prompt).items():
        for second, p2 in next_token_probs(reference, [*prompt, first]).items():
            for third, p3 in next_token_probs(reference, [*prompt, first, second]).items():
                expected[first, second, third] = p1 * p2 * p3
    counts = Counter(answers)
    assert set(counts) <= set(expected), "a token outside top-k"
    # Cells that are too rare for the test are counted together.
    common = [cell for cell in expected if expected[cell] * len(answers) >= 5]
    observed = [counts[cell] for cell in common]
    wanted = [expected[cell] * len(answers) for cell in common]
    observed.append(len(answers) - sum(observed))
    wanted.append(len(answers) - sum(wanted))
    assert len(common) > 4
    assert chisquare(observed, wanted).pvalue > 1e-4, list(zip(observed, wanted, strict=True))
    check_log(server)


def test_greedy_requests_beside_sampled_ones_stay_greedy(server, load):
    noise = threading.Thread(target=lambda: draw(server.url, load.prompts[1], 40, max_new_tokens=60))
    noise.start()
    answers = check_all_answer(server, lambda: generate_many(server.url, load.prompts, load.new_tokens), 120)
    noise.join(60)
    check_tokens(answers, load.expected)


def test_the_log_says_which_verify_is_active(server):
    assert server.log_text().count("DFLASH verify, temperature 0: greedy; temperature > 0: chain sampling") == 1
    assert "falling back to greedy" not in server.log_text()


@pytest.mark.slow
def test_a_restart_with_the_same_seed_draws_the_same_tokens(models, load, start_server):
    runs = []
    for turn in range(2):
        config = with_models(ServerConfig("base", DRAFT, extra=("--random-seed", "11")), models)
        with start_server(f"seeded-{turn}", config) as running:
            runs.append([draw(running.url, prompt, 1, max_new_tokens=24) for prompt in load.prompts[:4]])
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_without_the_hook_sglang_verifies_greedily(models, load, start_server, tmp_path):
    """The fault that is mended, with SGLang's one warning about it."""
    base = with_models(ServerConfig("base", DRAFT), models)
    config = with_plugin(base, tmp_path, "faults:install", DFLASH_FAULT="without_hook", DFLASH_WITHOUT=HOOK)
    with start_server("greedy-verify", config) as running:
        answers = draw(running.url, load.prompts[0], 60)
        # One first token, from the prefill's sampler, allows one answer only.
        assert len(set(answers)) == len({tokens[0] for tokens in answers})
        assert "falling back to greedy argmax verification" in running.log_text()
