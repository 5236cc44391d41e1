"""What the accuracy tool refuses before it asks a single question. The servers are stand-ins: a real one is not started
wrongly on demand."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stub_sglang import StubServer, chat_answer, server_info
from typer.testing import CliRunner

from sglang_dflash_rocm.evaluation import accuracy_run, records
from sglang_dflash_rocm.evaluation.accuracy import app
from sglang_dflash_rocm.evaluation.accuracy_folder import FolderRefused, RunFolder
from sglang_dflash_rocm.evaluation.accuracy_server import facts, refusals
from sglang_dflash_rocm.evaluation.accuracy_settings import VARIABLES
from sglang_dflash_rocm.evaluation.gsm8k import prepare_dataset
from sglang_dflash_rocm.evaluation.server_info import dp_ranks, environment

SCRIPT = Path(__file__).parents[2] / "evaluation" / "run_evalscope_gsm8k_accuracy.py"


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 4)
    prepare_dataset(folder)
    return folder


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path, dataset):
    """Neither the caller's variables nor the tool's signal handler reach another test."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("DATASET_PATH", str(dataset))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accuracy_run, "_IDLE_TIMEOUT_S", 1)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def answer(number: int, body: dict) -> dict:
    return chat_answer("2", list(range(20)), dp_rank=number % 2)


def refused(url: str, *arguments: str) -> str:
    """Why; and nothing was written."""
    before = sorted(Path.cwd().rglob("*"))
    result = CliRunner().invoke(app, ["--base-url", url, *arguments])
    assert result.exit_code == 2, result.output
    assert sorted(Path.cwd().rglob("*")) == before
    return result.stderr


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"disaggregation_mode": "decode", "disaggregation_transfer_backend": "fake"}, "fake prefill"),
        (
            {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "mooncake"},
            "one half of a disaggregated",
        ),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"internal_states": [{}, {"disaggregation_mode": "decode"}]}, "--disaggregation-mode decode"),
        ({"load_format": "dummy"}, "--load-format dummy: random weights"),
        ({"speculative_draft_load_format": "dummy"}, "--speculative-draft-load-format dummy"),
        (
            {"internal_states": [{}, {"env_vars": {"SGLANG_SIMULATE_ACC_LEN": "5.56"}}]},
            "ACC_LEN=5.56: simulated accept",
        ),
        ({"internal_states": [{"env_vars": {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "true"}}, {}]}, "experts picked evenly"),
        (
            {"internal_states": [{"env_vars": {"SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "1"}}, {}]},
            "experts picked in turn",
        ),
        ({"speculative_algorithm": None}, "without speculation"),
        ({"context_length": 4096}, "MAX_TOKENS=4096 does not fit in the server's context of 4096 tokens"),
        ({"model_path": "/models/other", "served_model_name": "other"}, "serves /models/other"),
    ],
)
def test_a_server_whose_answers_are_not_the_models(info, why):
    with StubServer(answer, **info) as server:
        assert why in refused(server.url, "--model-path", "/models/tiny/")
        assert server.asked == 0


def test_a_server_that_simulates_nothing_is_not_refused():
    off = {"SGLANG_SIMULATE_ACC_LEN": "-1", "SGLANG_SIMULATE_UNIFORM_EXPERTS": "0", "SGLANG_PLATFORM": "x"}
    info = server_info(load_format="auto", internal_states=[{"env_vars": off}, {}])
    assert refusals(info) == []
    assert environment(info) == off and facts(info)["env SGLANG_SIMULATE_ACC_LEN"] == "-1"
    assert environment(server_info()) is None


def test_dp_ranks_are_not_dp_size():
    """SGLang 0.5.23 says `dp_size` 1 under DP attention."""
    info = server_info(dp_ranks=4)
    assert (info["dp_size"], dp_ranks(info)) == (1, 4)


@pytest.mark.parametrize("missing", ["meta_info", "response_token_ids"])
def test_answers_without_figures(missing):
    def behave(number, body):
        got = answer(number, body)
        del got["choices"][0][missing]
        return got

    with StubServer(behave) as server:
        assert re.search(rf"no {missing}.* in the server's answers", refused(server.url))


def test_answers_that_do_not_name_their_dp_rank():
    with StubServer(lambda *_: chat_answer("2", [1], dp_rank=None)) as server:
        assert "no meta_info.dp_rank" in refused(server.url)


def test_a_server_with_other_clients():
    with StubServer(answer) as server:
        server.running = 3
        assert "not idle after 1 s (DP rank 0: 3 running, 0 waiting, DP rank 1: 3 running" in refused(server.url)


def test_no_server_and_another_kind_of_server():
    with StubServer(answer) as server:
        server.info = {"object": "something else"}
        assert "is not SGLang's" in refused(server.url)
    assert "does not answer" in refused(server.url)


def test_a_wrong_data_set_and_too_many_questions(tmp_path):
    assert "README.md: missing" in refused("http://127.0.0.1:1", "--dataset-path", str(tmp_path))
    assert "4 rows, too few for NUM_QUESTIONS=5" in refused("http://127.0.0.1:1", "--limit", "5")
    assert "GSM8K's test split has 1319" in refused("http://127.0.0.1:1", "--dataset-path", "", "--limit", "1320")


def test_accept_totals_that_a_flush_left():
    """SGLang's /flush_cache answers for one rank; the other was busy."""
    with StubServer(answer, internal_states=[{}, {"avg_spec_accept_length": 3.1}]) as server:
        result = CliRunner().invoke(app, ["--base-url", server.url, "--work-dir", "run"])
        assert result.exit_code == 3
        assert "did not reach 1 of the DP ranks" in json.loads(Path("run/summary.json").read_text())["reason"]


class Cell(records.Record, tag="decode", frozen=True, kw_only=True):
    tokens: int = 0


def simulated(what: str) -> Cell:
    provenance = records.Provenance(tool="decode matrix", started="", versions={}, simulated=(what,) if what else ())
    return Cell(key="a", outcome="passed", provenance=provenance)


def test_records_of_a_simulated_run_are_refused(tmp_path):
    records.append(tmp_path / "cells.jsonl", simulated(""))
    records.append(tmp_path / "cells.jsonl", simulated("fake prefill"))
    with StubServer(answer) as server:
        why = refused(server.url, "--work-dir", str(tmp_path))
    assert "cells.jsonl, line 2: a record with fake prefill; that is never an accuracy result" in why


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with StubServer(answer) as server:
        assert "has files and no run.json" in refused(server.url, "--work-dir", str(tmp_path))


@pytest.mark.parametrize("change", [{"min_accuracy": 0.5}, {"model_path": "/other"}, {"env SGLANG_X": "1"}])
def test_a_folder_of_another_run_names_what_differs(tmp_path, change):
    identity = {"min_accuracy": 0.97, "model_path": "/models/tiny"}
    folder = RunFolder(tmp_path)
    assert folder.open(identity) is False
    folder.close()
    assert folder.open(identity) is True
    folder.close()
    with pytest.raises(FolderRefused) as caught:
        RunFolder(tmp_path).open({**identity, **change})
    [(name, value)] = change.items()
    assert str(caught.value).splitlines()[1:] == [f"  {name}: there {identity.get(name)!r}, now {value!r}"]


def test_a_folder_in_use(tmp_path):
    folder = RunFolder(tmp_path)
    folder.open({})
    with pytest.raises(FolderRefused, match="another process runs in it"):
        RunFolder(tmp_path).open({})
    folder.close()


def test_another_evalscope_is_refused(monkeypatch):
    monkeypatch.setattr(accuracy_run, "EVALSCOPE", "0.0.1")
    with StubServer(answer) as server:
        assert "needs evalscope 0.0.1, found" in refused(server.url)


def test_the_hub_needs_modelscope(monkeypatch):
    """requirements/eval.lock has only what a local folder needs."""
    monkeypatch.setattr(accuracy_run.importlib.util, "find_spec", lambda name: name != "modelscope")
    assert "through modelscope, which is not installed" in refused("http://127.0.0.1:1", "--dataset-path", "")


def test_the_seeds_command_line_runs_from_its_folder():
    """`python3 ./run_evalscope_gsm8k_accuracy.py`: the file that the guide names is there and starts."""
    command = [sys.executable, f"./{SCRIPT.name}", "--dry-run", "--limit", "3"]
    env = {**os.environ, "MODEL_PATH": "/models/MiMo-V2.6-Flash-MOPD/", "MIN_ACCEPT_LENGTH": "4.0"}
    done = subprocess.run(command, cwd=SCRIPT.parent, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["limit"] == 3
    assert os.access(SCRIPT, os.X_OK)
