"""Whose group it is: graphs are captured with the attention TP group, shared-memory features are waited for in it."""

from __future__ import annotations

import contextlib
import pickle
import sys
from array import array
from unittest import mock

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.testing.live import schedulers

register_cpu_ci(est_time=45, suite="base-a-test-cpu")
register_amd_ci(est_time=45, suite="stage-a-test-1-gpu-small-amd")


def _captured(rank: int, forget: str | None = None) -> dict:
    """Which groups ``graph_capture`` enters, and with which context. Stand-in for hardware: a group's own capture,
    which makes a device stream, is replaced by a note."""
    import torch.distributed as dist
    from sglang.srt.distributed import parallel_state

    entered: list[tuple] = []

    @contextlib.contextmanager
    def note(self, graph_capture_context=None, stream=None):
        context = graph_capture_context or stream
        entered.append((id(self), tuple(dist.get_process_group_ranks(self.device_group)), context))
        yield context
        entered.append((id(self), "left", context))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(parallel_state.GroupCoordinator, "graph_capture", note))
        if forget:
            stack.enter_context(mock.patch.object(parallel_state, forget, None))
        with parallel_state.graph_capture(stream="the capture stream"):
            inside = list(entered)
    return {
        "groups": [ranks for _, ranks, _ in inside],
        "distinct": len({ident for ident, _, _ in inside}) == len(inside),
        "contexts": {context for _, _, context in inside},
        "left": sum(ranks == "left" for _, ranks, _ in entered) == len(inside),
    }


def check_captured(state: dict, group: tuple[int, ...]) -> None:
    """The attention TP group is entered, no group twice, all on one stream, and all are left."""
    assert group in state["groups"], f"attention TP group {group} is not captured: {state['groups']}"
    assert (0, 1, 2, 3) in state["groups"]
    assert state["distinct"] and state["left"] and state["contexts"] == {"the capture stream"}, state


def test_graphs_are_captured_with_the_attention_tp_group(dp2):
    """Upstream: distributed/parallel_state.py:2320-2326. A group that is not entered keeps its eager collectives, which
    are not allowed in a capture or fall back to another algorithm than at replay."""
    for rank, state in enumerate(dp2.call(_captured)):
        check_captured(state, ((0, 1), (2, 3))[rank // 2])


def test_a_group_left_out_of_the_capture_is_noticed(dp2):
    for rank, state in enumerate(dp2.call(_captured, "_ATTN_TP")):
        with pytest.raises(AssertionError, match="is not captured"):
            check_captured(state, ((0, 1), (2, 3))[rank // 2])


def _image_request(rid: str, feature):
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
    from sglang.srt.sampling.sampling_params import SamplingParams

    item = MultimodalDataItem(modality=Modality.IMAGE, feature=feature)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", [5, 6]),
        input_embeds=None,
        mm_inputs=MultimodalProcessorOutput(mm_items=[item]),
        token_type_ids=None,
        sampling_params=SamplingParams(),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


def _consume(rank: int, busy: list[int], bad: list[int], blind: bool = False) -> dict | None:
    """The receiver's last step on DP ranks ``busy``: features come in real shared memory from the group's first rank,
    are waited for, read, and agreed on. Ranks ``bad`` cannot read. ``blind`` hides DP attention (fault)."""
    import torch.distributed as dist
    from sglang.srt.managers import mm_utils
    from sglang.srt.managers.scheduler_components import request_receiver
    from sglang.srt.runtime_context import get_parallel

    parallel, receiver = get_parallel(), schedulers.SCHEDULER.request_receiver
    dp_rank = parallel.attn_dp_rank
    if dp_rank not in busy:
        return None
    # On a GPU machine the transport is chosen by the hardware; shared memory is the one in question here.
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(mm_utils, "_is_default_tensor_transport", False))
    stack.enter_context(mock.patch.object(receiver.model_config, "is_multimodal", True))
    calls = []
    for name in ("barrier", "all_reduce"):
        original = getattr(request_receiver, name)

        def noted(*args, _name=name, _original=original, **kwargs):
            calls.append((_name, dist.get_process_group_ranks(kwargs["group"])))
            return _original(*args, **kwargs)

        stack.enter_context(mock.patch.object(request_receiver, name, noted))
    if rank in bad:
        broken = mock.Mock(side_effect=OSError("no such segment"))
        stack.enter_context(mock.patch.object(request_receiver, "unwrap_shm_features", broken))
    if blind:
        stack.enter_context(parallel.override(attn_dp_enabled=False))
    with stack:
        feature = torch.arange(6.0).view(2, 3) + 100 * dp_rank
        # As the pointer travels: pickled by the tokenizer, opened by every rank that unpickles it.
        sent = pickle.dumps(mm_utils.ShmPointerMMData(feature)) if parallel.attn_tp_rank == 0 else None
        pointer = pickle.loads(parallel.attn_tp_group.broadcast_object(sent, src=0))
        request = _image_request(f"image-{dp_rank}", pointer)
        receiver._finalize_shm_features([request])
    inputs = request.mm_inputs
    rejected = not hasattr(inputs, "mm_items")
    return {
        "calls": calls,
        "rejected": rejected,
        "right": not rejected and torch.equal(inputs.mm_items[0].feature, feature),
    }


def check_consumed(states: list[dict | None], rejected: bool = False) -> None:
    """Each busy rank waits and agrees within its own attention TP group only, and all of a group decide alike."""
    for rank, state in enumerate(states):
        if state is None:
            continue
        group = [0, 1] if rank < 2 else [2, 3]
        assert state["calls"] == [("barrier", group), ("all_reduce", group)], f"rank {rank}: {state['calls']}"
        assert state["rejected"] == rejected, f"rank {rank}: rejected={state['rejected']}"
        assert state["right"] != rejected


@pytest.mark.parametrize("busy", [[0], [1], [0, 1]])
def test_shared_memory_is_waited_for_within_the_attention_group(dp2, busy):
    """Upstream: managers/scheduler_components/request_receiver.py:266-272. The other DP rank did not get the request
    and will not come to the barrier."""
    check_consumed(dp2.call(_consume, busy, []))


def test_ranks_of_a_group_reject_the_same_request(dp2):
    """One rank that cannot read makes its whole group reject, or the others wait for it in the forward; the other group
    is not concerned."""
    states = dp2.call(_consume, [0, 1], [1])
    check_consumed([*states[:2], None, None], rejected=True)
    check_consumed([None, None, *states[2:]])


def test_a_barrier_over_the_whole_tp_group_is_noticed(dp2):
    with pytest.raises(AssertionError, match=r"\[0, 1, 2, 3\]"):
        check_consumed(dp2.call(_consume, [0, 1], [], True))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
