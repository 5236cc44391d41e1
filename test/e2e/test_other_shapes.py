"""What the standard configurations leave out: DP without drafts, the compact draft window, the real head sizes."""

from __future__ import annotations

import pytest

from checks import check_accepted, check_all_answer, check_log, check_tokens
from conftest import DRAFT, with_models
from sglang_dflash_rocm.testing.client import generate_many
from sglang_dflash_rocm.testing.draft_reference import DraftReference
from sglang_dflash_rocm.testing.server import ServerConfig

WINDOW = 16


@pytest.mark.slow
def test_dp_attention_without_speculation(models, load, start_server):
    config = with_models(ServerConfig("base", tp=2, dp=2), models)
    with start_server("plain-tp2-dp2", config) as server:
        answers = check_all_answer(server, lambda: load.ask(server.url), 120)
        check_tokens(answers, load.expected)
        assert {a.dp_rank for a in answers} == {0, 1}
        assert all(a.verify_steps is None for a in answers)
        check_log(server)


@pytest.mark.slow
@pytest.mark.parametrize("block", [8, 4])
def test_draft_window_under_dp(models, load, start_server, block):
    """C18: the draft keeps a compact window of its own; prefix hits and ragged batches must not confuse its table."""
    pair = models["base"]
    draft = DraftReference.from_checkpoint(pair.target, pair.draft, draft_window=WINDOW, block_size=block)
    runs = [draft.run(prompt, n) for prompt, n in zip(load.prompts, load.new_tokens, strict=True)]
    extra = ("--speculative-draft-window-size", str(WINDOW), "--speculative-num-draft-tokens", str(block))
    config = with_models(ServerConfig("base", DRAFT, tp=2, dp=2, extra=extra), models)
    with start_server(f"window-tp2-dp2-block{block}", config) as server:
        for _ in range(2):  # the second time on a prefix hit
            answers = check_all_answer(server, lambda: load.ask(server.url), 120)
            check_tokens(answers, load.expected)
            check_accepted(answers, runs)
        check_log(server)


@pytest.mark.slow  # test_flydsl_server.py runs the same model by default
def test_real_head_sizes_under_dp(models, load, start_server):
    """QK 192 and V 128, as in the released checkpoint, through pools of unequal width."""
    pair = models["wide"]
    runs = [DraftReference.from_checkpoint(pair.target, pair.draft).run(prompt, 24) for prompt in load.prompts]
    config = with_models(ServerConfig("wide", DRAFT, tp=2, dp=2), models)
    with start_server("wide-tp2-dp2", config) as server:
        answers = check_all_answer(server, lambda: generate_many(server.url, load.prompts, 24), 120)
        check_tokens(answers, [run.tokens for run in runs])
        check_accepted(answers, runs)
        check_log(server)
