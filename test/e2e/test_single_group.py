"""Without DP attention: the plain model equals the reference, and DFLASH on 1 and 2 ranks equals both."""

from __future__ import annotations

import pytest
import torch

from checks import check_accepted, check_drafts_help, check_log, check_tokens
from conftest import DRAFT, with_models
from sglang_dflash_rocm.testing.client import chat, generate
from sglang_dflash_rocm.testing.draft_reference import DraftReference
from sglang_dflash_rocm.testing.reference import TinyReference
from sglang_dflash_rocm.testing.server import ServerConfig


@pytest.fixture(scope="module")
def plain(models, start_server):
    with start_server("plain-tp1", with_models(ServerConfig("base"), models)) as server:
        yield server


@pytest.fixture(scope="module")
def dflash_tp2(models, start_server):
    with start_server("dflash-tp2", with_models(ServerConfig("base", DRAFT, tp=2), models)) as server:
        yield server


def test_target_only_equals_the_reference(plain, load):
    check_tokens(load.ask(plain.url), load.expected)
    check_log(plain)


def test_the_window_is_the_models_own(plain, models, load):
    """One key more, as upstream's extend and verify see it, would give other tokens: the check above has teeth."""
    window = TinyReference.from_checkpoint(models["base"].target).window_keys
    wider = TinyReference.from_checkpoint(models["base"].target, window_keys=window + 1)
    pairs = zip(load.prompts, load.new_tokens, strict=True)
    with pytest.raises(AssertionError, match="tokens differ"):
        check_tokens(load.ask(plain.url), [wider.greedy(prompt, n) for prompt, n in pairs])


def test_logprobs_are_the_references(plain, reference, load):
    prompt, expected = load.prompts[0], load.expected[0]
    answer = generate(plain.url, prompt, len(expected), logprobs=True)
    logits = reference.logits(prompt + expected)[len(prompt) - 1 : -1].double()
    want = torch.log_softmax(logits, -1)[torch.arange(len(expected)), torch.tensor(expected)]
    torch.testing.assert_close(torch.tensor(answer.logprobs).double(), want, atol=1e-4, rtol=1e-4)


def test_chat_streams_what_generate_gives(plain, models):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["base"].target)
    message = [{"role": "user", "content": "w10 w20 w30"}]
    ids = tokenizer.apply_chat_template(message, tokenize=True, return_dict=False, add_generation_prompt=True)
    by_chat = chat(plain.url, "w10 w20 w30", 16)
    assert by_chat.tokens == generate(plain.url, ids, 16).tokens
    assert by_chat.chunks > 1


def test_dflash_on_one_rank_equals_the_reference(single_rank_answers, load):
    check_tokens(single_rank_answers, load.expected)
    check_drafts_help(single_rank_answers)


def test_accepted_counts_are_those_of_a_reference_without_sglang(single_rank_answers, models, load):
    """Drafts, verify and accept rule in plain torch: the baseline of every other test is not SGLang's own word."""
    reference = DraftReference.from_checkpoint(models["base"].target, models["base"].draft)
    runs = [reference.run(prompt, n) for prompt, n in zip(load.prompts, load.new_tokens, strict=True)]
    check_accepted(single_rank_answers, runs)
    assert {count for run in runs for count in run.accepted} == set(range(8)), "every accept length of the block occurs"


@pytest.mark.slow
def test_dflash_on_two_ranks(dflash_tp2, load, single_rank_answers):
    answers = load.ask(dflash_tp2.url)
    check_tokens(answers, load.expected)
    check_accepted(answers, single_rank_answers)
    check_log(dflash_tp2)
