"""What SGLang checks and resolves of DFLASH's arguments: the DP LM head, and the block size in one place only."""

from __future__ import annotations

import json
import sys

import pytest
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.testing.tiny_models import build_tiny_models

register_cpu_ci(est_time=15, suite="base-a-test-cpu")
register_amd_ci(est_time=15, suite="stage-a-test-1-gpu-small-amd")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return build_tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def resolve(models, monkeypatch):
    """``resolve(**arguments)``: the arguments of TP8/DP2 with DFLASH after SGLang's own check. Only the device is not
    here: its name is ``cuda``, as it is on ROCm."""
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    base = {
        "model_path": str(models.target),
        "speculative_draft_model_path": str(models.draft),
        "speculative_algorithm": "DFLASH",
        "device": "cuda",
        "tp_size": 8,
        "attn_dp_size": 2,
        "enable_dp_lm_head": True,
    }

    def run(**arguments):
        given = {**base, **arguments}
        dp, cp = given.pop("attn_dp_size"), given.pop("attn_cp_size", 1)
        server_args = ServerArgs(**given)
        # The widths are resolved from --dp and --enable-dp-attention earlier than this check.
        server_args.attn_dp_size, server_args.attn_cp_size = dp, cp
        speculative_hook._handle_dflash(server_args)
        return resolving_view(server_args)

    return run


def test_the_recommended_arguments_pass(resolve):
    resolved = resolve()
    assert (resolved.speculative_num_steps, resolved.speculative_eagle_topk) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_dp_lm_head": False}, "requires --enable-dp-lm-head"),
        ({"attn_cp_size": 2}, "does not support context parallel"),
        ({"device": "xpu"}, "requires CUDA or NPU"),
        ({"device": "cpu"}, "not supported by"),
        ({"pp_size": 2}, "only supports pp_size == 1"),
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"speculative_dflash_block_size": 0}, "to be positive"),
        ({"speculative_dflash_block_size": 4, "speculative_num_draft_tokens": 8}, "they must match"),
        ({"speculative_draft_window_size": 7}, "must be >= --speculative-num-draft-tokens"),
    ],
)
def test_what_cannot_work_is_refused(resolve, arguments, message):
    """Upstream: arg_groups/speculative_hook.py:287-352, 430. Without the DP LM head the draft's greedy choice would
    gather over the whole TP group, where an idle peer does not come."""
    with pytest.raises(ValueError, match=message):
        resolve(**arguments)


def test_prefill_coordination_is_refused(resolve, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", "1")
    with pytest.raises(ValueError, match="PREFILL_COORDINATION=0"):
        resolve()


def test_without_dp_attention_the_dp_lm_head_is_not_asked_for(resolve):
    """The refusals above come from the check of DP attention, not from the arguments as such."""
    resolve(attn_dp_size=1, enable_dp_lm_head=False)
    resolve(attn_dp_size=1, attn_cp_size=2)


@pytest.mark.parametrize(
    ("arguments", "block"),
    [
        ({}, 8),
        ({"speculative_num_draft_tokens": 6}, 6),
        ({"speculative_dflash_block_size": 4}, 4),
        ({"speculative_dflash_block_size": 4, "speculative_num_draft_tokens": 4}, 4),
        ({"speculative_draft_model_path": "/no/such/draft"}, 16),
    ],
)
def test_block_size_is_resolved_into_num_draft_tokens(resolve, arguments, block, monkeypatch):
    """Upstream: arg_groups/speculative_hook.py:368-425. ``speculative_dflash_block_size`` stays ``None`` unless given,
    so whoever reads it instead of ``speculative_num_draft_tokens`` crashes on a valid configuration."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    resolved = resolve(**arguments)
    assert resolved.speculative_num_draft_tokens == block
    assert resolved.speculative_dflash_block_size == arguments.get("speculative_dflash_block_size")


def test_block_size_of_the_draft_config_wins_over_the_default(resolve, models, tmp_path):
    """The config's top-level and nested value; a config without any gives 16 and a warning."""
    for place, want in (("block_size", 5), ("dflash_config", 5), (None, 16)):
        config = json.loads((models.draft / "config.json").read_text())
        config.pop("block_size")
        config["dflash_config"].pop("block_size")
        if place == "block_size":
            config["block_size"] = 5
        elif place:
            config[place]["block_size"] = 5
        draft = tmp_path / str(place)
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps(config))
        assert resolve(speculative_draft_model_path=str(draft)).speculative_num_draft_tokens == want


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
