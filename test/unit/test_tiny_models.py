"""The generator of the tiny models: same bytes every time, whole or not at all, and the layouts it promises."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file  # noqa: E402

from sglang_dflash_rocm.testing import tiny_models  # noqa: E402
from sglang_dflash_rocm.testing.tiny_config import VARIANTS, tiny_config  # noqa: E402
from sglang_dflash_rocm.testing.tiny_models import build_tiny_models, tiny_prompts  # noqa: E402
from sglang_dflash_rocm.testing.tiny_target import copy_directions, interleave_qkv, split_qkv  # noqa: E402
from sglang_dflash_rocm.testing.tiny_tokenizer import words  # noqa: E402


def digest(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def leftovers(out: Path) -> list[str]:
    return [path.name for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_builds_have_the_same_bytes(tmp_path, variant):
    first = build_tiny_models(tmp_path / "a", variant)
    second = build_tiny_models(tmp_path / "b", variant)
    assert digest(first.root) == digest(second.root)
    expected = {"config.json", "configuration_mimo_v2.py", "model.safetensors", "tokenizer.json"}
    assert expected <= {path.name for path in first.target.iterdir()}


def test_a_second_call_does_nothing(tmp_path, monkeypatch):
    first = build_tiny_models(tmp_path)
    monkeypatch.setattr(tiny_models, "_write", lambda *_: pytest.fail("built again"))
    assert build_tiny_models(tmp_path) == first


@pytest.mark.parametrize("change", ["override", "generator"])
def test_a_changed_configuration_rebuilds(tmp_path, monkeypatch, change):
    before = digest(build_tiny_models(tmp_path).root)
    if change == "override":
        after = digest(build_tiny_models(tmp_path, sliding_window=16).root)
        assert after["target/config.json"] != before["target/config.json"]
    else:
        monkeypatch.setattr("sglang_dflash_rocm.testing.tiny_config.GENERATOR_VERSION", -1)
        after = digest(build_tiny_models(tmp_path).root)
        assert after["target/model.safetensors"] == before["target/model.safetensors"]
    assert after["tiny.json"] != before["tiny.json"]
    assert leftovers(tmp_path) == []


def test_an_interrupted_build_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tiny_models, "save_tokenizer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_tiny_models(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert (build_tiny_models(tmp_path).target / "tokenizer.json").exists()


def test_an_interrupted_rebuild_keeps_the_old_pair(tmp_path, monkeypatch):
    before = digest(build_tiny_models(tmp_path).root)
    with monkeypatch.context() as patch:
        patch.setattr(tiny_models, "save_tokenizer", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            build_tiny_models(tmp_path, seed=99)
    assert digest(tmp_path / "base") == before


def test_a_parallel_build_of_the_same_pair_may_win(tmp_path, monkeypatch):
    write = tiny_models._write

    def slow(directory, config):
        write(directory, config)
        if not (tmp_path / "base").exists():
            monkeypatch.setattr(tiny_models, "_write", write)
            build_tiny_models(tmp_path)

    monkeypatch.setattr(tiny_models, "_write", slow)
    models = build_tiny_models(tmp_path)
    assert (models.draft / "model.safetensors").exists()
    assert leftovers(tmp_path) == []


def test_a_foreign_directory_is_left_alone(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "precious").write_text("x")
    with pytest.raises(FileExistsError, match="not built here"):
        build_tiny_models(tmp_path)
    assert (tmp_path / "base" / "precious").read_text() == "x"


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="'huge' is not one of base, fused, wide"):
        tiny_config("huge")
    with pytest.raises(ValueError, match="unknown field window; known: .*sliding_window"):
        tiny_config("base", window=3)
    with pytest.raises(ValueError, match="copy_period 7 must lie within sliding_window 4"):
        tiny_config("base", sliding_window=4)


def test_target_shape_is_mimo_v2():
    for variant in VARIANTS:
        config = tiny_config(variant).target_json()
        assert config["swa_num_key_value_heads"] == 2 * config["num_key_value_heads"]
        assert all(config[f"{side}num_attention_heads"] % 4 == 0 for side in ("", "swa_"))
        assert config["moe_layer_freq"][0] == 0 and all(config["moe_layer_freq"][1:])
        assert set(config["hybrid_layer_pattern"]) == {0, 1}
        assert config["eos_token_id"] is None
    wide = tiny_config("wide").target_json()
    assert (wide["head_dim"], wide["v_head_dim"], wide["partial_rotary_factor"]) == (192, 128, 0.334)


def test_draft_options_reach_its_config():
    config = tiny_config("base", draft_sliding_window=12, draft_is_causal=False, block_size=4).draft_json()
    assert config["sliding_window"] == 12
    assert config["is_causal"] is False
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert "is_causal" not in tiny_config("base").draft_json()


def test_fused_rows_go_shard_by_shard():
    q, k, v = (torch.tensor(rows)[:, None] for rows in ([0, 1, 2, 3], [10, 11], [20, 21]))
    fused = interleave_qkv(q, k, v, shards=2)
    assert fused.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert fused.flatten().tolist() != torch.cat([q, k, v]).flatten().tolist()
    assert all(torch.equal(a, b) for a, b in zip(split_qkv(fused, (4, 2, 2), 2), (q, k, v), strict=True))


def test_fused_checkpoint_differs_from_plain_rows_and_holds_the_same_weights(tmp_path):
    base = load_file(build_tiny_models(tmp_path, "base").target / "model.safetensors")
    models = build_tiny_models(tmp_path, "fused")
    fused = load_file(models.target / "model.safetensors")
    assert json.loads((models.target / "config.json").read_text())["attention_projection_layout"] == "fused_qkv"
    for layer in range(models.config.num_hidden_layers):
        prefix = f"model.layers.{layer}.self_attn."
        parts = [base.pop(f"{prefix}{name}_proj.weight") for name in "qkv"]
        rows = fused.pop(prefix + "qkv_proj.weight")
        plain = torch.cat(parts)
        assert rows.shape == plain.shape and not torch.equal(rows, plain)
        # Rank 1 of attention TP 2 gets the second half: its own query, key and value heads.
        assert torch.equal(rows.chunk(2)[1], torch.cat([part.chunk(2)[1] for part in parts]))
    assert base.keys() == fused.keys()
    assert all(torch.equal(base[name], fused[name]) for name in base)


def test_copy_directions_peak_at_their_distance():
    from sglang_dflash_rocm.testing.reference import rotate

    query, key = copy_directions(24, 16, 5, 2, 10_000.0)
    positions = torch.arange(40)
    q, k = (rotate(x.expand(40, 1, 24), positions, 10_000.0, 16)[:, 0] for x in (query, key))
    assert (q @ k.T)[20, :21].argmax() == 15


def test_prompts_are_stable_and_ragged():
    prompts = tiny_prompts(16)
    assert prompts[:4] == tiny_prompts(4)
    assert prompts != tiny_prompts(16, seed=8)
    assert len({len(prompt) for prompt in prompts}) > 8
    assert all(3 <= len(prompt) <= 40 and all(5 <= token < 500 for token in prompt) for prompt in prompts)


def test_command_line_prints_what_it_built(tmp_path, capsys):
    tiny_models.main([str(tmp_path), "--variant", "fused"])
    out = capsys.readouterr().out
    assert str(tmp_path / "fused" / "target") in out and "MB" in out


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    target = build_tiny_models(tmp_path_factory.mktemp("tokenizer")).target
    return transformers.AutoTokenizer.from_pretrained(target, trust_remote_code=True)


def test_tokenizer_round_trip(tokenizer):
    ids = [0, 1, 5, 511, 5, 0, 300]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == words(ids) == "w0 w1 w5 w511 w5 w0 w300"
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.eos_token_id is None and len(tokenizer) == 512


def test_streamed_pieces_join_to_the_whole(tokenizer):
    ids = [9, 8, 7, 6]
    pieces = [tokenizer.decode(ids[: n + 1])[len(tokenizer.decode(ids[:n])) :] for n in range(len(ids))]
    assert "".join(pieces) == words(ids)


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "w50"},
        {"role": "user", "content": "w60 w61"},
        {"role": "assistant", "content": "w70"},
    ]
    plain = tokenizer.apply_chat_template(messages, tokenize=False)
    assert plain.split() == "w1 w50 w4 w2 w60 w61 w4 w3 w70 w4".split()
    asked = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True)["input_ids"]
    assert asked == [1, 50, 4, 2, 60, 61, 4, 3]


def test_configuration_class_keeps_what_sglang_reads(tmp_path):
    transformers = pytest.importorskip("transformers")
    models = build_tiny_models(tmp_path)
    config = transformers.AutoConfig.from_pretrained(models.target, trust_remote_code=True)
    written = models.config.target_json()
    names = "rope_theta swa_rope_theta partial_rotary_factor sliding_window_size hybrid_layer_pattern".split()
    assert {name: getattr(config, name) for name in names} == {name: written[name] for name in names}
