"""What is wrong with a checkpoint on disk, found without loading it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from launcher_checkpoint import DRAFT, SHARD_BYTES, SHARDS, Checkpoint, write_checkpoint
from typer.testing import CliRunner

from sglang_dflash_rocm import checkpoint as module
from sglang_dflash_rocm import doctor
from sglang_dflash_rocm.cli.main import app

INDEX = "model.safetensors.index.json"


@pytest.fixture
def files(tmp_path) -> Checkpoint:
    return write_checkpoint(tmp_path)


def problems(files: Checkpoint, tp: int = 8, groups: int = 2) -> list[str]:
    return module.problems(files.target, files.draft, tp, groups)


def only(files: Checkpoint, *texts: str, **deployment: int) -> None:
    (found,) = problems(files, **deployment)
    assert all(text in found for text in texts), found


def test_a_complete_checkpoint_has_no_problems(files):
    assert problems(files) == problems(files, tp=4, groups=1) == problems(files, tp=4, groups=2) == []


@pytest.mark.parametrize(("tp", "groups"), [(8, 1), (16, 2), (3, 1)])
def test_attention_tp_must_divide_what_the_qkv_is_interleaved_for(files, tp, groups):
    attention_tp = f"attention TP {tp // groups} (--tp {tp}, {groups} attention groups)"
    found = [line for line in problems(files, tp, groups) if "fused QKV" in line]
    assert len(found) == 1 and "interleaved for TP 4" in found[0] and attention_tp in found[0]


def test_the_fix_for_attention_tp_works(files):
    only(files, "use --tp 8 --dp 2 --enable-dp-attention --enable-dp-lm-head", tp=8, groups=1)
    only(files, "--tp 8 with 3 attention groups: must divide", tp=8, groups=3)


def test_split_projections_take_any_attention_tp(files):
    files.edit("config.json", attention_projection_layout="split")
    files.edit(INDEX, metadata={})
    assert problems(files, tp=8, groups=1) == []


def test_an_index_saved_for_another_tp_is_not_this_config(files):
    """Plain and interleaved rows have the same shapes: SGLang would load the wrong ones without a word."""
    files.edit(INDEX, metadata={"tp_size": 1})
    only(files, "saved for TP 1", "interleaved for 4")


def test_missing_and_empty_shards_are_named(files):
    (files.target / SHARDS[0]).unlink()
    (files.target / SHARDS[2]).write_bytes(b"")
    missing, empty = problems(files)
    assert f"1 of 3 shards missing: {SHARDS[0]}; download" in missing
    assert f"1 of 3 shards empty: {SHARDS[2]}; download" in empty


def test_a_cut_download_or_a_pointer_is_too_small(files):
    (files.target / SHARDS[1]).write_text("version https://git-lfs.github.com/spec/v1\n")
    only(files, f"the index promises {SHARD_BYTES * 3 - 1000}", "Git LFS")


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "holds a list"),
        ("config.json", None, "No such file"),
        (INDEX, "{}", "has no weight_map"),
        (INDEX, "nothing", "not JSON"),
        (INDEX, None, f"neither {INDEX} nor model.safetensors"),
        ("configuration_mimo_v2.py", None, "auto_map names it"),
        ("tokenizer_config.json", None, "tokenizer_config.json: missing"),
        ("tokenizer.json", None, "no tokenizer (tokenizer.json or tokenizer.model or vocab.json with merges.txt)"),
        ("dflash/config.json", None, "No such file"),
        ("dflash/model.safetensors", None, f"neither {INDEX} nor model.safetensors"),
        ("dflash/model.safetensors", "", "is empty"),
    ],
)
def test_files_that_are_missing_or_damaged(files, file, content, text):
    path = files.target / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    only(files, text)


def test_another_model_is_not_a_target(files):
    files.edit("config.json", architectures=["Qwen3ForCausalLM"])
    only(files, "['Qwen3ForCausalLM'], should be MiMoV2ForCausalLM")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "should be DFlashDraftModel"),
        ({"hidden_size": 6144}, "hidden_size=6144, the target's hidden_size is 4096"),
        ({"target_hidden_size": 6144}, "target_hidden_size=6144, the target's hidden_size is 4096"),
        ({"vocab_size": 151936}, "vocab_size=151936, the target's vocab_size is 152576"),
        ({"num_target_layers": 70}, "num_target_layers=70, the target's num_hidden_layers is 48"),
        ({"dflash_config": {"target_layer_ids": [0, 69]}}, "target_layer_ids [69] of a target with 48 layers"),
        ({"num_attention_heads": 30}, "30 attention heads do not divide by attention TP 4"),
    ],
)
def test_a_draft_of_another_target(files, change, text):
    (files.draft / "config.json").write_text(json.dumps(DRAFT | change))
    only(files, text)


def test_everything_is_said_at_once(files):
    (files.target / SHARDS[0]).unlink()
    (files.target / "tokenizer.json").unlink()
    (files.draft / "config.json").write_text(json.dumps(DRAFT | {"hidden_size": 1, "vocab_size": 2}))
    assert len(problems(files, tp=8, groups=1)) == 5


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ([], (1, 1)),
        (["--tp", "8", "--dp", "2", "--enable-dp-attention"], (8, 2)),
        (["--tp-size=8", "--attn-dp-size=2"], (8, 2)),
        (["--tensor-parallel-size", "4", "--data-parallel-size", "2"], (4, 1)),
    ],
)
def test_the_deployment_is_read_from_the_servers_flags(flags, want):
    assert module.deployment(flags) == want


def test_check_looks_at_the_checkpoint(files):
    (files.target / SHARDS[0]).unlink()
    command = ["check", "--no-live", "--json", "--model", str(files.target), "--draft-model", str(files.draft)]
    done = CliRunner().invoke(app, [*command, "--", "--tp", "8"])
    assert done.exit_code == 1
    missing, fused = sorted(json.loads(done.stdout)["problems"], key=lambda text: "fused QKV" in text)
    assert SHARDS[0] in missing and "fused QKV" in fused


def test_check_refuses_what_makes_no_sense(files):
    alone = CliRunner().invoke(app, ["check", "--draft-model", str(files.draft)], env={"COLUMNS": "200"})
    assert alone.exit_code == 2 and "give --model as well" in alone.output
    assert doctor._checkpoint_problems(files.target, None, ["--tp", "two"]) == [
        "--tp two: must be a whole number above 0"
    ]


def test_it_needs_neither_torch_nor_sglang(files):
    code = (
        "import sys; from pathlib import Path; from sglang_dflash_rocm import checkpoint\n"
        f"checkpoint.problems(Path({str(files.target)!r}), Path({str(files.draft)!r}), 8, 2)\n"
        "assert not {'torch', 'sglang', 'numpy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
