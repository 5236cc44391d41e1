"""The rank processes that contract tests run on: results by rank, and what is said when one raises, dies or hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sglang_dflash_rocm.testing.ranks import RankError, Ranks


def _report(rank: int, common: str, own: int) -> tuple:
    return rank, common, own, os.environ.get("RANKS_TEST")


def _misbehave(rank: int, how: str):
    if rank != 1:
        return rank
    if how == "raise":
        raise ValueError("on purpose")
    if how == "die":
        os._exit(3)
    _wait_for_nobody()


def _wait_for_nobody():
    time.sleep(60)


def _leave_shared_memory(rank: int) -> str:
    from multiprocessing import resource_tracker, shared_memory

    global _SEGMENT
    _SEGMENT = shared_memory.SharedMemory(create=True, size=64)
    resource_tracker.unregister(_SEGMENT._name, "shared_memory")
    return _SEGMENT.name


def test_closing_removes_the_shared_memory_of_the_ranks():
    with Ranks(2, timeout_s=20) as opened:
        paths = [Path("/dev/shm") / name for name in opened.call(_leave_shared_memory)]
        assert all(path.exists() for path in paths)
    assert not any(path.exists() for path in paths)


@pytest.fixture
def ranks():
    with Ranks(2, {"RANKS_TEST": "set"}, timeout_s=20) as opened:
        yield opened


def test_results_come_by_rank_and_the_environment_stays_there(ranks):
    assert ranks.call(_report, "all", each=[(7,), (8,)]) == [(0, "all", 7, "set"), (1, "all", 8, "set")]
    assert "RANKS_TEST" not in os.environ
    with pytest.raises(RankError, match=r"_misbehave on 2 ranks:\nrank 1 raised:(.|\n)*ValueError: on purpose"):
        ranks.call(_misbehave, "raise")
    assert ranks.usable, "all ranks answered, so nobody is stuck"
    assert len(ranks.call(_report, "again", each=[(1,), (2,)])) == 2


@pytest.mark.parametrize(
    ("how", "what"), [("die", "rank 1 ended with exit code 3"), ("hang", "did not return(.|\n)*_wait_for_nobody")]
)
def test_a_rank_that_does_not_answer_is_named_and_all_are_closed(ranks, how, what):
    ranks.call(_report, "up", each=[(0,), (0,)])
    ranks.timeout_s = 3
    with pytest.raises(RankError, match=what):
        ranks.call(_misbehave, how)
    assert not ranks.usable
    with pytest.raises(RankError, match="closed"):
        ranks.call(_report, "late", each=[(0,), (0,)])
