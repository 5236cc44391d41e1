"""Real ranks for the contract tests: one job of four gloo processes at a time, kept from test to test.

The contract is with the installed SGLang: its own schedulers, DFlash worker, groups and models run here, on our CPU
platform. What stands in for GPU hardware is said where it does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sglang_dflash_rocm.testing.live import schedulers
from sglang_dflash_rocm.testing.ranks import Ranks
from sglang_dflash_rocm.testing.server import ServerConfig, free_port
from sglang_dflash_rocm.testing.tiny_models import build_tiny_models

#: Compiling tiny helpers takes longer than all tests; eviction every 8 tokens shows the window within one answer.
ENV = {"TORCH_COMPILE_DISABLE": "1", "SGLANG_SWA_EVICTION_INTERVAL": "8", "OMP_NUM_THREADS": "1"}
#: What ``mask_embedding.pt`` adds to the mask token's row.
MASK_SHIFT = 0.01


class Layouts:
    """Opens the ranks of one layout, closing those of another: two jobs at once do not fit a small machine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: tuple[str, Ranks] | None = None

    def get(self, name: str) -> Ranks:
        if self._open and self._open[0] == name and self._open[1].usable:
            return self._open[1]
        self.close()
        models = build_tiny_models(self._root, "base")
        config = ServerConfig(models.target, models.draft, tp=4, dp={"tp4-dp2": 2, "tp4-dp4-groups": 4}[name])
        _write_mask_embedding(models)
        ranks = Ranks(4, {**config.environment(), **ENV}, timeout_s=240)
        self._open = (name, ranks)
        start = schedulers.open_groups if name.endswith("groups") else schedulers.open_scheduler
        ranks.call(start, config, [free_port() for _ in range(2 + config.dp)])
        ranks.timeout_s = 60
        return ranks

    def close(self) -> None:
        if self._open:
            self._open[1].close()
        self._open = None


def _write_mask_embedding(models) -> None:
    import torch
    from safetensors.torch import load_file

    table = load_file(models.target / "model.safetensors")["model.embed_tokens.weight"]
    mask = 511
    torch.save({"embedding": table[mask] + MASK_SHIFT, "mask_token_id": mask}, models.draft / "mask_embedding.pt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without ranks first, then layout by layout, so that each layout is opened once."""
    here = Path(__file__).parent
    places = [i for i, item in enumerate(items) if here in item.path.parents]
    ordered = sorted((items[i] for i in places), key=lambda item: _layout_order(item.fixturenames))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item
        if _layout_order(item.fixturenames):
            item.add_marker(pytest.mark.server)


def _layout_order(fixtures: list[str]) -> int:
    return 2 if "dp4_groups" in fixtures else int("dp2" in fixtures)


@pytest.fixture(scope="session")
def layouts(tmp_path_factory):
    opened = Layouts(tmp_path_factory.mktemp("contract"))
    yield opened
    opened.close()


@pytest.fixture
def dp2(layouts) -> Ranks:
    """TP4 with two attention DP ranks: each of the four processes has its scheduler."""
    return layouts.get("tp4-dp2")


@pytest.fixture
def dp4_groups(layouts) -> Ranks:
    """TP4 with four attention DP ranks, so that attention TP groups are one rank wide: groups only, no model."""
    return layouts.get("tp4-dp4-groups")
