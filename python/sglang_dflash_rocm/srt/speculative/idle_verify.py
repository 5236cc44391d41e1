"""Target verify by graph although a DP rank is idle (``SGLANG_DFLASH_IDLE_VERIFY_GRAPH``).

SGLang's DFLASH worker verifies eagerly on every rank as soon as one DP rank has no request: it runs the idle rank
eagerly, and a rank that replays a graph assumes the padded bucket where an eager one contributes its raw count to the
DP gather. The graph runner itself can replay on an idle rank, as it does for EAGLE: zero real rows in the same bucket.

All ranks must decide alike, from what every rank already has: the gathered request counts, the gathered graph vote,
the gathered prefill flag, and the captured batch sizes, which are compared once at start-up. No collective is added to
a step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_dflash_rocm import gate

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

logger = logging.getLogger(__name__)
_AGREED = "dflash_verify_by_graph"


def replay_with_idle_ranks(
    counts: Sequence[int], *, dp_ranks: int, all_vote_graph: bool, any_prefill: bool, largest_graph: int
) -> bool:
    """Whether every rank replays its verify graph in this round.

    Args:
        counts: requests of each DP rank, as gathered by the scheduler; 0 is an idle rank.
        dp_ranks: attention-DP ranks; ``counts`` of another length are local counts, on which no agreement can rest.
        all_vote_graph: no rank asked for eager execution; gathered.
        any_prefill: some rank runs a prefill; gathered.
        largest_graph: largest captured batch size, the same on all ranks.
    """
    return (
        len(counts) == dp_ranks
        and min(counts) == 0
        and all_vote_graph
        and not any_prefill
        and max(counts) <= largest_graph
    )


def note_agreement(
    result: tuple[ForwardBatch, bool],
    verify_input: DFlashVerifyInput,
    batch: ScheduleBatch,
    target_worker: TpModelWorker,
    **_: Any,
) -> None:
    """AFTER ``DFlashVerifyInput.prepare_for_verify``: decide while the gathered vote is still at hand; SGLang's worker
    overwrites it next."""
    from sglang.srt.runtime_context import get_parallel

    forward_batch = result[0]
    counts = forward_batch.original_global_num_tokens_cpu
    sizes = target_worker.model_runner.decode_cuda_graph_capture_bs
    agreed = bool(counts and sizes) and replay_with_idle_ranks(
        counts,
        dp_ranks=get_parallel().num_dp_ranks,
        all_vote_graph=bool(batch.can_run_decode_cuda_graph),
        any_prefill=bool(batch.is_extend_in_batch),
        largest_graph=max(sizes),
    )
    setattr(forward_batch, _AGREED, agreed)


def apply_agreement(_worker: TpModelWorker, *_: Any, forward_batch: ForwardBatch | None = None, **__: Any) -> None:
    """BEFORE ``TpModelWorker.forward_batch_generation``: put back what the DFLASH worker took away for an idle rank."""
    if getattr(forward_batch, _AGREED, False):
        forward_batch.can_run_decode_cuda_graph = True


def compare_graphs(_result: None, worker: TpModelWorker, *_: Any, **__: Any) -> None:
    """AFTER ``TpModelWorker.init_cuda_graphs``: the same graphs on every rank, or no start.

    Raises:
        SystemExit: no verify graph was captured, or ranks captured different batch sizes.
    """
    import torch
    from sglang.srt.runtime_context import get_parallel

    if worker.is_draft_worker or not worker.model_runner.spec_algorithm.is_dflash():
        return
    world = get_parallel().world_group
    sizes: list = [None] * world.world_size
    torch.distributed.all_gather_object(sizes, worker.model_runner.decode_cuda_graph_capture_bs, group=world.cpu_group)
    if not sizes[0] or any(other != sizes[0] for other in sizes):
        gate.stop(
            [
                f"SGLANG_DFLASH_IDLE_VERIFY_GRAPH=1 needs the same verify graphs on every rank, captured were {sizes}: "
                "drop --disable-cuda-graph and --cuda-graph-backend-decode disabled, give --cuda-graph-bs-decode and "
                "--max-running-requests explicitly, or unset the variable"
            ]
        )
    if world.rank_in_group == 0:
        logger.info("SGLANG_DFLASH_IDLE_VERIFY_GRAPH=1: idle DP ranks replay verify graphs of batch sizes %s", sizes[0])
