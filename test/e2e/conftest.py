"""Real SGLang servers on the CPU platform, one per configuration, and what their answers are compared with."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from checks import Load
from sglang_dflash_rocm.testing.reference import TinyReference
from sglang_dflash_rocm.testing.server import Server, ServerConfig
from sglang_dflash_rocm.testing.tiny_models import TinyModels, build_tiny_models, tiny_prompts

READY_S = 240
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.server)


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


@dataclasses.dataclass(frozen=True)
class Recording:
    """``recording(config)`` is a server whose ranks write down in ``folder`` what they do (``recorder.py``)."""

    folder: Path

    def __call__(self, config: ServerConfig) -> ServerConfig:
        return with_plugin(config, self.folder.parent, "recorder:install", DFLASH_RECORD_DIR=str(self.folder))


@pytest.fixture
def record(tmp_path) -> Recording:
    folder = tmp_path / "plugin" / "records"
    folder.mkdir(parents=True)
    return Recording(folder)


def with_models(config: ServerConfig, models: dict[str, TinyModels]) -> ServerConfig:
    """``config`` names a variant in place of a path; put the paths in."""
    variant = models[str(config.model)]
    return dataclasses.replace(config, model=variant.target, draft=variant.draft if config.draft else None)


def with_plugin(config: ServerConfig, folder: Path, entry: str, **env: str) -> ServerConfig:
    """``config`` with one more plugin in every process: ``entry`` is ``module:function`` of a module in this directory.
    ``folder`` is an empty directory for its metadata."""
    info = folder / "dflash_test_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dflash-test-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\ndflash_test_plugin = {entry}\n")
    path = os.pathsep.join([str(folder), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return dataclasses.replace(config, env={**config.env, "PYTHONPATH": path, **env})


#: Stands for "the variant's draft" in configurations that are written before the models exist.
DRAFT = Path("draft")
