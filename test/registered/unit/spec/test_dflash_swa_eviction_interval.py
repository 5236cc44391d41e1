"""SGLANG_DFLASH_SWA_TOKEN_INTERVAL: when slots behind the window are freed, what is never freed, and what is reserved.

SGLang's real scheduler, allocator and pools run in a process of their own, on our CPU platform, one turn of the event
loop at a time. The number of drafts that verify accepts is drawn at random.
"""

from __future__ import annotations

import random
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.srt.managers.schedule_batch import aligned_interval
from sglang_dflash_rocm.testing.live import schedulers
from sglang_dflash_rocm.testing.ranks import RankError, Ranks
from sglang_dflash_rocm.testing.server import ServerConfig, free_port
from sglang_dflash_rocm.testing.tiny_models import build_tiny_models

register_cpu_ci(est_time=90, suite="base-a-test-cpu")
register_amd_ci(est_time=90, suite="stage-a-test-1-gpu-small-amd")

pytestmark = pytest.mark.server
WINDOW, BLOCK = 8, 8
VARIABLE = "SGLANG_DFLASH_SWA_TOKEN_INTERVAL"


@given(tokens=st.integers(1, 4096), page=st.sampled_from([1, 16, 32, 64, 128]), block=st.integers(1, 16))
def test_the_interval_is_whole_pages_and_blocks(tokens, page, block):
    interval = aligned_interval(tokens, page, block)
    assert interval % page == 0 and interval % block == 0 and interval >= tokens
    assert interval - tokens < page * block


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return build_tiny_models(tmp_path_factory.mktemp("swa"), "base")


@pytest.fixture(scope="module")
def scheduler(models):
    """``scheduler(interval, page, radix)``: one rank with the real scheduler; ``interval`` 0 is SGLang alone. The same
    one for the same arguments, unless it is to be broken: ``own``."""
    opened: list[tuple[tuple, Ranks]] = []

    def start(interval: int, page: int, radix: bool, own: bool = False) -> Ranks:
        asked = (interval, page, radix)
        for made, ranks in opened:
            if made == asked and not own:
                return ranks
        extra = ("--page-size", str(page), *(() if radix else ("--disable-radix-cache",)))
        config = ServerConfig(models.target, models.draft, extra=extra)
        env = {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", VARIABLE: str(interval)}
        ranks = Ranks(1, {**config.environment(), **env}, timeout_s=240)
        opened.append((() if own else asked, ranks))
        ranks.call(schedulers.open_scheduler, config, [free_port() for _ in range(3)])
        return ranks

    yield start
    for _, ranks in opened:
        ranks.close()


def _random_acceptance(rnd: random.Random):
    """Verify accepts any number of drafts, 0 to the whole block."""

    def accept(*, candidates, target_predict, **_):
        drawn = torch.tensor([rnd.randint(0, BLOCK - 1) for _ in range(len(candidates))], dtype=torch.int32)
        return drawn, target_predict[torch.arange(len(candidates)), drawn.long()].to(torch.int64)

    return mock.patch("sglang.srt.speculative.dflash_worker_v2.compute_dflash_correct_drafts_and_bonus", accept)


def _run(_rank: int, seed: int, requests: int, new_tokens: int) -> dict:
    """Serve ``requests`` of different length together; what the pools looked like after every turn."""
    from sglang.srt.mem_cache.base_prefix_cache import ComponentType

    s = schedulers.SCHEDULER
    rnd = random.Random(seed)
    allocator, rows = s.token_to_kv_pool_allocator, s.req_to_token_pool.req_to_token
    free_full, free_swa = allocator.full_available_size(), allocator.swa_available_size()
    seen: dict = {"most_live": 0, "steps": [], "problems": []}
    with _random_acceptance(rnd):
        for index in range(requests):
            prompt = [rnd.randrange(5, 500) for _ in range(rnd.randrange(4, 60))]
            schedulers.submit(f"{seed}-{index}", prompt, new_tokens + rnd.randrange(20))
        reqs = list(s.waiting_queue)
        evicted = dict.fromkeys((req.rid for req in reqs), 0)
        for _ in range(40 * requests):
            schedulers.turn()
            live = [req for req in reqs if req.kv is not None and req.kv.holds_kv and not req.finished()]
            taken: set[int] = set()
            for req in live:
                row = rows[req.kv.req_pool_idx]
                end, first = req.kv.kv_allocated_len, req.kv.get_evicted_seqlen(ComponentType.SWA)
                mapped = allocator.full_to_swa_index_mapping[row[:end].long()]
                needed = mapped[max(0, req.seqlen - 1 - WINDOW) :].tolist()
                if 0 in needed:
                    seen["problems"].append(f"{req.rid}: a live slot was freed at length {req.seqlen}")
                own = [slot for slot in mapped[first:].tolist() if slot]
                if taken & set(own):
                    seen["problems"].append(f"{req.rid}: shares slots with another request")
                taken.update(own)
                # Until its first eviction a request holds its prompt, which the cap reserves as prefill chunks.
                if first:
                    seen["most_live"] = max(seen["most_live"], len(own))
                if first != evicted[req.rid]:
                    seen["steps"].append(first - evicted[req.rid])
                    evicted[req.rid] = first
            if all(req.finished() for req in reqs):
                break
    if not all(req.finished() for req in reqs):
        seen["problems"].append("a request did not finish")
    for _ in range(3):
        schedulers.turn()
    s.flush_cache()
    if (allocator.full_available_size(), allocator.swa_available_size()) != (free_full, free_swa):
        seen["problems"].append(
            f"leak: full {free_full} -> {allocator.full_available_size()}, SWA {free_swa} -> "
            f"{allocator.swa_available_size()}"
        )
    return seen


def _slots_per_request(_rank: int, page: int, env: dict[str, str]) -> int:
    """What one request more adds to the pool, with these variables set."""
    import os

    from sglang.srt.model_executor import pool_configurator

    with mock.patch.dict(os.environ, env):
        cap = [
            pool_configurator.compute_swa_request_cap(
                page_size=page, window=WINDOW, attn_dp_size=1, max_running_requests=requests
            )
            for requests in (2, 3)
        ]
    return cap[1] - cap[0]


CASES = [
    pytest.param(20, 1, False, id="page1-no-radix", marks=pytest.mark.slow),
    pytest.param(20, 16, False, id="page16-no-radix"),
    pytest.param(20, 16, True, id="page16-radix"),
]


@pytest.mark.parametrize(("interval", "page", "radix"), CASES)
def test_slots_in_the_window_stay_and_no_page_leaks(scheduler, interval, page, radix):
    rank = scheduler(interval, page, radix)
    aligned = aligned_interval(interval, page, BLOCK)
    (per_request,) = rank.call(_slots_per_request, page, {})
    steps = []
    for seed in range(3):
        (seen,) = rank.call(_run, seed, 4, 90)
        assert not seen["problems"], seen["problems"][:3]
        assert seen["most_live"] <= per_request + (page if radix else 0), (seen["most_live"], per_request)
        steps += seen["steps"]
    # The first eviction of a request may fall short of the interval by what is kept for whole pages.
    assert steps and sum(step >= aligned - page for step in steps) >= 0.9 * len(steps), steps


def test_the_cap_reserves_the_interval_once(scheduler):
    """Trigger and cap count alike: an interval costs each request its tokens and one block, not tokens times block."""
    rank = scheduler(20, 16, False)
    less, more = (rank.call(_slots_per_request, 16, {VARIABLE: tokens})[0] for tokens in ("64", "128"))
    assert more - less == 64


def test_without_the_hooks_sglang_reserves_the_interval_times_the_block(scheduler):
    """What this mends; and off means off."""
    rank, name = scheduler(0, 16, False), "SGLANG_SWA_EVICTION_INTERVAL"
    less, more = (rank.call(_slots_per_request, 16, {name: tokens})[0] for tokens in ("64", "128"))
    assert more - less == 64 * BLOCK


def test_slots_freed_too_early_are_noticed(scheduler):
    (seen,) = scheduler(20, 16, False).call(_run_evicting_too_much)
    assert any("live slot" in problem for problem in seen["problems"])


def test_slots_never_freed_are_noticed(scheduler):
    """SGLang's own check of its pools, which runs in every idle turn, is part of ours."""
    with pytest.raises(RankError, match="memory leak detected"):
        scheduler(20, 16, False, own=True).call(_run_forgetting_a_page)


def _run_evicting_too_much(rank: int) -> dict:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    evict = ScheduleBatch._evict_swa
    with mock.patch.object(ScheduleBatch, "_evict_swa", lambda self, req, n, **kw: evict(self, req, n + 32, **kw)):
        return _run(rank, 1, 4, 90)


def _run_forgetting_a_page(rank: int) -> dict:
    allocator = type(schedulers.SCHEDULER.token_to_kv_pool_allocator)
    free = allocator.free_swa_segment
    with mock.patch.object(allocator, "free_swa_segment", lambda self, slots, **kw: free(self, slots[:-16], **kw)):
        return _run(rank, 1, 4, 90)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
