"""Files below test/registered pass what SGLang's CI asks of them, and name suites that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.test.ci.ci_register import HWBackend, collect_tests, ut_parse_one_file

REGISTERED = Path(__file__).parents[1] / "registered"
FILES = sorted(str(path) for path in REGISTERED.rglob("test_*.py"))

#: Per-commit and nightly suites of SGLang's run_suite.py, which is not in the wheel. Upstream does not validate the AMD
#: names: a file with a misspelt suite is collected and never runs.
_AMD_STAGES = (
    "stage-a-test-1-gpu-small-amd",
    "stage-b-test-1-gpu-small-amd",
    "stage-b-test-1-gpu-small-amd-nondeterministic",
    "stage-b-test-1-gpu-small-amd-mi35x",
    "stage-b-test-1-gpu-large-amd",
    "stage-b-test-2-gpu-large-amd",
    "stage-c-test-4-gpu-amd",
    "stage-c-test-large-8-gpu-amd",
    "jit-kernel-unit-test-amd",
    "nightly-amd",
    "nightly-amd-1-gpu",
    "nightly-amd-4-gpu",
    "nightly-amd-8-gpu",
)
SUITES = {HWBackend.AMD: set(_AMD_STAGES), HWBackend.CPU: {f"base-{stage}-test-cpu" for stage in "abc"}}


def check_registered(files: list[str]) -> None:
    """SGLang collects every file, and every suite is known.

    Raises:
        ValueError: from SGLang, a file without registration or without an entry that runs it.
        AssertionError: a suite or backend that does not exist, or a time that is no time.
    """
    assert files, f"no tests below {REGISTERED}"
    for entry in collect_tests(files):
        assert entry.backend in SUITES, f"{entry.filename}: registered for {entry.backend}"
        known = SUITES[entry.backend]
        assert entry.effective_suite in known, f"{entry.filename}: no suite {entry.effective_suite!r}"
        most = 7200 if entry.nightly else 600
        assert 0 < entry.est_time < most, f"{entry.filename}: est_time {entry.est_time}"


def test_every_file_is_collected_by_sglangs_ci():
    check_registered(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: Path(path).stem)
def test_each_file_runs_on_cpu_and_amd(path):
    registries, runs = ut_parse_one_file(path)
    assert runs and HWBackend.AMD in {entry.backend for entry in registries}
    text = Path(path).read_text()
    assert len(text.splitlines()) < 400
    assert 'sys.exit(pytest.main([__file__, "-v"]))' in text


def test_names_are_unique_and_helpers_live_elsewhere():
    """Test folders are no packages, so pytest needs unique module names; SGLang's runner takes every other file for a
    test."""
    names = [Path(path).name for path in FILES]
    assert len(names) == len(set(names))
    assert {path.name for path in REGISTERED.rglob("*.py")} - set(names) <= {"conftest.py"}


_GOOD = """
from sglang.test.ci.ci_register import register_amd_ci
register_amd_ci(est_time=5, suite="stage-a-test-1-gpu-small-amd")
if __name__ == "__main__":
    print("runs")
"""


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("", "", None),
        ("stage-a-test-1-gpu-small-amd", "stage-a-test-1-gpu-smal-amd", "no suite"),
        ("register_amd_ci(est_time=5", "register_cpu_ci(est_time=5", "no suite"),
        ("est_time=5", "est_time=0", "est_time"),
        ("est_time=5", "est_time=700", "est_time"),
        ('    print("runs")', "    pass", "missing `if __name__"),
        ('register_amd_ci(est_time=5, suite="stage-a-test-1-gpu-small-amd")', "", "No CI registry"),
        ('suite="stage-a-test-1-gpu-small-amd"', "suite=SUITE", "SUITE|constant|literal|suite"),
    ],
)
def test_a_file_that_would_not_run_is_noticed(tmp_path, old, new, what):
    file = tmp_path / "test_file.py"
    file.write_text(_GOOD.replace(old, new) if old else _GOOD)
    if what is None:
        check_registered([str(file)])
        return
    with pytest.raises((ValueError, AssertionError), match=what):
        check_registered([str(file)])
