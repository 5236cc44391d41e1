"""The DFLASH worker: the draft's seed, and its graphs under DP attention (``SGLANG_DFLASH_DRAFT_GRAPH``)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang_dflash_rocm import environ, gate
from sglang_dflash_rocm.srt.speculative.dflash_utils import active_verify

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

logger = logging.getLogger(__name__)


def with_target_seed(original: Callable, worker: DFlashWorkerV2, *args: Any, **kwargs: Any) -> None:
    """AROUND ``DFlashWorkerV2.__init__``: the draft starts from the seed that the target's ranks agreed on. When the
    worker is there, one line says which verify is active.

    The draft worker broadcasts a seed over all ranks too, but asks "am I the source?" with its rank inside the draft's
    group (``managers/tp_worker.py:380``): the first rank of every DP group keeps its own, which differs between nodes
    started without ``--random-seed``. With one value everywhere it does not matter who sends.
    """
    from sglang.srt.runtime_context import get_device
    from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

    target_worker = inspect.signature(original).bind(worker, *args, **kwargs).arguments["target_worker"]
    with get_device().override(random_seed=target_worker.random_seed):
        original(worker, *args, **kwargs)
    if worker._target_tp_rank == 0:
        logger.info("DFLASH verify, %s", active_verify(is_dflash_sampling_verify_available()))


def init_cuda_graphs(original: Callable, worker: DFlashWorkerV2) -> None:
    """AROUND ``DFlashWorkerV2.init_cuda_graphs``: ``on`` captures the draft under DP attention, ``off`` never does.

    SGLang keeps the draft eager under DP attention because a graph of the *target* pads to the busiest DP rank. A draft
    need not: it has no DP peers, and enters only collectives of its attention-TP group, whose ranks hold the same
    requests and so take the same decision (see :func:`forward_is_dp_local`).

    Raises:
        SystemExit: ``on``, and no graph could be captured.
    """
    choice = environ.SGLANG_DFLASH_DRAFT_GRAPH.get()
    if choice == "off":
        _without_graphs(worker)
    elif worker.draft_parallel_layout.local_dp:
        with _seen_without_dp(worker):
            original(worker)
        _warm_eager_selector(worker)
    else:
        original(worker)
    captured = list(worker.draft_model_runner.decode_cuda_graph_capture_bs)
    if choice == "on" and not captured:
        gate.stop(
            [
                "SGLANG_DFLASH_DRAFT_GRAPH=on, and SGLang captured no draft graph; its log above says why "
                "(--disable-cuda-graph, --cuda-graph-backend-decode disabled, or less than 1 GB of free memory, for "
                "which a lower --mem-fraction-static helps). Mend that, or set SGLANG_DFLASH_DRAFT_GRAPH=auto"
            ]
        )
    if worker._target_tp_rank == 0:
        logger.info("SGLANG_DFLASH_DRAFT_GRAPH=%s: draft graphs for batch sizes %s", choice, captured or "none")


def forward_is_dp_local(local: bool, model_runner: ModelRunner) -> bool:
    """AFTER ``DecodeCudaGraphRunner._forward_is_dp_local``: a DFLASH draft's graphs are keyed by its own batch.

    SGLang says so for DSpark's dense draft, which runs in the same scope.
    """
    return local or (
        environ.SGLANG_DFLASH_DRAFT_GRAPH.get() == "on"
        and model_runner.is_draft_worker
        and model_runner.spec_algorithm.is_dflash()
    )


@contextmanager
def _seen_without_dp(worker: DFlashWorkerV2) -> Iterator[None]:
    """``init_cuda_graphs`` sees no DP attention when it decides, and the capture inside it sees the real setting, so
    that the captured forward is the one that also runs eagerly."""
    from sglang.srt.runtime_context import get_parallel

    draft_worker = worker._draft_worker

    def capture(**kwargs: bool) -> None:
        with get_parallel().override(attn_dp_enabled=True):
            type(draft_worker).init_cuda_graphs(draft_worker, **kwargs)

    draft_worker.init_cuda_graphs = capture
    try:
        with get_parallel().override(attn_dp_enabled=False):
            yield
    finally:
        del draft_worker.init_cuda_graphs


def _without_graphs(worker: DFlashWorkerV2) -> None:
    from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

    with draft_pp_context(), draft_tp_context(worker.draft_parallel_layout):
        worker._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)
    _warm_eager_selector(worker)


def _warm_eager_selector(worker: DFlashWorkerV2) -> None:
    """What SGLang does where it keeps the draft eager: batches above the largest graph run the selector eagerly too."""
    from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

    if worker.selector is not None:
        with draft_pp_context(), draft_tp_context(worker.draft_parallel_layout):
            worker._warm_eager_selector()
