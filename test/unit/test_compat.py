"""The contract against the installed release and against copies of it that were changed on purpose."""

from __future__ import annotations

import json

import pytest
from doctored import doctored_copy

from sglang_dflash_rocm import compat
from sglang_dflash_rocm.hook_table import HOOKS, Hook

ALL = {hook.group for hook in HOOKS}
MEMCPY = "sglang.srt.layers.dp_attention.memcpy"
KWARGS = "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs"
DFLASH_UTILS = "srt/speculative/dflash_utils.py"
TREE = "sglang.srt.speculative.dflash_utils.tree_speculative_sampling_target_only"
DP_ATTENTION = "srt/layers/dp_attention.py"
MODEL_RUNNER = "srt/model_executor/model_runner.py"


def test_the_installed_release_fits():
    assert compat.problems(ALL) == []


def test_every_stored_fingerprint_belongs_to_a_hook_and_the_other_way_round():
    stored = compat.load_fingerprints()
    assert set(stored) == {"0.5.23"}
    assert set(stored["0.5.23"]) == {hook.target for hook in HOOKS}
    assert len({hook.target for hook in HOOKS}) == len(HOOKS), "a target stands twice in the table"


def test_an_unchanged_copy_fits(tmp_path):
    assert compat.problems(ALL, doctored_copy(tmp_path, None)) == []


@pytest.mark.parametrize(
    ("relative", "pattern", "replacement", "target", "expected", "found"),
    [
        (DP_ATTENTION, r"def memcpy\(", "def memcpy_rows(", MEMCPY, "parameters (dst, src,", "no memcpy in sglang.srt"),
        (DP_ATTENTION, r"sz, offset_src\):\n    memcpy_func", "sz, offset_src, stream):\n    memcpy_func", MEMCPY,
         "parameters (dst, src, dim, offset, sz, offset_src)", "offset_src, stream)"),
        (DP_ATTENTION, r"    memcpy_func\(dst, src", "    print(dim)\n    memcpy_func(dst, src", MEMCPY,
         "the body with hash", "a body with hash"),
        (DP_ATTENTION, "", "", MEMCPY, "parameters (dst, src,", "no module sglang.srt.layers.dp_attention"),
        (MODEL_RUNNER, "def _extend_forward_kwargs", "def _extend_kwargs", KWARGS, "parameters (self, forward_batch",
         "no _extend_forward_kwargs in sglang.srt.model_executor.model_runner.ModelRunner"),
        (MODEL_RUNNER, "class ModelRunner", "class Runner", KWARGS, "parameters (self", "no ModelRunner in sglang"),
        (DFLASH_UTILS, r"    tree_speculative_sampling_target_only,\n\)", "    other,\n)", TREE, "a definition",
         "no tree_speculative_sampling_target_only in sglang.srt.speculative.dflash_utils"),
    ],
    ids=["function-renamed", "parameter-added", "body-changed", "module-missing", "method-renamed", "class-renamed",
         "import-dropped"],
)  # fmt: skip
def test_a_changed_target_is_refused_in_plain_words(tmp_path, relative, pattern, replacement, target, expected, found):
    problems = compat.problems(ALL, doctored_copy(tmp_path, relative, pattern, replacement))
    problem = next(problem for problem in problems if problem.target == target)
    assert expected in problem.expected and found in problem.found
    sentence = str(problem)
    for part in (target, problem.expected, problem.found, "0.5.23", str(compat.SUPPORTED), "SGLANG_DFLASH_ROCM=0"):
        assert part in sentence


def test_hooks_that_only_look_do_not_mind_another_body(tmp_path):
    """An AFTER hook relies on name and parameters; the same change under an AROUND hook is refused (above)."""
    copy = doctored_copy(tmp_path, MODEL_RUNNER, r"\.input_embeds\.bfloat16\(\)", ".input_embeds.half()")
    assert compat.problems(ALL, copy) == []


def test_comments_docstrings_and_layout_do_not_count(tmp_path):
    edit = '    """Copy rows."""\n    # rows\n    memcpy_func(\n        dst, src,'
    copy = doctored_copy(tmp_path, DP_ATTENTION, r"    memcpy_func\(dst, src,", edit)
    assert compat.problems(ALL, copy) == []


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.5.23.post1", True), ("0.5.23+rocm720", True), ("0.5.22", False), ("0.5.24", False), ("0.5.24.dev3", False),
     ("0.6.0", False), ("garbage", False)],
)  # fmt: skip
def test_supported_releases(tmp_path, version, fits):
    copy = doctored_copy(tmp_path, "_version.py", r"version = '[^']+'", f"version = '{version}'")
    problems = compat.problems(ALL, copy)
    assert (problems == []) is fits
    if not fits:
        assert f"release {version}" in str(problems[0]) and "pip install" in str(problems[0])


def test_no_sglang_at_all(monkeypatch):
    monkeypatch.setattr(compat, "sglang_root", lambda: None)
    (problem,) = compat.problems(ALL)
    assert "no package of that name" in str(problem)


def test_a_hook_without_a_stored_fingerprint_is_refused():
    hook = Hook("sglang.srt.layers.dp_attention.get_dp_local_info", "around", "new", "m:f", "", "", "")
    (problem,) = compat.problems({"new"}, hooks=[hook])
    assert "fingerprints --write" in problem.remedy


def test_definitions_are_found_wherever_python_would(tmp_path):
    """Last definition wins, also under ``if`` and ``try``; packages, constants, methods of nested classes."""
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "srt" / "__init__.py").write_text("def in_package(a, *, b=1): ...\n")
    (package / "srt" / "m.py").write_text(
        "FLAG = True\ntry:\n    import x\nexcept ImportError:\n    def f(a): ...\nelse:\n    def f(a, b): ...\n"
        "class C:\n    class D:\n        async def g(self, n: int) -> str: ...\n"
    )
    params = {
        "sglang.srt.in_package": "(a, *, b=1)",
        "sglang.srt.m.f": "(a, b)",
        "sglang.srt.m.C.D.g": "(self, n: int)",
        "sglang.srt.m.FLAG": "= ...",
    }
    assert {target: compat.fingerprint(target, package).params for target in params} == params
    assert compat.fingerprint("sglang.srt.m.C.h", package) == "no h in sglang.srt.m.C"
    assert compat.fingerprint("sglang.srt.gone.f", package) == "no gone in sglang.srt"


def test_changes_are_listed_and_stored(tmp_path, monkeypatch):
    store = tmp_path / "fingerprints.json"
    store.write_text(compat._STORE.read_text())
    monkeypatch.setattr(compat, "_STORE", store)
    copy = doctored_copy(
        tmp_path, DP_ATTENTION, r"    memcpy_func\(dst, src", "    print(dim)\n    memcpy_func(dst, src"
    )
    release, now, lines = compat.changed_fingerprints(copy)
    assert (release, lines) == ("0.5.23", [f"body     {MEMCPY}"])
    compat.store_fingerprints(release, now)
    assert compat.changed_fingerprints(copy)[2] == []
    assert set(json.loads(store.read_text())) == {"0.5.23"}
    assert compat.problems(ALL, copy) == []


def test_a_vanished_target_cannot_be_stored(tmp_path):
    copy = doctored_copy(tmp_path, DP_ATTENTION, r"def memcpy\(", "def memcpy_rows(")
    with pytest.raises(LookupError, match="no memcpy in sglang.srt.layers.dp_attention"):
        compat.changed_fingerprints(copy)
