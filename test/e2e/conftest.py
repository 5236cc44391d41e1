"""Real SGLang servers on the CPU platform, one per configuration, and what their answers are compared with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from checks import Load
from sglang_dflash_rocm.testing.reference import TinyReference
from sglang_dflash_rocm.testing.server import Server, ServerConfig
from sglang_dflash_rocm.testing.tiny_models import TinyModels, build_tiny_models, tiny_prompts

READY_S = 240


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, TinyModels]:
    """The tiny checkpoints by variant."""
    root = tmp_path_factory.mktemp("models")
    return {variant: build_tiny_models(root, variant) for variant in ("base", "fused", "wide")}


@pytest.fixture(scope="session")
def reference(models) -> TinyReference:
    """Plain torch, no SGLang: the model's own answers."""
    return TinyReference.from_checkpoint(models["base"].target)


@pytest.fixture(scope="session")
def load(reference) -> Load:
    """The standard prompts with the tokens that the reference gives."""
    prompts = tiny_prompts(8)
    return Load(prompts, [40] * len(prompts), [reference.greedy(prompt, 40) for prompt in prompts])


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """``start_server(name, config)``: a running server; the caller stops it (use ``with``)."""

    def start(name: str, config: ServerConfig) -> Server:
        server = Server(config, tmp_path_factory.mktemp("logs") / f"{name}.log")
        server.start()
        try:
            server.wait_ready(READY_S)
        except BaseException:
            server.stop()
            raise
        return server

    return start


@pytest.fixture(scope="session")
def single_rank_answers(models, load, start_server) -> list:
    """DFLASH on one rank without DP: what tokens, accepted counts and verify steps must be everywhere else."""
    config = ServerConfig(models["base"].target, models["base"].draft)
    server = start_server("dflash-tp1", config)
    with server:
        answers = load.ask(server.url)
        assert not server.swallowed_errors()
    return answers


def with_models(config: ServerConfig, models: dict[str, TinyModels]) -> ServerConfig:
    """``config`` names a variant in place of a path; put the paths in."""
    variant = models[str(config.model)]
    return dataclasses.replace(config, model=variant.target, draft=variant.draft if config.draft else None)


#: Stands for "the variant's draft" in configurations that are written before the models exist.
DRAFT = Path("draft")
