"""Draft and verify graphs under DP attention: SGLang's real graph runner, real collectives, replays that run again.

What a replay costs on a GPU is not measured here; which rank replays what, and that all agree, is.
"""

from __future__ import annotations

import dataclasses
import threading

import pytest

import recorder
from checks import REPLAY, check_accepted, check_all_answer, check_log, check_tokens, replays
from conftest import DRAFT, with_models, with_plugin
from sglang_dflash_rocm.hook_table import HOOKS
from sglang_dflash_rocm.testing.server import Server, ServerConfig, ServerError

BUCKETS = ("--cuda-graph-bs-decode", "1", "2", "4", "8")


def graph_config(models, tp: int, dp: int, **env: str) -> ServerConfig:
    base = with_models(ServerConfig("base", DRAFT, tp=tp, dp=dp, extra=BUCKETS), models)
    return dataclasses.replace(base, env={"SGLANG_DFLASH_CPU_GRAPH": "1", "SGLANG_LOG_DECODE_GRAPH_KEY": "1", **env})


def drive_mixed_load(server: Server, load, dp: int) -> None:
    """All ranks busy, one busy and the others idle, and prompts that arrive while another rank decodes."""
    check_tokens(check_all_answer(server, lambda: load.ask(server.url), 120), load.expected)
    for rank in range(dp):
        answers = check_all_answer(server, lambda rank=rank: load.ask(server.url, dp_rank=rank), 120)
        check_tokens(answers, load.expected)
    late: list = []
    ask = threading.Thread(target=lambda: late.extend(load.ask(server.url, dp_rank=dp - 1)))
    ask.start()
    check_tokens(check_all_answer(server, lambda: load.ask(server.url, dp_rank=0), 120), load.expected)
    ask.join(120)
    check_tokens(late, load.expected)


SHAPES = [
    pytest.param(4, 2, id="tp4-dp2"),
    pytest.param(2, 2, id="groups-of-one"),
    pytest.param(4, 4, id="tp4-dp4"),
]


@pytest.mark.slow  # test_flydsl_server.py replays both graphs by default
@pytest.mark.parametrize("tp,dp", SHAPES)
def test_both_graphs_keep_tokens_counts_and_collectives(
    models, load, single_rank_answers, start_server, record, tp, dp
):
    config = graph_config(models, tp, dp, SGLANG_DFLASH_DRAFT_GRAPH="on", SGLANG_DFLASH_IDLE_VERIFY_GRAPH="1")
    with start_server(f"graphs-{tp}-{dp}", record(config)) as server:
        answers = check_all_answer(server, lambda: load.ask(server.url, dp_rank=0), 120)
        check_tokens(answers, load.expected)
        check_accepted(answers, single_rank_answers)
        drive_mixed_load(server, load, dp)
        check_log(server)
        seen = replays(server)
        pairs = REPLAY.findall(server.log_text())
    assert seen["draft", "TARGET_VERIFY"] and seen["target", "TARGET_VERIFY"] and seen["target", "IDLE"]
    # A draft is keyed by its own batch, the target by the busiest rank's.
    assert all(int(key) >= int(raw) for _dp, _worker, key, _mode, raw in pairs)
    assert {worker for _dp, worker, _key, mode, _raw in pairs if mode == "IDLE"} == {"target"}
    groups = recorder.check_collectives(record.folder)
    assert tuple(range(tp)) in groups
    assert dp == tp or all(tuple(range(i, i + tp // dp)) in groups for i in range(0, tp, tp // dp))


@pytest.mark.slow
def test_without_the_variables_sglang_decides_as_released(models, load, start_server, record):
    """Neutral unless asked for; and what we build on: with an idle peer all ranks verify eagerly, in step."""
    with start_server("graphs-neutral", record(graph_config(models, 2, 2))) as server:
        check_tokens(check_all_answer(server, lambda: load.ask(server.url, dp_rank=0), 120), load.expected)
        assert not replays(server)
        drive_mixed_load(server, load, 2)
        seen = replays(server)
    assert set(seen) == {("target", "TARGET_VERIFY")}
    recorder.check_collectives(record.folder)


@pytest.mark.slow
def test_a_draft_step_by_graph_leaves_the_host_little_to_do(models, load, start_server, record):
    """Tensor calls of a draft step, attention metadata left out: in a replay the forward is the graph and not counted.

    Batches above the largest graph run eagerly, so one server shows both kinds of step.
    """
    config = graph_config(models, 2, 2, SGLANG_DFLASH_DRAFT_GRAPH="on")
    config = dataclasses.replace(config, extra=("--cuda-graph-bs-decode", "1", "2", "4"))
    with start_server("graphs-cost", record(config)) as server:
        check_tokens(check_all_answer(server, lambda: load.ask(server.url, dp_rank=0), 120), load.expected)
    steps = [line for line in recorder.read(record.folder) if "draft_step" in line]
    graph = [line for line in steps if line["draft_step"]]
    eager = [line for line in steps if not line["draft_step"]]
    assert graph and eager
    calls = max(line["calls"] for line in graph), min(line["calls"] for line in eager)
    reads = max(line["host_reads"] for line in graph), max(line["host_reads"] for line in eager)
    print(f"tensor calls per draft step: graph {calls[0]}, eager {calls[1]}; host reads: {reads[0]}, {reads[1]}")
    assert calls[0] < calls[1] / 2 and reads[0] == 0


@pytest.mark.slow
def test_off_keeps_the_draft_eager_where_sglang_would_capture(models, load, start_server, single_rank_answers):
    for value, captured in (("auto", True), ("off", False)):
        config = graph_config(models, 1, 1, SGLANG_DFLASH_DRAFT_GRAPH=value)
        with start_server(f"graphs-{value}", config) as server:
            answers = check_all_answer(server, lambda server=server: load.ask(server.url), 120)
            check_tokens(answers, load.expected)
            check_accepted(answers, single_rank_answers)
            assert bool(replays(server)["draft", "TARGET_VERIFY"]) == captured


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["SGLANG_DFLASH_DRAFT_GRAPH", "SGLANG_DFLASH_IDLE_VERIFY_GRAPH"])
def test_asked_for_and_not_captured_stops_the_start(models, tmp_path, variable):
    config = graph_config(models, 2, 2, **{variable: "on"})
    config = dataclasses.replace(config, extra=("--disable-cuda-graph",))
    with Server(config, tmp_path / "server.log") as server, pytest.raises(ServerError):
        server.wait_ready(180)
    assert "refuses to start" in server.log_text() and variable in server.log_text()
    assert "--disable-cuda-graph" in server.log_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [hook.target for hook in HOOKS if hook.group in ("draft_graph", "idle_verify") and hook.kind != "reads"]
)
def test_every_graph_hook_is_needed(models, load, tmp_path, target):
    """Without it the server does not start, does not answer, replays less, or does not compare graphs at start-up."""
    config = graph_config(models, 2, 2, SGLANG_DFLASH_DRAFT_GRAPH="on", SGLANG_DFLASH_IDLE_VERIFY_GRAPH="1")
    config = with_plugin(config, tmp_path, "faults:install", DFLASH_FAULT="without_hook", DFLASH_WITHOUT=target)
    with Server(config, tmp_path / "server.log") as server, pytest.raises((ServerError, AssertionError)):
        server.wait_ready(120)
        check_tokens(check_all_answer(server, lambda: load.ask(server.url, dp_rank=0), 60), load.expected)
        seen = replays(server)
        assert seen["draft", "TARGET_VERIFY"] and seen["target", "IDLE"]
        assert "idle DP ranks replay verify graphs" in server.log_text()
