"""`--attention-backend flydsl` in the real server: metadata, page tables and dispatch, with the reference for kernels.

The model has the released head sizes, because the backend refuses shapes that no kernel has. Tokens and accepted counts
must be those of a reference without SGLang.
"""

from __future__ import annotations

import pytest

import recorder
from checks import check_accepted, check_all_answer, check_log, check_tokens, replays
from conftest import DRAFT, with_models
from sglang_dflash_rocm.testing.client import generate_many
from sglang_dflash_rocm.testing.draft_reference import DraftReference
from sglang_dflash_rocm.testing.server import ServerConfig, ServerError

FLYDSL = ("--attention-backend", "flydsl", "--speculative-draft-attention-backend", "flydsl")
AITER = ("--attention-backend", "aiter", "--speculative-draft-attention-backend", "aiter")
TAKEOVER = {"SGLANG_AITER_PA_DECODE_IMPL": "flydsl"}
VECTORIZED = {"SGLANG_AITER_KV_CACHE_LAYOUT": "vectorized_5d"}
GRAPHS = {
    "SGLANG_DFLASH_CPU_GRAPH": "1",
    "SGLANG_DFLASH_DRAFT_GRAPH": "on",
    "SGLANG_DFLASH_IDLE_VERIFY_GRAPH": "1",
    "SGLANG_LOG_DECODE_GRAPH_KEY": "1",
}


@pytest.mark.parametrize(
    "flags, env",
    [
        pytest.param((*AITER, "--page-size", "16"), TAKEOVER | VECTORIZED | GRAPHS, id="aiter-5d-graphs"),
        pytest.param((*FLYDSL, "--page-size", "16"), {}, id="page16", marks=pytest.mark.slow),
        pytest.param((*FLYDSL, "--disable-radix-cache"), {}, id="default-page-no-radix", marks=pytest.mark.slow),
        pytest.param(FLYDSL, GRAPHS, id="graphs", marks=pytest.mark.slow),
        pytest.param(FLYDSL, VECTORIZED, id="5d", marks=pytest.mark.slow),
    ],
)
def test_dflash_under_dp_attention(models, load, start_server, record, flags, env):
    pair = models["wide"]
    runs = [DraftReference.from_checkpoint(pair.target, pair.draft).run(prompt, 24) for prompt in load.prompts]
    config = with_models(ServerConfig("wide", DRAFT, tp=2, dp=2, extra=flags, env=env), models)
    with start_server("flydsl-tp2-dp2", record(config)) as server:
        for rank in (None, None, 0):  # anywhere, again on prefix hits, and with the other rank idle
            answers = check_all_answer(
                server, lambda rank=rank: generate_many(server.url, load.prompts, 24, dp_rank=rank), 120
            )
            check_tokens(answers, [run.tokens for run in runs])
            check_accepted(answers, runs)
        check_log(server)
        used = [line for line in server.log_text().splitlines() if "flydsl attention for" in line]
        assert sum("MiMoV2" in line for line in used) == 2 and len(used) == 4, "target and draft, on each rank"
        layouts = {("MiMoV2" in line, "vectorized_5d" in line) for line in used}
        assert layouts == {(True, env.items() >= VECTORIZED.items()), (False, False)}, "a draft's pool keeps its rows"
        seen = replays(server)
    if env.items() >= GRAPHS.items():
        assert seen["draft", "TARGET_VERIFY"] and seen["target", "TARGET_VERIFY"] and seen["target", "IDLE"]
    assert (0, 1) in recorder.check_collectives(record.folder)


@pytest.mark.slow  # without a server: test_flydsl_backend_modes.py, test_layers_are_refused_at_construction
def test_shapes_without_a_kernel_stop_the_start_by_name(models, start_server):
    """The other tiny models have head sizes that no kernel serves."""
    config = with_models(ServerConfig("base", DRAFT, tp=1, dp=1, extra=(*FLYDSL, "--page-size", "16")), models)
    with pytest.raises(ServerError, match=r"flydsl, layer 0 of MiMoV2\w+: qk_dim 48; allowed: 128, 192; use"):
        with start_server("flydsl-base", config):
            pass
