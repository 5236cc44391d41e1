"""``dflash-rocm plan`` as a command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sglang_dflash_rocm.cli.main import app
from sglang_dflash_rocm.testing.tiny_config import tiny_config

PATTERN = [0 if layer == 0 or layer % 6 == 5 else 1 for layer in range(48)]
FLASH = {
    "hybrid_layer_pattern": PATTERN,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "vocab_size": 152576,
    "max_position_embeddings": 262144,
    "attention_projection_layout": "fused_qkv",
}


@pytest.fixture
def config(tmp_path):
    """The directory of a target; ``config.json`` is in it."""
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    return tmp_path


def _plan(config, *flags: str):
    return CliRunner().invoke(app, ["plan", "--model-config", str(config), *flags], env={"COLUMNS": "200"})


def _json(config, *flags: str) -> dict:
    result = _plan(config, "--json", *flags)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_numbers_of_mimo_v2_flash(config):
    plan = _json(config, "--weights-gb", "45", "--swa-full-tokens-ratio", "0.1")
    parts = {part["name"]: part["bytes"] for part in plan["parts"]}
    assert parts["weights"] == 45 << 30 and parts["full embedding copy"] == 152576 * 4096 * 2
    static = sum(part["bytes"] for part in plan["parts"] if part["memory"] == "static")
    assert static == pytest.approx(0.85 * 192 * 2**30, rel=1e-5)
    room = 0.85 * 192 * 2**30 - (45 << 30) - 152576 * 4096 * 2
    assert plan["full_tokens"] == int(room // (5760 + 0.1 * 49920 + 5120))
    assert plan["swa_tokens"] == int(0.1 * plan["full_tokens"])
    assert parts["draft KV"] == (plan["full_tokens"] + 1) * 5120
    assert plan["requests_per_group"] == 24
    flags = " ".join(plan["flags"])
    for text in (
        "--tp 8 --dp 2 --enable-dp-attention --enable-dp-lm-head",
        "--speculative-algorithm DFLASH",
        "--mem-fraction-static 0.85 --swa-full-tokens-ratio 0.1 --max-running-requests 48 --context-length 262144",
        "--kv-cache-dtype bf16",
    ):
        assert text in flags


def test_the_table_for_people(config):
    result = _plan(config / "config.json", "--weights-gb", "45", "--kv-cache-dtype", "fp8")
    assert result.exit_code == 0, result.output
    for text in (
        "draft KV",
        "1.16 GiB",
        "tokens per attention group: full pool",
        "draft: the released one's shape",
        "largest part: target KV, SWA layers; it gets smaller with --swa-full-tokens-ratio",
        "--kv-cache-dtype fp8_e4m3",
    ):
        assert text in result.output


def test_a_draft_config_is_used_and_weights_are_asked_for(config, tmp_path):
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps({**tiny_config().draft_json(), "num_attention_heads": 64}))
    plan = _json(config, "--draft-config", str(draft), "--draft-window-size", "64")
    parts = {part["name"]: part["bytes"] for part in plan["parts"]}
    assert parts["draft KV"] == (plan["full_tokens"] + 1) * 2 * 1 * 64 * 2
    assert parts["draft request table"] == parts["request table"] > 0
    assert not any("released" in note for note in plan["notes"])
    assert any("--weights-gb" in note for note in plan["notes"])
    assert "--speculative-draft-window-size 64" in " ".join(plan["flags"])


@pytest.mark.parametrize(
    ("flags", "code", "texts"),
    [
        (["--dp", "1"], 2, ["attention TP = tp/dp = 8 must divide the checkpoint's TP, 4", "use --dp 2 or 4 or 8"]),
        (["--dp", "3"], 2, ["--tp 8 --dp 3", "use --dp 2 or 4 or 8"]),
        (["--tp", "16"], 2, ["--tp 16", "at most --gpus 8"]),
        (["--kv-cache-dtype", "fp4"], 2, ["--kv-cache-dtype fp4", "one of bf16, fp8"]),
        (["--mem-fraction-static", "1.5"], 2, ["--mem-fraction-static 1.5", "between 0 and 1"]),
        (["--swa-full-tokens-ratio", "2"], 2, ["--swa-full-tokens-ratio 2.0", "at most 1"]),
        (["--max-running-requests", "0"], 2, ["--max-running-requests 0", "above 0"]),
        (["--draft-window-size", "4"], 2, ["--draft-window-size 4", "at least the block, 8"]),
        (["--draft-config", "nowhere"], 2, ["--draft-config nowhere", "config.json"]),
        (["--weights-gb", "170"], 1, ["weights 170.00 GiB", "embedding copy 1.16 GiB", "above 0.891"]),
        (
            ["--gpu-memory", "2", "--swa-full-tokens-ratio", "0.001"],
            1,
            ["SWA pool of", "raise --swa-full-tokens-ratio"],
        ),
        (["--max-running-requests", "100000"], 1, ["need 48.9", "largest part: request table", "--context-length"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(config, flags, code, texts):
    result = _plan(config, *flags)
    assert result.exit_code == code, result.output
    for text in texts:
        assert text in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{}", "hybrid_layer_pattern is missing"), ("[]", "must hold a JSON object, holds a list"), ("{", "not JSON")],
)
def test_a_wrong_file_is_named(tmp_path, text, expected):
    file = tmp_path / "other.json"
    file.write_text(text)
    result = _plan(file)
    assert result.exit_code == 2 and expected in result.output


def test_notes_for_what_fits_badly(config):
    plan = _json(config, "--weights-gb", "160", "--context-length", "1000000")
    assert any("--context-length 1000000 does not fit" in note for note in plan["notes"])


def test_neither_torch_nor_sglang_is_needed(config):
    code = (
        "import sys\n"
        "for name in ('torch', 'sglang', 'numpy', 'transformers'): sys.modules[name] = None\n"
        "from sglang_dflash_rocm.cli.main import app\n"
        f"app(['plan', '--model-config', {str(config)!r}, '--json'])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["full_tokens"] > 0
