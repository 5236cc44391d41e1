"""Verify under DP attention: metadata after padding, tokens counted and not requests, idle batches, no host syncs."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.testing.live import schedulers
from sglang_dflash_rocm.testing.live.recording import HOST_SYNCS, Request, Trace, counted_syncs, play
from sglang_dflash_rocm.testing.tiny_models import tiny_prompts

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
register_amd_ci(est_time=60, suite="stage-a-test-1-gpu-small-amd")

BLOCK = 8
PROMPTS = tiny_prompts(8)
#: Requests by DP rank.
LOADS = {"ragged": (4, 1), "idle peer": (3, 0)}


def _run(ranks, name: str, fault=None) -> list[Trace]:
    each = []
    for dp_rank in (0, 0, 1, 1):
        requests = [
            Request(0, f"{name}-{dp_rank}-{i}", PROMPTS[4 * dp_rank + i], 8) for i in range(LOADS[name][dp_rank])
        ]
        each.append((requests, 12, fault))
    return ranks.call(play, each=each)


def check_verify_stages(traces: list[Trace]) -> None:
    """Each verify is prepared without metadata, padded, and only then given metadata, once, for the padded rows."""
    for trace in traces:
        for number, turn in enumerate(trace.turns):
            if not turn.verify:
                continue
            where = f"rank {trace.rank}, turn {number} ({turn.mode})"
            stages = [stage["stage"] for stage in turn.stages]
            assert stages == ["prepare", "pad", "metadata"], f"{where}: {stages}"
            prepared, padded, metadata = turn.stages
            assert prepared["defer_metadata_init"] and turn.verify[0]["skip_metadata"] is None, where
            want = turn.verify[0]["tokens"]
            assert want == [n * BLOCK for n in turn.verify[0]["peers"]], f"{where}: counts requests: {want}"
            for stage in (padded, metadata):
                sizes = {stage[key] for key in ("rows", "positions", "out_cache_loc")}
                assert sizes == {stage["batch_size"] * BLOCK}, f"{where}: {stage['stage']}: {stage}"
            assert padded["rows"] >= prepared["rows"], where


@contextlib.contextmanager
def metadata_before_padding():
    """Fault: verify plans its metadata at once, as it does without DP attention."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    original = DFlashVerifyInput.prepare_for_verify

    def eager(self, batch, worker, **_):
        return original(self, batch, worker, defer_metadata_init=False)

    with mock.patch.object(DFlashVerifyInput, "prepare_for_verify", eager):
        yield


@contextlib.contextmanager
def busy_ranks_read_a_length():
    """Fault: a length is read to the host on the branch that only busy ranks take."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    original = DFlashVerifyInput.prepare_for_verify

    def reads(self, batch, worker, **kwargs):
        if len(batch.seq_lens):
            batch.seq_lens.max().item()
        return original(self, batch, worker, **kwargs)

    with mock.patch.object(DFlashVerifyInput, "prepare_for_verify", reads):
        yield


@pytest.mark.parametrize("name", LOADS)
def test_metadata_is_built_once_after_padding(dp2, name):
    """C04, C09. Upstream: speculative/dflash_info.py:66-124, dflash_worker_v2.py:2440, 2845, 2875. DP padding changes
    the rows of a rank, an idle one's from none; metadata of before has other sizes than the forward."""
    traces = _run(dp2, name)
    check_verify_stages(traces)
    padded = [stage for trace in traces[2:] for turn in trace.turns for stage in turn.stages if stage["stage"] == "pad"]
    assert any(stage["rows"] > LOADS[name][1] * BLOCK for stage in padded), "no row was padded: the test shows nothing"


def test_metadata_of_before_padding_is_noticed(dp2):
    with pytest.raises(AssertionError, match="prepare"):
        check_verify_stages(_run(dp2, "idle peer", metadata_before_padding))


def test_busy_and_idle_ranks_sync_with_the_host_alike(dp2):
    """C03. Upstream: speculative/dflash_info.py:66, model_executor/forward_batch_info.py:1753. A device value read on a
    branch that only some ranks take makes them wait where the others go on."""
    check_same_syncs(_run(dp2, "idle peer"))
    with pytest.raises(AssertionError, match="rank 2.*against.*item"):
        check_same_syncs(_run(dp2, "idle peer", busy_ranks_read_a_length))


def test_syncs_are_counted():
    """The counter sees every way to read a tensor that metadata code uses."""
    x = torch.tensor([3])
    with counted_syncs() as counts:
        _ = (x.item(), x.tolist(), x.cpu(), x.nonzero(), bool(x), int(x), float(x), [0] * 4)[x[0]]
    assert set(counts) == set(HOST_SYNCS)


def check_same_syncs(traces: list[Trace]) -> None:
    """While verify is prepared and padded, every rank reads tensors to the host as often as the others."""
    turns = [i for i, turn in enumerate(traces[0].turns) if turn.verify]
    assert turns
    for number in turns:
        for stage in (0, 1):
            counts = [trace.turns[number].stages[stage]["syncs"] for trace in traces]
            for trace, mine in zip(traces, counts, strict=True):
                assert mine == counts[0], f"rank {trace.rank}, turn {number}: {mine} against {counts[0]}"


def _padded(rank: int, block: int, requests: list[int], per_request: int | None = None) -> dict:
    """Sizes of a verify batch of ``requests`` by DP rank, after the real count, alignment and padding."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    runner = schedulers.draft_worker().target_worker.model_runner
    bs = requests[get_parallel().attn_dp_rank]
    ids = torch.zeros(bs * block, dtype=torch.int64)
    verify = DFlashVerifyInput(draft_token=ids, positions=ids.clone(), draft_token_num=block)
    if per_request is not None:
        verify.num_tokens_per_req = per_request
    forward = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY if bs else ForwardMode.IDLE,
        batch_size=bs,
        input_ids=ids,
        positions=ids.clone(),
        req_pool_indices=torch.arange(bs),
        seq_lens=torch.full((bs,), 5),
        seq_lens_cpu=torch.full((bs,), 5),
        out_cache_loc=ids.clone(),
        seq_lens_sum=5 * bs,
        spec_info=verify,
    )
    # A data carrier with the fields that the scheduler's all-gather leaves on the batch.
    gathered = SimpleNamespace(
        global_num_tokens=requests,
        global_num_tokens_for_logprob=requests,
        dp_spec_prefill_coordination_applied=False,
        can_run_decode_cuda_graph=False,
        can_run_dp_draft_cuda_graph=False,
    )
    forward.init_mlp_sync_metadata(gathered, torch.device("cpu"))
    counted = list(forward.global_num_tokens_cpu)
    if per_request is not None:
        return {"counted": counted}
    forward.prepare_mlp_sync_batch(runner)
    # Packing KV indices is a GPU kernel; the query index does not depend on it.
    translator = SimpleNamespace(pack_read_stream=lambda *_a, **_k: None)
    n = forward.batch_size
    _, kv_indptr, qo_indptr, _ = verify.generate_attn_arg_prefill(
        req_pool_indices=forward.req_pool_indices,
        paged_kernel_lens=forward.seq_lens,
        paged_kernel_lens_sum=int(forward.seq_lens.sum()),
        translator=translator,
        plan=None,
    )
    return {
        "counted": counted,
        "rows": len(forward.input_ids),
        "requests": n,
        "q_end": int(qo_indptr[-1]),
        "indptrs": (len(qo_indptr), len(kv_indptr)),
    }


def check_rows(sizes: dict, block: int, requests: list[int]) -> None:
    """Counts are in tokens; query rows, requests and the end of the query index belong together."""
    assert sizes["counted"] == [n * block for n in requests], f"DP metadata counts {sizes['counted']} tokens"
    assert sizes["rows"] == sizes["requests"] * block == sizes["q_end"], f"query rows and index differ: {sizes}"
    assert sizes["indptrs"] == (sizes["requests"] + 1,) * 2


@pytest.mark.parametrize(("block", "requests"), [(8, [4, 0]), (8, [1, 4]), (4, [3, 1]), (2, [1, 5]), (8, [0, 1])])
def test_counts_are_tokens_and_rows_fit_the_index(dp2, block, requests):
    """C06, C07, C04. Upstream: forward_batch_info.py:920, 1753, speculative/spec_info.py:465. Requests taken for tokens
    cut the block short: the text stays right and acceptance falls."""
    for sizes in dp2.call(_padded, block, requests):
        check_rows(sizes, block, requests)


def test_four_requests_of_block_three_are_twelve_tokens(dp2):
    """C06, the reported sizes; with one token per request it would be four, which must not pass."""
    for sizes in dp2.call(_padded, 3, [4, 4]):
        check_rows(sizes, 3, [4, 4])
        assert sizes["counted"] == [12, 12]
    with pytest.raises(AssertionError, match="counts"):
        check_rows(dp2.call(_padded, 3, [4, 4], 1)[0], 3, [4, 4])


def test_a_block_that_does_not_divide_by_attention_tp_gets_rows_without_a_request(dp2):
    """C07: aligning 1 x 3 tokens to attention TP 2 gives four query rows and an index that ends at three. Block 8 at
    attention TP 1, 2, 4 and 8 never does; a backend that gets such a block must cut or extend."""
    sizes = dp2.call(_padded, 3, [1, 1])[0]
    assert (sizes["rows"], sizes["q_end"]) == (4, 3)
    with pytest.raises(AssertionError, match="query rows and index differ"):
        check_rows(sizes, 3, [1, 1])


def _idle(rank: int, mrope: bool) -> dict:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    scheduler = schedulers.SCHEDULER
    runner = scheduler.draft_worker.target_worker.model_runner
    batch = scheduler.dp_attn_adapter.get_idle_batch()
    batch.global_num_tokens = batch.global_num_tokens_for_logprob = [2, 2]
    with mock.patch.object(runner.model_config, "model_is_mrope", mrope):
        forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        before = (tuple(forward.positions.shape), _shape(forward.mrope_positions))
        forward.prepare_mlp_sync_batch(runner)
    return {"before": before, "after": (tuple(forward.positions.shape), _shape(forward.mrope_positions))}


def _shape(tensor) -> tuple | None:
    return None if tensor is None else tuple(tensor.shape)


def check_idle_positions(state: dict, mrope: bool) -> None:
    """No positions, and with M-RoPE three rows of none; after padding as many as rows."""
    assert state["before"] == ((0,), (3, 0) if mrope else None)
    assert state["after"] == ((2,), (3, 2) if mrope else None)


@pytest.mark.parametrize("mrope", [False, True])
def test_idle_batches_have_empty_positions(dp2, mrope):
    """Upstream: model_executor/forward_batch_info.py:1176-1184. Padding turns an idle rank into rows; a model with
    M-RoPE then reads three position rows that nobody made."""
    for state in dp2.call(_idle, mrope):
        check_idle_positions(state, mrope)
        with pytest.raises(AssertionError):
            check_idle_positions({**state, "before": ((0,), None if mrope else (3, 0))}, mrope)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
