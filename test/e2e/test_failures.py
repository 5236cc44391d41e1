"""Faults put into the real server on purpose, each caught by the check that is meant for it; and a killed scheduler."""

from __future__ import annotations

import dataclasses
import signal
import time

import psutil
import pytest

from checks import check_accepted, check_all_answer, check_log, check_tokens, wait_for
from conftest import DRAFT, with_models, with_plugin
from sglang_dflash_rocm.hook_table import HOOKS
from sglang_dflash_rocm.testing.server import Server, ServerConfig, ServerError

WATCHDOG_S = 12


@pytest.fixture
def faulty(models, tmp_path):
    """``faulty(name)``: the configuration of a server in which the fault ``name`` of ``faults.py`` is active."""

    def config(name: str) -> ServerConfig:
        base = with_models(ServerConfig("base", DRAFT, tp=2, dp=2, watchdog_s=WATCHDOG_S), models)
        return with_plugin(base, tmp_path, "faults:install", DFLASH_FAULT=name)

    return config


@pytest.mark.slow
def test_an_extra_accepted_token_changes_the_tokens(faulty, start_server, load):
    with start_server("fault-accept", faulty("extra_token")) as server:
        answers = check_all_answer(server, lambda: load.ask(server.url), 120)
        with pytest.raises(AssertionError, match="tokens differ"):
            check_tokens(answers, load.expected)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["wrong_embedding", "no_draft_kv"])
def test_a_broken_draft_shows_only_in_the_accepted_counts(faulty, start_server, load, single_rank_answers, fault):
    with start_server(f"fault-{fault}", faulty(fault)) as server:
        answers = check_all_answer(server, lambda: load.ask(server.url), 120)
        check_tokens(answers, load.expected)
        with pytest.raises(AssertionError, match="accepted, verify steps"):
            check_accepted(answers, single_rank_answers)


@pytest.mark.slow
def test_an_idle_rank_that_skips_verify_is_a_hang_and_the_watchdog_ends_it(faulty, start_server, load):
    with start_server("fault-idle", faulty("idle_skips_verify")) as server:
        with pytest.raises(AssertionError, match="no answer within|a request failed"):
            check_all_answer(server, lambda: load.ask(server.url, dp_rank=0), WATCHDOG_S)
        wait_for(lambda: not server.alive(), 6 * WATCHDOG_S, "the watchdog ends the server")
        assert "watchdog timeout" in server.log_text()
    assert not server.leftovers()


@pytest.mark.parametrize("fault", ["hook_dropped", pytest.param("hook_overwritten", marks=pytest.mark.slow)])
def test_a_hook_that_was_not_applied_stops_the_start(faulty, tmp_path, fault):
    server = Server(faulty(fault), tmp_path / "server.log")
    start = time.monotonic()
    with server, pytest.raises(ServerError, match="ended with exit code [^0]"):
        server.wait_ready(90)
    assert time.monotonic() - start < 90
    assert "sglang.srt.layers.dp_attention.memcpy" in server.log_text()
    with pytest.raises(AssertionError, match="hooks active in"):
        check_log(server)
    assert not server.leftovers()


@pytest.mark.slow
@pytest.mark.parametrize("target", [hook.target for hook in HOOKS if hook.group == "cpu"])
def test_every_cpu_hook_is_needed(faulty, tmp_path, load, single_rank_answers, target):
    """Without it the server does not start, does not answer, or its answers are not those of the complete one. Two
    ranks per attention group and pages of more than one token: two of the hooks matter only there."""
    config = faulty("without_hook")
    env = {**config.env, "DFLASH_WITHOUT": target}
    config = dataclasses.replace(config, tp=4, dp=2, extra=("--page-size", "16"), env=env)
    with Server(config, tmp_path / "server.log") as server, pytest.raises((ServerError, AssertionError)):
        server.wait_ready(120)
        answers = check_all_answer(server, lambda: load.ask(server.url), 60)
        check_tokens(answers, load.expected)
        check_accepted(answers, single_rank_answers)


def test_a_killed_scheduler_ends_the_server_with_a_clear_error(models, start_server):
    config = with_models(ServerConfig("base", DRAFT, tp=2, dp=2, watchdog_s=WATCHDOG_S), models)
    with start_server("killed-scheduler", config) as server:
        schedulers = [p for p in psutil.Process(server.pid).children(recursive=True) if "scheduler" in _title(p)]
        assert len(schedulers) == 2, [_title(p) for p in server.leftovers()]
        schedulers[1].send_signal(signal.SIGKILL)
        wait_for(lambda: not server.alive(), 4 * WATCHDOG_S, "the server ends")
        wait_for(lambda: not server.leftovers(), WATCHDOG_S, "every process ends by itself")
        log = server.log_text()
    # Its peer loses the connection inside a collective, says so, and takes the server down.
    assert "Scheduler hit an exception" in log and "closed by peer" in log.replace("reset by peer", "closed by peer")


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
