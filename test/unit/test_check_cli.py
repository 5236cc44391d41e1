"""``dflash-rocm check`` and ``fingerprints`` as commands, on the installed release and on changed copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from doctored import doctored_copy

from sglang_dflash_rocm import doctor, patches_doc
from sglang_dflash_rocm.hook_table import HOOKS

MEMCPY = "sglang.srt.layers.dp_attention.memcpy"


def _run(*args: str, **env: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_PLATFORM": "", "COLUMNS": "200", **env}
    command = [sys.executable, "-m", "sglang_dflash_rocm.cli.main", *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_check_on_the_installed_release_with_the_hooks_live():
    run = _run("check", "--json", SGLANG_PLATFORM="dflash_cpu")
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert report["ok"] and report["versions"]["sglang"] == "0.5.23"
    states = {row["target"]: (row["static"], row["live"]) for row in report["hooks"]}
    assert len(states) == len(HOOKS)
    assert states[MEMCPY] == ("ok", "applied")
    assert {feature["feature"]: feature["state"] for feature in report["features"]} == {"CPU platform": "active"}


@pytest.mark.parametrize(
    ("pattern", "replacement", "state"),
    [
        (r"def memcpy\(", "def memcpy_rows(", "missing"),
        (r"    memcpy_func\(dst, src", "    memcpy_func(src, dst", "changed"),
    ],
)
def test_check_on_a_doctored_copy_exits_1_and_names_the_hook(tmp_path, pattern, replacement, state):
    doctored_copy(tmp_path, "srt/layers/dp_attention.py", pattern, replacement)
    run = _run("check", "--json", PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    report = json.loads(run.stdout)
    assert any(MEMCPY in problem for problem in report["problems"])
    assert {row["target"]: row["static"] for row in report["hooks"]}[MEMCPY] == state
    table = _run("check", PYTHONPATH=str(tmp_path))
    assert table.returncode == 1 and "PROBLEM" in table.stdout and MEMCPY in table.stdout


def test_check_says_what_the_given_server_flags_would_get():
    run = _run("check", "--no-live", "--json", "--", "--tp", "8", "--attention-backend=flydsl")
    assert run.returncode == 1
    (feature,) = json.loads(run.stdout)["features"]
    assert feature["state"] == "refused" and feature["by"] == "--attention-backend flydsl"


@pytest.mark.slow
def test_check_says_when_the_plugin_will_not_be_loaded():
    report = doctor.examine({"SGLANG_PLUGINS": "a,b"}, [], live=False)
    assert any("SGLANG_PLUGINS=a,b leaves out dflash_rocm" in note for note in report.notes)
    report = doctor.examine({"SGLANG_PLATFORM": "npu_x"}, [], live=False)
    assert any("SGLANG_PLATFORM=npu_x: SGLang skips" in note for note in report.notes)
    report = doctor.examine({"SGLANG_PLATFORM": "dflash_cpu", "SGLANG_DFLASH_ROCM": "0"}, [], live=False)
    assert any("the plugin is switched off" in problem for problem in report.problems)
    report = doctor.examine({"SGLANG_DFLASH_ROCM": "perhaps"}, [], live=False)
    assert any("SGLANG_DFLASH_ROCM='perhaps'" in problem for problem in report.problems)


@pytest.mark.slow
def test_a_loader_that_fails_is_a_problem_not_a_pass():
    report = doctor.examine({"SGLANG_PLATFORM": "dflash_cpu", "PYTHONSTARTUP": "", "PYTHONPATH": "", "HOME": "/"}, [])
    assert report.ok, report.problems
    broken = doctor.examine({"SGLANG_PLATFORM": "dflash_cpu", "PYTHONHOME": "/nonexistent"}, [])
    assert any("plugin loader failed" in problem for problem in broken.problems)
    assert {row["live"] for row in broken.hooks} == {"not run"}


def test_fingerprints_prints_what_changed(tmp_path):
    same = _run("fingerprints")
    assert same.returncode == 0 and "0 changes" in same.stdout
    copy = doctored_copy(tmp_path, "srt/layers/dp_attention.py", r"sz, offset_src\):\n    memcpy_func",
                         "sz, offset_src, stream):\n    memcpy_func")  # fmt: skip
    changed = _run("fingerprints", "--root", str(copy))
    assert changed.returncode == 1
    assert f"params   {MEMCPY}" in changed.stdout and "1 changes" in changed.stdout
    nowhere = _run("fingerprints", "--root", str(tmp_path / "nothing"))
    assert nowhere.returncode == 2 and "--root" in nowhere.stdout


def test_the_patches_page_is_in_step_with_the_table():
    page = patches_doc.page_path()
    assert page is not None and page.read_text() == patches_doc.render(), "run `dflash-rocm fingerprints --write`"
