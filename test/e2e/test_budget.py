"""The memory table of a real server against the sizes of its tensors, and a server that is too small."""

from __future__ import annotations

import json
import re

import pytest

from checks import check_log
from conftest import DRAFT, READY_S, with_models, with_plugin
from sglang_dflash_rocm.hook_table import HOOKS
from sglang_dflash_rocm.testing.server import Server, ServerConfig, ServerError

#: Pages of more than one token widen the request tables; the draft window gives the draft a table of its own.
CONFIG = ServerConfig("wide", DRAFT, tp=4, dp=2, extra=("--page-size", "16", "--speculative-draft-window-size", "16"))
TOO_SMALL = ServerConfig("base", DRAFT, max_total_tokens=10)
_HEAD = re.compile(r"DFLASH memory per GPU, DP rank (\d):")
_ROW = re.compile(r"^(\S.*?\S) +(\d+|-) +(\d+|-) +\S+ \S+ .*(static|rest)$")


def _tables(log: str) -> dict[int, dict[str, tuple[int | None, int | None]]]:
    """``{DP rank: {part: (predicted, allocated)}}``; a rank that logs two tables is an error."""
    tables: dict[int, dict] = {}
    lines = log.splitlines()
    for start, line in enumerate(lines):
        if head := _HEAD.search(line):
            assert int(head[1]) not in tables, f"two tables of DP rank {head[1]}"
            rows = tables[int(head[1])] = {}
            for row in lines[start + 2 :]:
                if not (match := _ROW.match(row)):
                    break
                rows[match[1]] = tuple(None if cell == "-" else int(cell) for cell in match.groups()[1:3])
    return tables


@pytest.mark.slow
def test_one_table_per_attention_group_agrees_with_the_real_tensors(models, start_server, tmp_path):
    config = with_plugin(with_models(CONFIG, models), tmp_path, "budget_probe:install", DFLASH_PROBE=str(tmp_path))
    with start_server("budget", config) as server:
        check_log(server)
        tables = _tables(server.log_text())
    sizes = {int(file.stem): json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert set(tables) == {0, 1} and set(sizes) == {0, 1, 2, 3}
    for dp_rank, table in tables.items():
        measured = sizes[2 * dp_rank]
        for part, size in measured.items():
            predicted, allocated = table[part]
            assert allocated == size > 0, part
            assert abs(predicted - size) <= 0.01 * size, part
        assert abs(sum(table[part][0] for part in measured) / sum(measured.values()) - 1) < 0.01
        assert table["weights"][1] > 0 and table["worker scratch"][0] > 0
        assert sizes[2 * dp_rank + 1] == measured, "ranks of one group differ"


@pytest.mark.slow
def test_a_server_that_is_too_small_says_which_part_and_which_flag(models, tmp_path):
    """SGLang refuses an SWA pool below the window; its error stays and ours is added."""
    config = with_models(TOO_SMALL, models)
    with Server(config, tmp_path / "small.log") as server, pytest.raises(ServerError):
        server.wait_ready(READY_S)
    log = server.log_text()
    assert "ValueError: SWA pool (8 tokens) cannot hold even one request" in log
    line = next(line for line in log.splitlines() if line.startswith("sglang-dflash-rocm: too small: the SWA pool"))
    for text in ("--swa-full-tokens-ratio", "--max-total-tokens (now 10)", "largest part: target KV, SWA layers"):
        assert text in line
    assert not server.leftovers()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "config", "ours"),
    [
        ("Scheduler.init_model_worker", ServerConfig("base", DRAFT), "DFLASH memory per GPU"),
        ("KVCacheConfigurator.configure", TOO_SMALL, "sglang-dflash-rocm: too small"),
    ],
)
def test_every_budget_hook_is_needed(models, tmp_path, method, config, ours):
    """Without the hook, SGLang does the same and nothing of it is explained."""
    (target,) = [hook.target for hook in HOOKS if hook.target.endswith(method)]
    fault = {"DFLASH_FAULT": "without_hook", "DFLASH_WITHOUT": target}
    with Server(
        with_plugin(with_models(config, models), tmp_path, "faults:install", **fault), tmp_path / "log"
    ) as server:
        if config is TOO_SMALL:
            with pytest.raises(ServerError):
                server.wait_ready(READY_S)
        else:
            server.wait_ready(READY_S)
        assert ours not in server.log_text() and len(server.plugin_lines()) > 0
