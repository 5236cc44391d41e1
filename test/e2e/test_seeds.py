"""Two nodes started without ``--random-seed``: every rank of target and draft must end up with one seed."""

from __future__ import annotations

import dataclasses

import pytest

import recorder
from checks import check_all_answer, check_tokens, wait_for
from conftest import DRAFT, with_models
from sglang_dflash_rocm.testing.server import Server, ServerConfig, free_port

HOOK = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.__init__"


@pytest.fixture
def two_nodes(models, load, record, tmp_path):
    """``two_nodes(env)``: serve from two launchers on the loopback; the seeds of all ranks, target and draft."""

    def serve(env: dict[str, str]) -> tuple[set[int], set[int]]:
        base = record(with_models(ServerConfig("base", DRAFT, tp=2, dp=2, env=env), models))
        address = f"127.0.0.1:{free_port()}"
        servers = []
        for node in range(2):
            extra = ("--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", address)
            servers.append(Server(dataclasses.replace(base, extra=extra), tmp_path / f"node{node}.log"))
        with servers[1]:
            # Both nodes check the same ports and only the first one binds them, which one machine allows in this order.
            wait_for(lambda: len(servers[1].plugin_lines()) > 1, 120, "the second node has checked its ports")
            with servers[0]:
                servers[0].wait_ready(120)
                check_tokens(check_all_answer(servers[0], lambda: load.ask(servers[0].url), 120), load.expected)
        seeds: tuple[set[int], set[int]] = (set(), set())
        for line in recorder.read(record.folder):
            if "seed" in line:
                seeds[line["draft"]].add(line["seed"])
        return seeds

    return serve


@pytest.mark.slow
def test_two_nodes_agree_on_one_seed(two_nodes):
    target, draft = two_nodes({})
    assert len(target) == 1 and draft == target


@pytest.mark.slow
def test_without_the_hook_the_draft_keeps_a_seed_per_node(two_nodes):
    target, draft = two_nodes({"DFLASH_FAULT": "without_hook", "DFLASH_WITHOUT": HOOK})
    assert len(target) == 1 and len(draft) == 2
