"""Graph or eager is decided from all-gathered facts, so that every rank decides alike; an idle peer stops nobody."""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import pytest
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.testing.live.recording import Request, Trace, play
from sglang_dflash_rocm.testing.tiny_models import tiny_prompts

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
register_amd_ci(est_time=60, suite="stage-a-test-1-gpu-small-amd")

PROMPTS = tiny_prompts(6)
#: By DP rank: (turn, prompt, new tokens). All in lockstep, so a turn is the same moment everywhere.
LOADS = {
    "both busy": ([(0, 0, 12)], [(0, 1, 12)]),
    "idle peer": ([(0, 0, 12)], []),
    "peer prefills later": ([(0, 0, 16)], [(3, 1, 8)]),
}


def check_one_decision(traces: list[Trace]) -> None:
    """In every turn all ranks that verify decide alike and know the same token counts of their peers; with an idle or
    prefilling peer the decision is eager."""
    for number in range(len(traces[0].turns)):
        turns = [trace.turns[number] for trace in traces]
        steps = [step for turn in turns for step in turn.verify]
        if not steps:
            continue
        decisions = [step["graph"] for step in steps]
        assert len(set(decisions)) == 1, f"turn {number}: graph or eager differs by rank: {decisions}"
        facts = [step["peers"] for step in steps]
        assert all(fact == facts[0] for fact in facts), f"turn {number}: not all-gathered: {facts}"
        modes = {turn.mode for turn in turns}
        assert (modes == {"decode"}) == decisions[0], f"turn {number}: graph={decisions[0]} with modes {modes}"


def check_vote_spans(traces: list[Trace], ranks: tuple[int, ...]) -> None:
    """The first exchange of every turn, in which the facts are gathered, is over all of ``ranks``."""
    for trace in traces:
        for number, turn in enumerate(trace.turns):
            assert any(c.ranks == ranks for c in turn.collectives), f"rank {trace.rank}, turn {number}: no vote"


def check_speculates(traces: list[Trace]) -> None:
    """Busy ranks draft once per verify and get more than one token per verify; idle ranks do not draft."""
    for trace in traces:
        assert all(turn.draft_forwards == 0 for turn in trace.of("idle")), f"rank {trace.rank} drafts while idle"
        if not trace.tokens:
            continue
        steps = trace.of("decode")
        assert [turn.draft_forwards for turn in steps] == [1] * len(steps), f"rank {trace.rank}: a step without draft"
        tokens = sum(map(len, trace.tokens.values())) - len(trace.tokens)
        assert tokens > len(steps), f"rank {trace.rank}: {tokens} tokens in {len(steps)} verify steps"


@contextlib.contextmanager
def device_with_graphs():
    """Stand-in for hardware: the scheduler is told that graphs are not disabled, so that it votes; none is captured."""
    from sglang.srt.managers.scheduler_components import dp_attn

    with mock.patch.object(dp_attn, "cuda_graph_fully_disabled", lambda: False):
        yield


@contextlib.contextmanager
def facts_of_this_rank_only():
    """Fault: the counts that the guards read are the rank's own."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.runtime_context import get_parallel

    original = ForwardBatch.init_mlp_sync_metadata

    def local(self, *args, **kwargs):
        original(self, *args, **kwargs)
        mine = self.original_global_num_tokens_cpu[get_parallel().attn_dp_rank]
        self.original_global_num_tokens_cpu = [mine] * len(self.original_global_num_tokens_cpu)

    with device_with_graphs(), mock.patch.object(ForwardBatch, "init_mlp_sync_metadata", local):
        yield


def _run(ranks, name: str, fault) -> list[Trace]:
    loads = LOADS[name]
    each = []
    for dp_rank in (0, 0, 1, 1):
        requests = [Request(t, f"{name}-{fault.__name__}-{p}", PROMPTS[p], n) for t, p, n in loads[dp_rank]]
        each.append((requests, 20, fault))
    return ranks.call(play, each=each)


@pytest.mark.parametrize("name", LOADS)
def test_graph_or_eager_is_the_same_on_all_ranks(dp2, name):
    """C02. Upstream: speculative/dflash_worker_v2.py:2434-2460 and 2858-2873, scheduler_components/dp_attn.py:369. A
    rank that replays a graph assumes padded counts; one eager peer then waits for rows that never come."""
    traces = _run(dp2, name, device_with_graphs)
    check_one_decision(traces)
    check_vote_spans(traces, (0, 1, 2, 3))
    decisions = {step["graph"] for trace in traces for turn in trace.turns for step in turn.verify}
    assert True in decisions or name == "idle peer", "no turn could have used a graph: the test shows nothing"
    assert False in decisions


def test_a_decision_from_local_facts_is_noticed(dp2):
    with pytest.raises(AssertionError, match="differs by rank"):
        check_one_decision(_run(dp2, "idle peer", facts_of_this_rank_only))


def test_a_decoding_rank_waits_as_idle_while_a_peer_prefills(dp2):
    """Upstream: managers/scheduler.py get_next_batch_to_run, dflash_worker_v2.py:2346. No verify runs beside a prefill,
    so the mixed-round guard of dflash_worker_v2.py:2870 has nothing to decide; a graph replay there would be
    noticed."""
    traces = _run(dp2, "peer prefills later", device_with_graphs)
    (prefill,) = [i for i, turn in enumerate(traces[2].turns) if turn.mode == "extend"]
    mixed = [trace.turns[prefill] for trace in traces]
    assert [turn.mode for turn in mixed] == ["idle", "idle", "extend", "extend"]
    assert not any(turn.verify or turn.draft_forwards for turn in mixed)
    for turn in mixed[:2]:
        turn.mode, turn.verify = "decode", [{"graph": True, "peers": [1, 1]}]
    with pytest.raises(AssertionError, match="graph=True with modes"):
        check_one_decision(traces)


def test_an_idle_peer_does_not_stop_speculation(dp2):
    """C11. Upstream: speculative/dflash_worker_v2.py:2434. The draft is attention-local, so a group whose peer is idle
    has no reason to stop drafting; only the verify goes without graph."""
    traces = _run(dp2, "idle peer", contextlib.nullcontext)
    check_speculates(traces)
    assert traces[2].of("idle") and not traces[2].of("decode")
    for turn in traces[2].of("idle")[1:]:
        assert len(turn.verify) == 1, "the idle rank left out the target's verify"
    for trace in traces[:2]:
        for turn in trace.of("decode"):
            turn.draft_forwards = 0
    with pytest.raises(AssertionError, match="a step without draft"):
        check_speculates(traces)


def _gather(rank: int, votes: list[bool], over: str) -> tuple[bool, list[int]]:
    import torch.distributed as dist
    from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo
    from sglang.srt.runtime_context import get_parallel

    info = MLPSyncBatchInfo(
        num_dp_ranks=4,
        tp_size=1,
        cp_size=1,
        num_tokens=rank + 1,
        num_tokens_for_logprob=rank + 1,
        can_run_decode_cuda_graph=votes[rank],
        can_run_draft_cuda_graph=True,
        can_run_prefill_cuda_graph=False,
        is_extend_in_batch=False,
        local_can_run_tbo=False,
        local_forward_mode=2,
    )
    group = getattr(get_parallel(), over).cpu_group
    try:
        info.all_gather("cpu", group)
    except Exception as error:
        return type(error).__name__, dist.get_process_group_ranks(group)
    return info.can_run_decode_cuda_graph, info.global_num_tokens


@pytest.mark.parametrize("votes", [[True] * 4, [True, True, False, True], [False] * 4])
def test_one_no_is_a_no_everywhere(dp4_groups, votes):
    """C02, second half. Upstream: scheduler_components/dp_attn.py all_gather, at TP4/DP4."""
    assert dp4_groups.call(_gather, votes, "tp_group") == [(all(votes), [1, 2, 3, 4])] * 4


def test_a_vote_over_a_group_one_rank_wide_is_no_silent_yes(dp4_groups):
    """At DP = TP the attention TP group has one rank; a vote moved there must fail, not pass for everybody."""
    for rank, (outcome, ranks) in enumerate(dp4_groups.call(_gather, [True, True, False, True], "attn_tp_group")):
        assert ranks == [rank]
        assert isinstance(outcome, str), f"rank {rank} took its own vote for everybody's: {outcome}"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
