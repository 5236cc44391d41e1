"""Settings of the accuracy run: all faults at once, options before variables, the seed's defaults."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from sglang_dflash_rocm.evaluation.accuracy import gsm8k_accuracy
from sglang_dflash_rocm.evaluation.accuracy_run import evalscope_task
from sglang_dflash_rocm.evaluation.accuracy_settings import VARIABLES, read_settings
from sglang_dflash_rocm.evaluation.variables import WrongSettings


def test_defaults_are_the_seeds():
    got = read_settings({}, {})
    assert (got.min_accept_length, got.min_accuracy, got.num_questions) == (4.0, 0.97, None)
    assert (got.base_url, got.model_path, got.dataset_path) == ("http://127.0.0.1:30000", None, None)


def test_an_option_beats_its_variable_and_an_empty_variable_is_not_set():
    env = {"MIN_ACCURACY": "0.5", "FEW_SHOT": "0", "MAX_TOKENS": "", "HOST": "node7", "PORT": "31000"}
    got = read_settings(env, {"min_accuracy": "0.9", "few_shot": None})
    assert (got.min_accuracy, got.few_shot, got.max_tokens) == (0.9, 0, 4096)
    assert got.base_url == "http://node7:31000"
    assert read_settings({**env, "BASE_URL": "http://other:1/v1/"}, {}).base_url == "http://other:1"


def test_limit_is_another_name_of_num_questions():
    assert read_settings({"LIMIT": "7"}, {}).num_questions == 7
    assert read_settings({"NUM_QUESTIONS": "7", "LIMIT": "7"}, {}).num_questions == 7
    assert read_settings({"NUM_QUESTIONS": "7"}, {"limit": "9"}).num_questions == 9
    with pytest.raises(WrongSettings, match="NUM_QUESTIONS=7 and LIMIT=9"):
        read_settings({"NUM_QUESTIONS": "7", "LIMIT": "9"}, {})


def test_every_fault_is_named_at_once_with_value_and_what_is_allowed():
    wrong = {
        "MIN_ACCURACY": "97",
        "MIN_ACCEPT_LENGTH": "four",
        "NUM_QUESTIONS": "0",
        "FEW_SHOT": "-1",
        "EVAL_BATCH_SIZE": "1.5",
        "MAX_TOKENS": "x",
        "BASE_URL": "localhost:30000",
        "PORT": "http",
    }
    with pytest.raises(WrongSettings) as caught:
        read_settings(wrong, {})
    lines = str(caught.value).splitlines()
    assert len(lines) == len(wrong)
    for name, value in wrong.items():
        assert any(line.startswith(f"{name}={value!r}: must be ") for line in lines), name


def test_every_variable_is_an_option():
    options = set(inspect.signature(gsm8k_accuracy).parameters)
    assert options == {variable.name.lower() for variable in VARIABLES} | {"prepare_dataset", "dry_run"}


def test_the_task_does_not_drop_failing_samples_and_streams_nothing():
    """Both would lose figures in silence: a dropped sample raises the score, a streamed answer has no accept data."""
    task = evalscope_task(read_settings({}, {}), "served", "model", Path("out"), 1319)
    assert task["ignore_errors"] is False and task["generation_config"]["stream"] is False
    assert task["generation_config"]["extra_body"] == {"return_meta_info": True, "return_token_ids": True}
    assert task["generation_config"]["temperature"] == 0.0
