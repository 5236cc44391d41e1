"""The accuracy tool as a user runs it, with the real evalscope: on a real DP2 DFLASH server on CPUs, and, for what a
server does not do on demand, on a stand-in."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from stub_sglang import Refusal, StubServer, chat_answer

from sglang_dflash_rocm.evaluation.accuracy_folder import AccuracyRecord
from sglang_dflash_rocm.evaluation.gates import Thresholds, judge
from sglang_dflash_rocm.evaluation.gsm8k import prepare_dataset
from sglang_dflash_rocm.evaluation.records import read
from sglang_dflash_rocm.testing.server import Server, ServerConfig
from sglang_dflash_rocm.testing.tiny_models import build_tiny_models

SCRIPT = Path(__file__).parents[2] / "evaluation" / "run_evalscope_gsm8k_accuracy.py"
QUESTIONS = 6
TOKENS = 48
#: The tiny model is random, so it is right never; its draft is right now and then.
TINY = {"MIN_ACCURACY": "0", "MIN_ACCEPT_LENGTH": "1.5", "MAX_TOKENS": str(TOKENS)}
_READY_S = 290


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """Questions that a stand-in can answer, in words that the tiny tokenizer knows."""
    folder, rnd = tmp_path_factory.mktemp("gsm8k"), random.Random(3)
    for split, rows in (("train", 4), ("test", QUESTIONS)):
        lines = []
        for number in range(rows):
            words = " ".join(f"w{rnd.randrange(5, 500)}" for _ in range(12))
            question = f"{words} what is {number} + 2 ?"
            lines.append(json.dumps({"question": question, "answer": f"w7 w9\n#### {number + 2}"}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    prepare_dataset(folder)
    return folder


class Tool:
    """One run of the script."""

    def __init__(self, url: str, dataset: Path, work_dir: Path, **variables: str) -> None:
        self.work_dir = work_dir
        env = {**os.environ, **TINY, "DATASET_PATH": str(dataset), "WORK_DIR": str(work_dir), **variables}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--base-url", url],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, timeout_s: float = 240) -> int:
        self.out, self.err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode

    @property
    def records(self) -> list[AccuracyRecord]:
        return read(self.work_dir / "records.jsonl", AccuracyRecord)

    def answered(self) -> int:
        files = list(self.work_dir.glob("evalscope/predictions/*/gsm8k_main.jsonl"))
        return files[0].read_bytes().count(b"\n") if files else 0

    def wait_for_answers(self, number: int, within_s: float = 240) -> None:
        _wait(lambda: self.answered() >= number or self.process.poll() is not None, within_s)
        assert self.process.poll() is None, self.process.communicate()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def _wait(condition: Callable[[], bool], within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


def _gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("accuracy")
    models = build_tiny_models(root, "base")
    config = ServerConfig(models.target, models.draft, tp=2, dp=2, env={"SGLANG_EXPOSE_OWN_ENV_VARS": "1"})
    with Server(config, root / "server.log") as running:
        running.wait_ready(_READY_S)
        yield running


@pytest.mark.server
@pytest.mark.timeout(600)
def test_the_whole_flow_on_a_real_server(server, dataset, tmp_path):
    tool = Tool(server.url, dataset, tmp_path / "run")
    assert tool.end() == 0, tool.err
    [record] = tool.records
    assert record.outcome == "passed" and record.provenance.simulated == ()
    assert json.loads(tool.out[tool.out.index("\n{") :]) == json.loads((tool.work_dir / "summary.json").read_text())
    assert re.search(r"target +│ GSM8K +│ Accuracy . +│ main +│ +6 │ 0%", tool.out), tool.out

    figures = record.figures
    assert (figures.asked, figures.scored, figures.without_figures) == (QUESTIONS, QUESTIONS, ())
    assert figures.truncated == tuple(range(QUESTIONS)), "the tiny tokenizer has no end token"
    ranks = figures.acceptance.ranks
    assert [rank.dp_rank for rank in ranks] == [0, 1] and all(rank.requests for rank in ranks)
    assert sum(rank.requests for rank in ranks) == QUESTIONS
    for rank in ranks:
        # The first token of an answer is prefill's; the last step may accept more than MAX_TOKENS has room for.
        room = rank.requests * 7
        assert 0 <= rank.accepted_tokens - rank.requests * (TOKENS - 1) <= room
    assert record.mean_worker_accept_length == pytest.approx(sum(r.accept_length for r in ranks) / 2)
    assert sum(figures.acceptance.accepted_histogram) == sum(rank.verify_steps for rank in ranks)
    assert record.provenance.server["attn_dp_size"] == 2
    assert record.provenance.server["env SGLANG_PLATFORM"] == "dflash_cpu"

    seed = Thresholds(min_accuracy=0.97, min_accept_length=4.0)
    failed = [gate.name for gate in judge(figures, seed) if not gate.passed]
    assert failed == ["accuracy", "mean accept length of the DP ranks"]


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(600)
def test_the_seeds_thresholds_fail_a_random_model(server, dataset, tmp_path):
    tool = Tool(server.url, dataset, tmp_path / "run", MIN_ACCURACY="0.97", MIN_ACCEPT_LENGTH="4.0")
    assert tool.end() == 1, tool.err
    assert "FAIL  accuracy: 0.0000 < 0.97 (0 of 6 correct)" in tool.out
    assert tool.records[0].reason == "gates failed: accuracy, mean accept length of the DP ranks"
    other = Tool(server.url, dataset, tmp_path / "run")
    assert other.end() == 2 and "min_accuracy: there 0.97, now 0.0" in other.err


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(600)
def test_accept_lengths_agree_with_the_servers_own(server, dataset, tmp_path):
    """Its totals move every 40 decode steps, so they leave out the end of a run."""
    tool = Tool(server.url, dataset, tmp_path / "run", MAX_TOKENS="200")
    assert tool.end() == 0, tool.err
    for rank in tool.records[0].figures.acceptance.ranks:
        assert rank.server_accept_length == pytest.approx(rank.accept_length, rel=0.2)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(600)
def test_interrupted_and_resumed_on_a_real_server(server, dataset, tmp_path):
    whole = Tool(server.url, dataset, tmp_path / "whole")
    assert whole.end() == 0, whole.err
    first = Tool(server.url, dataset, tmp_path / "parts", EVAL_BATCH_SIZE="1")
    first.wait_for_answers(2)
    children = first.children()
    assert children
    first.process.send_signal(signal.SIGINT)
    assert first.end(30) == 130
    _wait(lambda: _gone(children), 10)
    second = Tool(server.url, dataset, tmp_path / "parts")
    assert second.end() == 0, second.err
    assert [record.outcome for record in second.records] == ["interrupted", "passed"]
    together, parts = whole.records[0].figures.acceptance, second.records[1].figures.acceptance
    assert sum(rank.requests for rank in parts.ranks) == QUESTIONS
    assert (parts.accept_length, parts.accepted_histogram) == (together.accept_length, together.accepted_histogram)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(600)
def test_a_real_server_that_dies_in_the_middle(server, dataset, tmp_path):
    """The last test on this server."""
    tool = Tool(server.url, dataset, tmp_path / "run", EVAL_BATCH_SIZE="1", MAX_TOKENS="100")
    tool.wait_for_answers(1)
    server.stop()
    assert tool.end(120) == 3
    [record] = tool.records
    assert record.outcome == "failed" and record.reason.startswith("the run broke: the server is gone")
    assert record.accuracy is None and record.figures is None


def question(body: dict) -> int | None:
    """Number of the question, the last in a prompt with solved examples; None for the tool's probe."""
    asked = re.findall(r"what is (\d+) \+ 2", body["messages"][-1]["content"])
    return int(asked[-1]) if asked else None


def right(number: int, body: dict, **figures) -> dict:
    """What a good model would answer, from alternating ranks."""
    text = f"so it is \\boxed{{{(question(body) or 0) + 2}}}"
    tokens = random.Random(number).sample(range(1000), 17)
    return chat_answer(text, tokens, **{"dp_rank": number % 2, **figures})


STRICT = {"MIN_ACCURACY": "0.97", "MIN_ACCEPT_LENGTH": "4.0"}


@pytest.mark.slow
def test_interrupted_and_resumed_asks_each_question_once(dataset, tmp_path):
    """Also by SIGKILL, which leaves a half-written line; and the server comes back at another address."""

    def three_and_then_silence(number, body):
        time.sleep(0 if number < 4 else 100)
        return right(number, body)

    with StubServer(three_and_then_silence) as stub:
        first = Tool(stub.url, dataset, tmp_path / "run", EVAL_BATCH_SIZE="1", **STRICT)
        first.wait_for_answers(3)
        children = first.children()
        first.process.kill()
        first.end(30)
        _wait(lambda: _gone(children), 10)
    kept = first.answered()
    [predictions] = first.work_dir.glob("evalscope/predictions/*/gsm8k_main.jsonl")
    with predictions.open("a") as file:
        file.write('{"index": 5, "mod')
    with StubServer(right) as stub:
        second = Tool(stub.url, dataset, tmp_path / "run", **STRICT)
        assert second.end() == 0, second.err
        assert (kept, stub.asked) == (3, 1 + QUESTIONS - 3)
    [record] = second.records
    assert record.accuracy == 1.0
    assert sum(rank.requests for rank in record.figures.acceptance.ranks) == QUESTIONS
    again = Tool("http://127.0.0.1:1", dataset, tmp_path / "run", **STRICT)
    assert again.end() == 2 and "does not answer" in again.err


@pytest.mark.slow
def test_a_rank_without_accept_data_fails_a_real_run(dataset, tmp_path):
    with StubServer(lambda number, body: right(number, body, verify=0 if number % 2 else 4)) as stub:
        tool = Tool(stub.url, dataset, tmp_path / "run", **STRICT)
        assert tool.end() == 1, tool.err
    assert "FAIL  accept data of every DP rank: DP rank 1 gave no accept data for 3 of its 3 requests" in tool.out
    assert tool.records[0].accuracy == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        ("Requested token count exceeds the model's maximum context length", 1, "gates failed: all questions scored"),
        ("out of luck", 3, "the run broke: evalscope ended with exit code 1"),
    ],
)
def test_a_question_that_the_server_refuses_is_not_dropped(message, code, reason, dataset, tmp_path):
    """evalscope takes SGLang's first message for the answer and goes on; the other ends it."""

    def behave(number, body):
        return Refusal(400, message) if question(body) == 3 else right(number, body)

    with StubServer(behave) as stub:
        tool = Tool(stub.url, dataset, tmp_path / "run", MIN_ACCURACY="0", MIN_ACCEPT_LENGTH="0")
        assert tool.end() == code, tool.err
    assert tool.records[0].reason.startswith(reason)


@pytest.mark.slow
def test_a_looped_and_a_truncated_answer(dataset, tmp_path):
    """Accept length and accuracy are fine, and it is degenerate all the same."""

    def behave(number, body):
        answer = right(number, body, finish="length" if number == 2 else "stop")
        if number == 3:
            answer["choices"][0]["response_token_ids"] = [5, 6] * 20
        return answer

    with StubServer(behave) as stub:
        tool = Tool(stub.url, dataset, tmp_path / "run", EVAL_BATCH_SIZE="1", **STRICT)
        assert tool.end() == 1, tool.err
    [record] = tool.records
    assert record.reason == "gates failed: no loops"
    assert (len(record.figures.looped), len(record.figures.truncated)) == (1, 1)
