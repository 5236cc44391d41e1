"""When a broken contract stops the start, when it does not, and that every hook is looked up after it was applied."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
from doctored import doctored_copy

from sglang_dflash_rocm import environ, gate, plugin
from sglang_dflash_rocm.hook_table import Hook
from sglang_dflash_rocm.testing.tiny_models import build_tiny_models

DP_ATTENTION = "srt/layers/dp_attention.py"


@pytest.mark.parametrize(
    ("env", "argv", "features"),
    [
        ({}, ["--tp", "8"], []),
        ({"SGLANG_PLATFORM": "dflash_cpu"}, [], ["CPU platform"]),
        ({"SGLANG_PLATFORM": "another"}, [], []),
        ({}, ["--attention-backend", "flydsl"], ["FlyDSL attention"]),
        ({}, ["--attention-backend=flydsl"], ["FlyDSL attention"]),
        (
            {},
            ["--attention-backend", "triton", "--speculative-draft-attention-backend", "flydsl"],
            ["FlyDSL attention"],
        ),
        ({"SGLANG_AITER_PA_DECODE_IMPL": "flydsl"}, [], ["FlyDSL attention"]),
        ({}, ["--speculative-algorithm", "DFLASH"], ["DFLASH on gfx942", "DFLASH memory table"]),
        ({}, ["--speculative_algorithm=dflash"], ["DFLASH on gfx942", "DFLASH memory table"]),
        ({}, ["--speculative-algorithm", "EAGLE"], []),
        ({}, ["--attention-backend", "flydsl", "--attention-backend", "triton"], []),
        ({}, ["--attention-backend"], []),
    ],
)
def test_what_is_asked_for(env, argv, features):
    assert [request.feature for request in gate.requested(env, argv, gfx942=True)] == features


def test_dflash_elsewhere_is_nobodys_business():
    assert gate.requested({}, ["--speculative-algorithm", "DFLASH"], gfx942=False) == []


@pytest.mark.parametrize(
    ("env", "gfx942", "groups"),
    [
        ({}, True, {"dflash", "budget"}),
        ({"SGLANG_DFLASH_BUDGET_TABLE": "1"}, False, {"budget"}),
        ({"SGLANG_DFLASH_BUDGET_TABLE": "0"}, False, set()),
        ({"SGLANG_PLATFORM": "dflash_cpu"}, False, {"dflash", "budget", "cpu"}),
    ],
)
def test_which_hooks_dflash_asks_for(env, gfx942, groups):
    requests = gate.requested(env, ["--speculative-algorithm", "DFLASH"], gfx942)
    assert {request.group for request in requests} == groups
    assert "budget" not in {request.group for request in gate.requested(env, [], gfx942)}


def test_gfx942_is_recognised_from_sysfs(tmp_path):
    node = tmp_path / "1"
    node.mkdir()
    (node / "properties").write_text("cpu_cores_count 0\ngfx_target_version 90402\n")
    assert gate.gfx942_present(tmp_path)
    (node / "properties").write_text("cpu_cores_count 0\ngfx_target_version 90500\n")
    assert not gate.gfx942_present(tmp_path)
    assert not gate.gfx942_present(tmp_path / "nowhere")


def test_a_variable_names_itself_its_value_and_what_is_allowed():
    for text, value in (("0", False), ("off", False), ("1", True), ("Yes", True), ("", True)):
        assert environ.SGLANG_DFLASH_ROCM.get({"SGLANG_DFLASH_ROCM": text}) is value
    with pytest.raises(ValueError, match=r"SGLANG_DFLASH_ROCM='maybe': must be one of 1, true"):
        environ.SGLANG_DFLASH_ROCM.get({"SGLANG_DFLASH_ROCM": "maybe"})


def test_resolved_arguments_are_asked_too():
    """A config file or the Python engine: the flags are not in ``sys.argv``."""
    resolved = types.SimpleNamespace(attention_backend="flydsl", speculative_algorithm=None)
    (request,) = gate.requested_by(resolved, {}, gfx942=True)
    assert request.source == "--attention-backend flydsl" and request.warning and not request.refusal
    (request,) = gate.requested_by(resolved, {}, gfx942=False)
    with pytest.raises(SystemExit) as stopped:
        gate.refuse_and_warn([request])
    assert stopped.value.code == 3
    resolved = types.SimpleNamespace(attention_backend="aiter", speculative_algorithm="DFLASH")
    assert gate.requested_by(resolved, {}, gfx942=True)[0].warning


def test_what_only_a_config_file_says_reaches_the_workers(monkeypatch):
    """The launcher sees the resolved arguments, its workers see the launcher's environment and ``sys.argv``."""
    from sglang.srt.arg_groups import overrides

    monkeypatch.setattr(overrides, "resolved_view", lambda server_args: server_args)
    monkeypatch.setenv("SGLANG_PLATFORM", "dflash_cpu")
    monkeypatch.setenv(gate._LATE_GROUPS, "")
    monkeypatch.setattr(sys, "argv", ["launch_server", "--config", "server.yaml"])
    gate.check_resolved_server_args(None, types.SimpleNamespace(speculative_algorithm="DFLASH"))
    assert "dflash" in {request.group for request in gate.requested(os.environ, sys.argv)}
    monkeypatch.setattr(gate.compat, "problems", lambda groups: ["changed"] if "dflash" in groups else [])
    monkeypatch.setenv(gate._LATE_GROUPS, "")
    with pytest.raises(SystemExit):
        gate.check_resolved_server_args(None, types.SimpleNamespace(speculative_algorithm="DFLASH"))


# ---- the verification after SGLang applied the hooks, on functions of our own --------------------------------------


@pytest.fixture
def module(monkeypatch) -> Iterator[types.ModuleType]:
    """A stand-in for a module of SGLang with a function to hook; SGLang's own registry does the patching."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    made = types.ModuleType("sglang.srt.dflash_stand_in")
    exec("CONSTANT = 1\ndef target(x): return x\nclass C:\n    def method(self, x): return x", made.__dict__)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr("sglang.srt.dflash_stand_in", made, raising=False)
    monkeypatch.setattr(plugin, "installed", [])
    yield made
    HookRegistry.reset()


def double(result, *_args):
    return result * 2


TWO = 2


def _hook(name: str, kind: str = "after", impl: str = "double") -> Hook:
    return Hook(f"sglang.srt.dflash_stand_in.{name}", kind, "test", f"{__name__}:{impl}", "", "", "")


def _apply(hooks: list[Hook]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    plugin.install(hooks)
    HookRegistry.apply_hooks()


def test_applied_hooks_are_verified_and_the_wrapper_is_gone(module):
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = HookRegistry.__dict__["apply_hooks"]
    _apply([_hook("target"), _hook("C.method"), _hook("CONSTANT", "value", "TWO")])
    assert (module.target(3), module.C().method(4), module.CONSTANT) == (6, 8, 2)
    assert HookRegistry.__dict__["apply_hooks"] is before
    assert list(plugin.unapplied()) == []


def test_a_hook_that_somebody_wraps_is_still_found(module):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.dflash_stand_in.target", lambda f, x: f(x) + 1, HookType.AROUND)
    _apply([_hook("target")])
    assert module.target(3) == 8


def test_a_registration_that_got_lost_stops_the_process(module, monkeypatch, capsys):
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "register", classmethod(lambda cls, *a, **k: None))
    with pytest.raises(SystemExit):
        _apply([_hook("target")])
    assert "sglang.srt.dflash_stand_in.target: SGLang did not apply the hook" in capsys.readouterr().err


def test_a_hook_that_was_overwritten_stops_the_process(module, capsys):
    from sglang.srt.plugins.hook_registry import HookRegistry

    plugin.install([_hook("target")])
    verify = HookRegistry.__dict__["apply_hooks"]
    original = module.target
    HookRegistry.apply_hooks()
    module.target = original
    with pytest.raises(SystemExit):
        verify.__func__(HookRegistry)
    assert f"does not call {__name__}:double" in capsys.readouterr().err


def test_a_constant_that_was_set_back_is_noticed(module):
    _apply([_hook("CONSTANT", "value", "TWO")])
    module.CONSTANT = 1
    assert list(plugin.unapplied()) == ["sglang.srt.dflash_stand_in.CONSTANT: is 1, should be 2"]


@pytest.mark.parametrize(
    "keep",
    [
        lambda f: {"name": f},
        lambda f: [f],
        lambda f: functools.partial(f, 1),
        lambda f: _with_default(f),
    ],
    ids=["dict", "list", "partial", "default-argument"],
)
def test_a_stale_reference_stops_the_process(module, capsys, keep):
    """SGLang re-binds ``from x import f``, but not what is held inside other objects."""
    module.TABLE = keep(module.target)
    with pytest.raises(SystemExit):
        _apply([_hook("target")])
    assert "sglang.srt.dflash_stand_in.TABLE still holds the function" in capsys.readouterr().err


def _with_default(function):
    def held(x, function=function):
        return function(x)

    return held


# ---- the real launcher ---------------------------------------------------------------------------------------------


def _launch(path: str = "", *flags: str, **env: str) -> subprocess.CompletedProcess:
    """``python -m sglang.launch_server`` without a model: it stops at the gate, or at its own missing argument."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}
    command = [sys.executable, "-m", "sglang.launch_server", *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def _copy_with_changed_memcpy(tmp_path) -> str:
    doctored_copy(tmp_path, DP_ATTENTION, r"    memcpy_func\(dst, src", "    print(dim)\n    memcpy_func(dst, src")
    return str(tmp_path)


def test_asked_for_and_broken_stops_the_real_launcher(tmp_path):
    run = _launch(_copy_with_changed_memcpy(tmp_path), SGLANG_PLATFORM="dflash_cpu")
    assert run.returncode == 3, run.stderr[-2000:]
    for part in (
        "refuses to start",
        "asked for by SGLANG_PLATFORM=dflash_cpu",
        "dp_attention.memcpy",
        "body with hash",
    ):
        assert part in run.stderr
    assert "Traceback" not in run.stderr


def test_not_asked_for_is_silent_even_when_it_would_be_broken(tmp_path):
    run = _launch(_copy_with_changed_memcpy(tmp_path), SGLANG_PLATFORM="")
    assert run.returncode == 2 and "--model-path" in run.stderr
    assert "sglang-dflash-rocm" not in run.stderr + run.stdout


@pytest.mark.slow
def test_the_memory_table_stops_a_start_only_where_it_was_asked_for(tmp_path):
    doctored_copy(tmp_path, "srt/mem_cache/kv_cache_configurator.py", r"(sizes = self\._derive_pool)", r"int(); \1")
    flags = ("--speculative-algorithm", "DFLASH")
    asked = _launch(str(tmp_path), *flags, SGLANG_PLATFORM="", SGLANG_DFLASH_BUDGET_TABLE="1")
    assert asked.returncode == 3 and "KVCacheConfigurator.configure: expected the body" in asked.stderr
    silent = _launch(str(tmp_path), *flags, SGLANG_PLATFORM="")
    assert silent.returncode == 2 and "sglang-dflash-rocm" not in silent.stderr + silent.stdout


def test_where_flydsl_attention_can_be_had():
    flags = ["--attention-backend", "flydsl", "--speculative-algorithm", "DFLASH"]
    on_gpu = gate.requested({}, flags, gfx942=True)
    assert on_gpu[0].group == "flydsl" and "neither on a GPU so far" in on_gpu[0].warning
    assert not on_gpu[1].warning, "nobody is sent to another backend who chose this one"
    on_cpu = gate.requested({"SGLANG_PLATFORM": "dflash_cpu"}, flags, gfx942=False)
    assert not any(request.refusal for request in on_cpu) and "flydsl" in {request.group for request in on_cpu}
    assert gate.requested({}, flags[:2], gfx942=False)[0].refusal


def test_aiter_is_warned_about_unless_it_is_taken_over():
    flags = ["--attention-backend", "aiter", "--speculative-algorithm", "DFLASH"]
    assert "leave the flag out" in gate.requested({}, flags, gfx942=True)[0].warning
    assert not gate.requested({}, flags[2:], gfx942=True)[0].warning, "the default is ours"
    taken = gate.requested({"SGLANG_AITER_PA_DECODE_IMPL": "flydsl"}, flags, gfx942=True)
    assert taken[0].group == "flydsl" and not any("wrong" in request.warning for request in taken)
    assert gate.requested({"SGLANG_AITER_PA_DECODE_IMPL": "flydsl"}, flags, gfx942=False)[0].refusal
    with pytest.raises(ValueError, match="SGLANG_AITER_PA_DECODE_IMPL='gluon': must be one of aiter, flydsl"):
        gate.requested({"SGLANG_AITER_PA_DECODE_IMPL": "gluon"}, [], gfx942=True)


def test_a_takeover_without_aiter_stops_the_start(capsys):
    env = {"SGLANG_AITER_PA_DECODE_IMPL": "flydsl"}
    resolved = types.SimpleNamespace(attention_backend="triton", decode_attention_backend=None)
    with pytest.raises(SystemExit):
        gate.check_takeover(resolved, env)
    assert "this server's attention is triton; unset it, or use" in capsys.readouterr().err
    gate.check_takeover(resolved, {})
    for backend in ("aiter", "flydsl"):
        gate.check_takeover(types.SimpleNamespace(attention_backend="triton", decode_attention_backend=backend), env)


def test_what_this_version_does_not_have_is_refused_by_the_real_launcher():
    run = _launch("", "--model-path", "nowhere", "--attention-backend", "flydsl", SGLANG_PLATFORM="")
    assert run.returncode == 3
    assert "--attention-backend flydsl: there is no gfx942 GPU (MI300X) here; use another backend" in run.stderr


def test_the_python_engine_is_stopped_through_the_resolved_arguments(tmp_path):
    """No flag in ``sys.argv``: only the core hook on ``check_server_args`` can see this."""
    models = build_tiny_models(tmp_path)
    script = tmp_path / "engine.py"
    script.write_text(
        "import sglang\nif __name__ == '__main__':\n"
        f"    sglang.Engine(model_path={str(models.target)!r}, trust_remote_code=True, device='cpu', "
        "attention_backend='flydsl')\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_PLATFORM": ""}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 3, run.stderr[-2000:]
    assert "--attention-backend flydsl: there is no gfx942 GPU (MI300X) here; use another backend" in run.stderr


def test_an_unsupported_release_is_silent_without_a_request(tmp_path):
    doctored_copy(tmp_path, "_version.py", r"version = '[^']+'", "version = '0.5.99'")
    run = _launch(str(tmp_path), SGLANG_PLATFORM="")
    assert run.returncode == 2 and "sglang-dflash-rocm" not in run.stderr + run.stdout
    asked = _launch(str(tmp_path), SGLANG_PLATFORM="dflash_cpu")
    assert asked.returncode == 3 and "release 0.5.99" in asked.stderr and "pip install" in asked.stderr


@pytest.mark.parametrize("off", [{"SGLANG_DFLASH_ROCM": "0"}, {"SGLANG_PLUGINS": "another"}])
def test_the_kill_switch_and_sglangs_own_list_are_honoured(off):
    """With the plugin off, SGLang itself answers: it does not know the backend."""
    run = _launch("", "--model-path", "nowhere", "--attention-backend", "flydsl", SGLANG_PLATFORM="", **off)
    assert run.returncode not in (0, 3)
    assert "sglang-dflash-rocm refuses" not in run.stderr
