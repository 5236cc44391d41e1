"""What the standard configurations leave out: DP without drafts, the compact draft window, the real head sizes."""

from __future__ import annotations

import pytest

from checks import check_accepted, check_all_answer, check_drafts_help, check_log, check_tokens
from conftest import DRAFT, with_models
from sglang_dflash_rocm.testing.reference import TinyReference
from sglang_dflash_rocm.testing.server import ServerConfig

DRAFT_WINDOW = ("--speculative-draft-window-size", "16")


def test_dp_attention_without_speculation(models, load, start_server):
    config = with_models(ServerConfig("base", tp=2, dp=2), models)
    with start_server("plain-tp2-dp2", config) as server:
        answers = check_all_answer(server, lambda: load.ask(server.url), 120)
        check_tokens(answers, load.expected)
        assert {a.dp_rank for a in answers} == {0, 1}
        assert all(a.verify_steps is None for a in answers)
        check_log(server)


@pytest.mark.parametrize("block", [8, 4])
def test_draft_window_under_dp_equals_the_run_without_dp(models, load, start_server, block):
    """C18: the draft keeps a compact window of its own; prefix hits and ragged batches must not confuse its table."""
    extra = (*DRAFT_WINDOW, "--speculative-num-draft-tokens", str(block))
    answers = {}
    for name, tp, dp in (("window-tp1", 1, 1), ("window-tp2-dp2", 2, 2)):
        config = with_models(ServerConfig("base", DRAFT, tp=tp, dp=dp, extra=extra), models)
        with start_server(f"{name}-block{block}", config) as server:
            answers[name] = check_all_answer(server, lambda server=server: load.ask(server.url), 120)
            again = check_all_answer(server, lambda server=server: load.ask(server.url), 120)
            check_log(server)
        check_tokens(answers[name], load.expected)
        check_tokens(again, load.expected)
        check_drafts_help(answers[name], 1.5)
    check_accepted(answers["window-tp2-dp2"], answers["window-tp1"])


def test_real_head_sizes_under_dp(models, load, start_server):
    """QK 192 and V 128, as in the released checkpoint, through pools of unequal width."""
    wide = TinyReference.from_checkpoint(models["wide"].target)
    expected = [wide.greedy(prompt, 24) for prompt in load.prompts]
    config = with_models(ServerConfig("wide", DRAFT, tp=2, dp=2), models)
    with start_server("wide-tp2-dp2", config) as server:
        short = type(load)(load.prompts, [24] * len(expected), expected)
        answers = check_all_answer(server, lambda: short.ask(server.url), 120)
        check_tokens(answers, expected)
        check_drafts_help(answers, 1.5)
        check_log(server)
