"""The backend of a server that names none, its page size, aiter's takeover, and the draft's pool."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from unittest import mock

import pytest
from sglang.srt.layers.attention import attention_registry

from sglang_dflash_rocm import gate
from sglang_dflash_rocm.kernels.paged_attention.toolchain import UnsupportedFlyDSL
from sglang_dflash_rocm.srt.arg_groups import attention_hook
from sglang_dflash_rocm.srt.layers.attention import flydsl_registry
from sglang_dflash_rocm.srt.mem_cache.kv_cache_configurator import draft_pool_in_nhd


@pytest.fixture
def choose(monkeypatch):
    """choose_backend on resolved flags, as if on a gfx942 GPU (HARDWARE WE DO NOT HAVE). Gives what it declares."""
    from sglang.srt.arg_groups import overrides

    def run(gfx942=True, architecture="MiMoV2ForCausalLM", fault=None, **flags):
        declared = {}
        view = dict(attention_backend=None, prefill_attention_backend=None, decode_attention_backend=None)
        view = types.SimpleNamespace(**(view | dict(page_size=None, device="cuda") | flags))
        model = types.SimpleNamespace(hf_config=types.SimpleNamespace(architectures=[architecture]))
        monkeypatch.setattr(overrides, "resolved_view", lambda _: view)
        monkeypatch.setattr(overrides, "model_config_of", lambda _: model)
        monkeypatch.setattr(overrides, "declare_resolution", lambda _args, _who, **fields: declared.update(fields))
        monkeypatch.setattr(gate, "gfx942_present", lambda: gfx942)
        check = mock.Mock(side_effect=UnsupportedFlyDSL(fault) if fault else None)
        monkeypatch.setattr(attention_hook, "check_flydsl", check)
        attention_hook.choose_backend(object())
        return declared

    return run


def test_mimo_on_gfx942_gets_ours_and_one_line_says_so(choose, caplog):
    caplog.set_level("INFO")
    assert choose() == {"attention_backend": "flydsl", "page_size": 64}
    (line,) = [r.message for r in caplog.records if "attention backend flydsl" in r.message]
    assert "--attention-backend chooses another one" in line and "not on a GPU so far" in line


@pytest.mark.parametrize(
    "change",
    [
        dict(gfx942=False),
        dict(architecture="Qwen3ForCausalLM"),
        dict(attention_backend="triton"),
        dict(decode_attention_backend="triton"),
        dict(device="cpu"),
    ],
)
def test_nobody_else_is_touched(choose, change):
    assert choose(**change) == {}


def test_without_flydsl_mimo_gets_triton(choose, caplog):
    caplog.set_level("INFO")
    assert choose(fault="FlyDSL is missing") == {"attention_backend": "triton"}
    assert "flydsl is out: FlyDSL is missing" in caplog.text


def test_asked_for_without_flydsl_stops_the_start(choose, capsys):
    with pytest.raises(SystemExit):
        choose(attention_backend="flydsl", fault="FlyDSL is missing")
    assert "--attention-backend flydsl: FlyDSL is missing" in capsys.readouterr().err


def test_page_size(choose):
    assert choose(attention_backend="flydsl", page_size=16) == {}
    assert choose(decode_attention_backend="flydsl") == {"page_size": 64}
    assert choose(gfx942=False, attention_backend="flydsl", device="cpu") == {"page_size": 64}


def test_the_hook_reaches_sglangs_own_resolution(tmp_path):
    """Real server arguments in a real process: `--attention-backend flydsl` alone resolves to pages of 64 tokens."""
    from sglang_dflash_rocm.testing.tiny_models import build_tiny_models

    models = build_tiny_models(tmp_path)
    code = (
        "import sys\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "from sglang.srt.arg_groups.overrides import resolved_view\n"
        "args = prepare_server_args(sys.argv[1:])\n"
        "args.resolve_once()\n"
        "view = resolved_view(args)\n"
        "print('RESOLVED', view.attention_backend, view.page_size)\n"
    )
    flags = ["--model-path", str(models.target), "--trust-remote-code", "--device", "cpu"]
    flags += ["--attention-backend", "flydsl"]
    environment = {**os.environ, "SGLANG_PLATFORM": "dflash_cpu", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code, *flags], env=environment, capture_output=True, text=True)
    assert "RESOLVED flydsl 64" in run.stdout, run.stderr[-3000:]


def test_aiter_is_taken_over_only_when_asked(monkeypatch):
    from sglang.srt.arg_groups import choices

    theirs = attention_registry.ATTENTION_BACKENDS["aiter"]
    for value, taken in (("", False), ("flydsl", True)):
        monkeypatch.setenv("SGLANG_AITER_PA_DECODE_IMPL", value)
        table = {"aiter": theirs}
        monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", table)
        draft = list(choices.DRAFT_ATTENTION_BACKEND_CHOICES)
        monkeypatch.setattr(choices, "add_draft_attention_backend_choices", draft.extend)
        flydsl_registry.register()
        assert (table["aiter"] is table["flydsl"]) is taken and ("aiter" in draft) is taken


@pytest.mark.parametrize("is_draft, layout", [(True, "nhd"), (False, "vectorized_5d")])
def test_the_drafts_pool_stays_in_rows(monkeypatch, is_draft, layout):
    from sglang.srt.environ import envs

    monkeypatch.setenv("SGLANG_AITER_KV_CACHE_LAYOUT", "vectorized_5d")
    configurator = types.SimpleNamespace(is_draft_worker=is_draft)
    seen = draft_pool_in_nhd(lambda _self, **_: envs.SGLANG_AITER_KV_CACHE_LAYOUT.get(), configurator)
    assert seen == layout
