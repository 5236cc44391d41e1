"""``dflash-rocm demo`` as a person runs it, and that nothing of it is left however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from checks import wait_for

DEMO = [sys.executable, "-m", "sglang_dflash_rocm.cli.main", "demo"]


def _demo(*args: str) -> list[str]:
    return [*DEMO, "--tp", "2", "--dp", "2", "--prompts", "4", "--new-tokens", "24", *args]


def test_the_demo_compares_every_token_and_counts_per_rank(tmp_path):
    command = _demo("--json", "--workdir", str(tmp_path))
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    report = json.loads(run.stdout)
    assert report["ok"] and report["equal_prompts"] == 4 and len(report["rows"]) == 8
    assert all(row["equal"] and row["chunks"] > 1 and row["verify_steps"] for row in report["rows"])
    assert {rank: mean["mean_accept_length"] > 2 for rank, mean in report["ranks"].items()} == {"0": True, "1": True}
    assert "hooks active" in report["plugin"]
    assert _servers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_process_is_left_when_the_demo_is_stopped(tmp_path, number):
    shared = set(os.listdir("/dev/shm"))
    command = _demo("--workdir", str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        # Deep in the start. SGLang's processes die with their parent once they have renamed themselves; a launcher that
        # is killed before leaves a newborn child behind, which no harness can mend from outside.
        wait_for(lambda: _renamed_children(tmp_path) >= 2, 120, "scheduler and detokenizer start")
        process.send_signal(number)
        output = process.communicate(timeout=60)[0]
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    assert process.returncode == expected[number], output
    wait_for(lambda: _servers(tmp_path) == [], 60, "the server is gone")
    if number != signal.SIGKILL:  # killed, the demo cannot tidy up after SGLang
        assert set(os.listdir("/dev/shm")) <= shared
    if number == signal.SIGINT:
        assert "no process is left" in output


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--tp", "4", "--dp", "3"], ["--dp 3 must divide --tp 4", "--tp 4 --dp 2"]),
        (["--tp", "8", "--dp", "1"], ["groups of 8 ranks", "groups of 1, 2 or 4"]),
        (["--tp", "4", "--dp", "4", "--prompts", "2"], ["--prompts 2 must be at least --dp 4"]),
    ],
)
def test_wrong_sizes_are_refused_before_anything_starts(args, parts):
    start = time.monotonic()
    run = subprocess.run(
        [*DEMO, *args], capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "300"}
    )
    assert run.returncode == 2 and time.monotonic() - start < 20
    assert all(part in run.stderr for part in parts), run.stderr


@pytest.fixture(autouse=True)
def _other_peoples_orphans():
    """What somebody else left behind on this machine is not ours to find."""
    _before.clear()
    _before.update(_orphans())


_before: set[int] = set()


def _orphans() -> set[int]:
    """Processes of SGLang whose launcher is gone; they are renamed, which wipes command line and environment."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.ppid() == 1 and "sglang::" in process.name():
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def _servers(workdir) -> list[psutil.Process]:
    """Launchers that serve the models of this demo, and what is left of their sessions."""
    found = []
    orphans = _orphans() - _before
    for process in psutil.process_iter():
        try:
            if str(workdir) in " ".join(process.cmdline()) and "launch_server" in " ".join(process.cmdline()):
                found.append(process)
            elif process.pid in orphans:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _renamed_children(workdir) -> int:
    """Processes below the launcher that call themselves ``sglang::``."""
    try:
        children = [child for launcher in _servers(workdir) for child in launcher.children(recursive=True)]
        return sum("sglang::" in child.name() for child in children)
    except psutil.Error:
        return 0
