"""DFLASH's prepare step gives back SWA slots behind the window and advances the clock that allows it."""

from __future__ import annotations

import contextlib
import random
import sys
from unittest import mock

import pytest
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.testing.live import schedulers

register_cpu_ci(est_time=45, suite="base-a-test-cpu")
register_amd_ci(est_time=45, suite="stage-a-test-1-gpu-small-amd")

WINDOW, BLOCK, PAGE, INTERVAL = 8, 8, 1, 8
#: What a request may hold: the window, what slid out since the last eviction, and the reserved blocks.
MOST_LIVE = WINDOW + INTERVAL + 3 * BLOCK + PAGE


@contextlib.contextmanager
def no_eviction():
    """Fault: prepare does not evict."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    with mock.patch.object(ScheduleBatch, "maybe_evict_swa", lambda self: None):
        yield


@contextlib.contextmanager
def stopped_clock():
    """Fault: the decode clock of every request stays at zero."""
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

    original = DFlashDraftInputV2.prepare_for_decode

    def prepare(self, batch):
        original(self, batch)
        for req in batch.reqs:
            req.decode_batch_idx = 0

    with mock.patch.object(DFlashDraftInputV2, "prepare_for_decode", prepare):
        yield


def _decode(rank: int, new_tokens: int, turns: int, fault) -> dict:
    """One long answer on each attention TP group: live SWA slots and the request's clock after every turn."""
    from sglang.srt.environ import envs

    scheduler = schedulers.SCHEDULER
    allocator = scheduler.token_to_kv_pool_allocator
    assert envs.SGLANG_SWA_EVICTION_INTERVAL.get() == INTERVAL
    assert scheduler.draft_worker.target_worker.model_runner.sliding_window_size in (WINDOW, WINDOW - 1)
    rnd = random.Random(f"{fault.__name__}")
    prompt = [rnd.randrange(5, 500) for _ in range(WINDOW)]
    before = allocator.swa_available_size()
    with fault():
        schedulers.submit(f"swa-{fault.__name__}", prompt, new_tokens)
        (req,) = scheduler.waiting_queue
        live, clock = [], []
        for _ in range(turns):
            schedulers.turn()
            live.append(before - allocator.swa_available_size())
            clock.append(req.decode_batch_idx)
            if req.finished():
                break
        for _ in range(turns - len(live)):
            schedulers.turn()
    assert req.finished()
    return {"live": live[:-1], "clock": clock[:-1], "tokens": len(req.output_ids)}


def check_bounded(state: dict) -> None:
    """Live SWA slots stay within the window and what is in flight, however long the answer gets."""
    assert state["tokens"] > 3 * MOST_LIVE / 2, "too short: the test shows nothing"
    assert max(state["live"]) <= MOST_LIVE, f"{max(state['live'])} SWA slots live, at most {MOST_LIVE} are needed"
    assert min(state["live"]) > 0


def check_clock(state: dict) -> None:
    """The decode clock goes up by one with every verify step."""
    steps = [b - a for a, b in zip(state["clock"], state["clock"][1:], strict=False)]
    assert steps and set(steps) == {1}, f"decode clock: {state['clock']}"


def test_swa_slots_behind_the_window_are_given_back(dp2):
    """C14. Upstream: speculative/dflash_info_v2.py:129 and 215. Without them a request holds an SWA slot per token and
    is retracted when the small SWA pool is full, with the full pool nearly empty."""
    for state in dp2.call(_decode, 90, 100, contextlib.nullcontext):
        check_bounded(state)
        check_clock(state)


@pytest.mark.parametrize("fault", [no_eviction, stopped_clock])
def test_slots_that_are_kept_are_noticed(dp2, fault):
    for state in dp2.call(_decode, 90, 100, fault):
        with pytest.raises(AssertionError, match="SWA slots live"):
            check_bounded(state)
        if fault is stopped_clock:
            with pytest.raises(AssertionError, match="decode clock"):
                check_clock(state)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
