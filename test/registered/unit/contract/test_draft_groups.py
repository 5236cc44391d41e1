"""Independent drafts under DP attention: placed on the attention TP group, and no collective leaves it."""

from __future__ import annotations

import contextlib
import sys

import pytest
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.testing.live import schedulers
from sglang_dflash_rocm.testing.live.recording import Collective, Request, Trace, Turn, play
from sglang_dflash_rocm.testing.tiny_models import tiny_prompts

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
register_amd_ci(est_time=60, suite="stage-a-test-1-gpu-small-amd")

PROMPTS = tiny_prompts(4)
FIELDS = ("tp_size", "tp_rank", "attn_tp_size", "attn_tp_rank", "attn_dp_size", "attn_dp_rank", "attn_dp_enabled")


def check_isolated(traces: list[Trace]) -> None:
    """Every collective in the draft's scope is on the rank's own attention TP group; an idle rank enters none."""
    for trace in traces:
        for number, turn in enumerate(trace.turns):
            mine = [c for c in turn.collectives if c.in_draft]
            strangers = [c for c in mine if c.ranks != trace.dp_group]
            assert not strangers, f"rank {trace.rank}, turn {number}: left its group {trace.dp_group}: {strangers}"
            assert not (mine and turn.mode == "idle"), f"rank {trace.rank}, turn {number}: idle rank in the draft"


def check_lockstep(traces: list[Trace]) -> None:
    """The members of every group enter the same collectives on it, in the same order."""
    groups = {c.ranks for trace in traces for turn in trace.turns for c in turn.collectives}
    for group in groups:
        sequences = {
            rank: [[c.op for c in turn.collectives if c.ranks == group] for turn in traces[rank].turns]
            for rank in group
        }
        first = sequences[group[0]]
        for rank, ops in sequences.items():
            wrong = next((i for i, (a, b) in enumerate(zip(ops, first, strict=True)) if a != b), None)
            assert wrong is None, f"group {group}: turn {wrong}, rank {rank}: {ops[wrong]} against {first[wrong]}"


@contextlib.contextmanager
def draft_on_full_tp():
    """Fault: the draft is placed on the target's whole TP group."""
    from sglang.srt.runtime_context import get_parallel

    worker = schedulers.draft_worker()
    right = worker.draft_parallel_layout
    group = get_parallel().tp_group
    worker.draft_parallel_layout = type(right)(tp_group=group, attn_tp_size=group.world_size)
    try:
        yield
    finally:
        worker.draft_parallel_layout = right


def _same_load(rid: str, on: tuple[int, ...]) -> list[tuple]:
    mine = [Request(0, rid, PROMPTS[0], 12)]
    return [(mine if dp_rank in on else [], 15) for dp_rank in (0, 0, 1, 1)]


def test_no_collective_of_the_draft_leaves_its_dp_group(dp2):
    """C01, C09. Upstream: speculative/spec_utils.py:830 draft_tp_context, distributed/parallel_state.py:3115. The peer
    DP group is idle, or its draft is at another place: a draft collective over both hangs or mixes their tokens."""
    for on in ((0,), (1,), (0, 1)):
        traces = dp2.call(play, each=_same_load(f"isolated-{on}", on))
        busy = [trace for trace in traces if trace.tokens]
        assert {trace.dp_group for trace in busy} == {((0, 1), (2, 3))[dp_rank] for dp_rank in on}
        assert all(any(c.in_draft for turn in trace.turns for c in turn.collectives) for trace in busy)
        assert all(len(tokens) == 12 for trace in busy for tokens in trace.tokens.values())
        check_isolated(traces)
        check_lockstep(traces)


def test_a_draft_on_the_whole_tp_group_is_noticed(dp2):
    """Fault injection for the test above; both groups have the same load, so that the wrong collectives still meet."""
    traces = dp2.call(play, each=[(*args, draft_on_full_tp) for args in _same_load("full-tp", (0, 1))])
    with pytest.raises(AssertionError, match="left its group"):
        check_isolated(traces)


def test_an_idle_rank_in_the_draft_and_a_skipped_stage_are_noticed():
    def traces(idle: list[Collective]) -> list[Trace]:
        reduce = Collective("all_reduce", (0, 1), False)
        busy = Trace(0, (0, 1), [Turn("decode", collectives=[reduce])], {})
        return [busy, Trace(1, (0, 1), [Turn("idle", collectives=idle)], {})]

    check_lockstep(traces([Collective("all_reduce", (0, 1), False)]))
    with pytest.raises(AssertionError, match="turn 0, rank 1"):
        check_lockstep(traces([]))
    with pytest.raises(AssertionError, match="idle rank in the draft"):
        check_isolated(traces([Collective("all_reduce", (0, 1), True)]))


def _scope(rank: int, layout_of_draft: bool) -> dict:
    """The parallel state before, inside and after the draft's scope, after an exception in it, and on nesting."""
    import torch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_flags, get_parallel
    from sglang.srt.speculative.draft_parallel import legacy_draft_parallel_spec, resolve_draft_parallel_layout
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_utils import draft_tp_context

    if layout_of_draft:
        layout = schedulers.draft_worker().draft_parallel_layout
    else:
        layout = resolve_draft_parallel_layout(legacy_draft_parallel_spec(SpeculativeAlgorithm.DFLASH))

    def state() -> dict:
        parallel = get_parallel()
        values = {name: getattr(parallel, name) for name in FIELDS}
        group = torch.distributed.get_process_group_ranks(parallel_state.get_tp_group().device_group)
        return values | {
            "group": group,
            "patched": parallel_state._TP_STATE_PATCHED,
            "slot": get_flags().dp.scoped_gather_slot,
        }

    result: dict = {"before": state()}
    with draft_tp_context(layout):
        result["inside"] = state()
        gathered = get_parallel().tp_group.all_gather(torch.tensor([rank]), dim=0)
        result["gathered"] = gathered.tolist()
        try:
            with draft_tp_context(layout):
                result["nested"] = "entered"
        except AssertionError as error:
            result["nested"] = str(error)
        result["inside again"] = state()
    result["after"] = state()
    with contextlib.suppress(KeyError), draft_tp_context(layout):
        raise KeyError("in the draft")
    result["after an exception"] = state()
    return result


def check_scope(result: dict, group: list[int], dp_slot: int) -> None:
    """Inside: one TP group of its own, one attention DP rank. Outside, however it was left: as before."""
    inside, width = result["inside"], len(group)
    assert inside["group"] == result["gathered"] == group
    assert (inside["tp_size"], inside["attn_tp_size"], inside["attn_dp_size"]) == (width, width, 1)
    assert inside["attn_dp_rank"] == 0
    assert inside["slot"] in (None, dp_slot)
    assert "already patched" in result["nested"], "a nested scope was entered"
    assert result["inside again"] == inside, "the refused nested scope changed the outer one"
    assert result["before"]["attn_dp_enabled"]
    for moment in ("after", "after an exception"):
        assert result[moment] == result["before"], f"not restored {moment}"


def test_the_draft_scope_narrows_and_restores(dp2):
    """Upstream: distributed/parallel_state.py:3115-3170 patch_tensor_parallel_group. The target's next collective, DP
    gather and LM head read the state that the draft leaves behind, also when the draft raised."""
    for rank, result in enumerate(dp2.call(_scope, True)):
        check_scope(result, [0, 1] if rank < 2 else [2, 3], rank // 2)


def test_the_widths_hide_dp_attention_but_the_flag_does_not(dp2):
    """``attn_dp_enabled`` is published once and stays true in the draft's scope, against what the comment at
    dflash_worker_v2.py:719 says. Code of ours that runs in the scope must ask for ``attn_dp_size``."""
    for result in dp2.call(_scope, True):
        assert result["inside"]["attn_dp_size"] == 1 and result["inside"]["attn_dp_enabled"]


def test_a_scope_one_rank_wide(dp4_groups):
    """C02. The same at TP4/DP4, where a vote or gather in the draft's scope reaches no other rank at all."""
    for rank, result in enumerate(dp4_groups.call(_scope, False)):
        check_scope(result, [rank], rank)


@pytest.mark.parametrize(
    ("moment", "change"),
    [
        ("after", {"attn_dp_enabled": False}),
        ("after an exception", {"tp_size": 2}),
        ("inside", {"attn_dp_size": 2}),
        ("inside", {"group": [0, 1, 2, 3]}),
        ("nested", "entered"),
    ],
)
def test_a_scope_that_leaks_is_noticed(dp2, moment, change):
    result = dp2.call(_scope, True)[0]
    result[moment] = change if isinstance(change, str) else {**result[moment], **change}
    with pytest.raises(AssertionError):
        check_scope(result, [0, 1], 0)


def _layout(rank: int) -> dict:
    worker = schedulers.draft_worker()
    layout, model = worker.draft_parallel_layout, worker.draft_model
    attention = model.layers[0].self_attn
    from sglang.srt.runtime_context import get_parallel

    return {
        "is attention group": layout.tp_group is get_parallel().attn_tp_group,
        "attn_tp_size": layout.attn_tp_size,
        "local_dp": layout.local_dp,
        "declared": type(model).draft_parallel_spec.tp_execution.value,
        "q_heads": attention.num_heads,
        "experts_over": get_parallel().tp_size,
    }


def test_the_draft_is_built_for_its_attention_tp_group(dp2):
    """Upstream: speculative/draft_parallel.py:53-70, models/dflash.py draft_parallel_spec. Weights split four ways and
    used two ways, or the other way round, would still have shapes that fit somewhere."""
    for placed in dp2.call(_layout):
        want = {"is attention group": True, "attn_tp_size": 2, "local_dp": True, "declared": "single_group"}
        assert placed == want | {"q_heads": 4, "experts_over": 4}


@pytest.mark.parametrize(
    ("tp", "dp", "cp", "width"), [(8, 2, 1, 4), (8, 8, 1, 1), (4, 2, 1, 2), (8, 1, 1, None), (8, 1, 2, None)]
)
def test_resolved_layout_by_size(tp, dp, cp, width):
    """Upstream: speculative/draft_parallel.py:53, runtime_context.py:489. TP8/DP2 gives a draft on four ranks. Group
    metadata are SGLang's own test fixture (sglang.test.parallel_groups): eight processes would show no more."""
    layout, groups = _resolve(tp, dp, cp)
    if width is None:
        assert layout.tp_group is None and not layout.local_dp
        return
    assert layout.tp_group is groups["attn_tp_group"]
    assert layout.attn_tp_size == layout.tp_group.world_size == width
    assert layout.local_dp


def test_a_model_that_needs_the_targets_layout_is_not_narrowed():
    """The declaration decides, not the algorithm: what our layout tests rely on is models/dflash.py's SINGLE_GROUP."""
    from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
    from sglang.srt.models.dflash import DFlashDraftModel

    assert DFlashDraftModel.draft_parallel_spec.tp_execution is DraftTPExecution.SINGLE_GROUP
    layout, _ = _resolve(8, 2, 1, DraftParallelSpec(tp_execution=DraftTPExecution.TARGET_LAYOUT))
    assert layout.tp_group is None and layout.attn_tp_size == 4


def _resolve(tp: int, dp: int, cp: int, spec=None):
    from types import SimpleNamespace

    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout

    attn_tp = tp // dp // cp
    groups = {
        "tp_group": SimpleNamespace(world_size=tp, rank_in_group=0),
        "attn_tp_group": SimpleNamespace(world_size=attn_tp, rank_in_group=0),
    }
    sizes = {"tp_size": tp, "tp_rank": 0, "attn_dp_size": dp, "attn_dp_rank": 0, "attn_dp_enabled": dp > 1}
    sizes |= {"attn_tp_size": attn_tp, "attn_tp_rank": 0, "attn_cp_size": cp, "attn_cp_rank": 0}
    sizes |= {"moe_ep_size": 1, "moe_dp_size": 1, "moe_tp_size": tp, "enable_prefill_cp": False, "pp_size": 1}
    with get_parallel().override(**sizes, **groups):
        return resolve_draft_parallel_layout(spec or DFlashDraftModel.draft_parallel_spec), groups


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
