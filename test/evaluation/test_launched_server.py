"""The launchers' command lines in the real server, on the CPU platform: only what needs a GPU is replaced."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import requests

from sglang_dflash_rocm.evaluation.launchers import LAUNCHERS
from sglang_dflash_rocm.testing.client import generate_many
from sglang_dflash_rocm.testing.draft_reference import DraftReference
from sglang_dflash_rocm.testing.launched import LaunchedServer
from sglang_dflash_rocm.testing.server import free_port
from sglang_dflash_rocm.testing.tiny_models import TinyModels, build_tiny_models, tiny_prompts

SCRIPTS = Path(__file__).parents[2] / "evaluation" / "mimo_v26_flash"
ACCURACY, DECODE, _ = LAUNCHERS
PROMPTS = tiny_prompts(6)
TOKENS = 24
READY_S = 240


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> TinyModels:
    """With the released head sizes: the flydsl backend refuses others."""
    return build_tiny_models(tmp_path_factory.mktemp("models"), "wide")


def launched(launcher, models: TinyModels, log: Path, **variables: str) -> LaunchedServer:
    """Two ranks instead of eight, float32 on CPUs, and pools of a tiny model."""
    instead = (
        f"--tp-size 2 --device cpu --dtype float32 --kv-cache-dtype auto --context-length 512 --max-total-tokens 4096 "
        f"--skip-server-warmup --encoder-bootstrap-port {free_port()} "
        # What SGLang chooses on ROCm; elsewhere it pins host memory through CUDA.
        "--disaggregation-decode-retraction-backup cpu_tensor"
    )
    base = {
        "PYTHON": sys.executable,
        "SGLANG_PLATFORM": "dflash_cpu",
        "HF_HUB_OFFLINE": "1",
        "MODEL_PATH": str(models.target),
        "DRAFT_MODEL_PATH": str(models.draft),
        "CHUNKED_PREFILL_SIZE": "256",
        "MEM_FRACTION_STATIC": "0.05",
        "SWA_FULL_TOKENS_RATIO": "1",
        "MAX_RUNNING_REQUESTS": "16",
        "EXTRA_ARGS": instead,
    }
    return LaunchedServer(SCRIPTS / launcher.script, {**base, **variables}, log)


@pytest.mark.slow
@pytest.mark.server
def test_the_accuracy_server_answers_right_and_ends_on_sigterm(models, tmp_path):
    reference = DraftReference.from_checkpoint(models.target, models.draft)
    with launched(ACCURACY, models, tmp_path / "server.log") as server:
        server.wait_ready(READY_S)
        answers = generate_many(server.url, PROMPTS, TOKENS)
        assert [answer.tokens for answer in answers] == [reference.run(prompt, TOKENS).tokens for prompt in PROMPTS]
        assert {answer.dp_rank for answer in answers} == {0, 1}
        assert not server.swallowed_errors() and server.plugin_lines()
        os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + 30
        while (server.alive() or server.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not server.leftovers() and not server.alive()


@pytest.mark.slow
@pytest.mark.server
def test_the_decode_server_takes_requests_without_prefill_and_simulates_acceptance(models, tmp_path):
    with launched(DECODE, models, tmp_path / "server.log", SGLANG_SIMULATE_ACC_LEN="3") as server:
        server.wait_ready(READY_S)
        for prompt in PROMPTS[:2]:
            meta = requests.post(f"{server.url}/generate", json=fake_prefill(prompt), timeout=120).json()["meta_info"]
            # The first token comes with the request, as if from a prefill server.
            assert (meta["completion_tokens"], meta["spec_verify_ct"]) == (TOKENS, math.ceil((TOKENS - 1) / 3)), meta
        assert not server.swallowed_errors()


def fake_prefill(prompt: list[int]) -> dict:
    """What SGLang's benchmark client sends with `--fake-prefill`; the server dies of a request without it."""
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
