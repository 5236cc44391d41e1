"""What a stepped scheduler did, turn by turn: its collectives, draft forwards, verify decisions and metadata.

Runs inside the processes of :class:`~sglang_dflash_rocm.testing.ranks.Ranks`, on the scheduler that
``schedulers.open_scheduler`` built. Nothing is replaced: every wrapper notes the call and passes it on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from . import schedulers

#: Functions of ``torch.distributed`` that a group enters together.
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
#: Tensor methods that wait for the device.
HOST_SYNCS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@dataclass(frozen=True)
class Collective:
    """One collective: ``ranks`` of its group, and whether the draft's narrowed scope was entered."""

    op: str
    ranks: tuple[int, ...]
    in_draft: bool


@dataclass(frozen=True)
class Request:
    """A request that reaches its attention TP group right before ``turn``."""

    turn: int
    rid: str
    prompt: list[int]
    new_tokens: int


@dataclass
class Turn:
    """One turn of one rank. ``mode`` is ``None`` where no batch ran.

    ``verify`` holds, per verify forward, its mode, graph decision and token counts as the target worker received them;
    ``stages`` the order in which verify was prepared, padded and given metadata, with the rows each of them saw.
    """

    mode: str | None = None
    batch_size: int = 0
    global_num_tokens: list[int] | None = None
    collectives: list[Collective] = field(default_factory=list)
    draft_forwards: int = 0
    verify: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Trace:
    """All turns of one rank and the tokens of its requests."""

    rank: int
    dp_group: tuple[int, ...]
    turns: list[Turn]
    tokens: dict[str, list[int]]

    def of(self, mode: str) -> list[Turn]:
        """Turns whose batch had this mode: ``extend``, ``decode`` (draft and verify) or ``idle``."""
        return [turn for turn in self.turns if turn.mode == mode]


def play(
    rank: int,
    requests: list[Request],
    turns: int,
    fault: Callable[[], contextlib.AbstractContextManager] | None = None,
    *fault_args: Any,
) -> Trace:
    """Submit ``requests`` at their turns, take ``turns`` turns and say what happened. ``fault`` breaks SGLang on
    purpose for the duration; it must leave all ranks able to finish."""
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    group = tuple(dist.get_process_group_ranks(get_parallel().attn_tp_group.device_group))
    trace, live = Trace(rank, group, [], {}), {}
    with fault(*fault_args) if fault else contextlib.nullcontext():
        for number in range(turns):
            for request in requests:
                if request.turn == number:
                    schedulers.submit(request.rid, request.prompt, request.new_tokens)
                    live |= {req.rid: req for req in schedulers.SCHEDULER.waiting_queue}
            with recorded() as turn:
                batch = schedulers.turn()
            if batch is not None:
                turn.global_num_tokens = batch.global_num_tokens
            trace.turns.append(turn)
    # A verify step may commit more than the request asked for; SGLang cuts the rest off when it answers.
    limits = {request.rid: request.new_tokens for request in requests}
    trace.tokens = {rid: list(req.output_ids)[: limits[rid]] for rid, req in live.items()}
    return trace


@contextlib.contextmanager
def recorded() -> Iterator[Turn]:
    """Note what this process does, in the yielded turn."""
    turn = Turn()
    with contextlib.ExitStack() as stack:
        _watch_collectives(stack, turn)
        _watch_worker(stack, turn)
        _watch_stages(stack, turn)
        yield turn


def _watch_collectives(stack: contextlib.ExitStack, turn: Turn) -> None:
    import torch.distributed as dist
    from sglang.srt.distributed import parallel_state

    def note(op: str, group: dist.ProcessGroup, _tensors: list) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        turn.collectives.append(Collective(op, ranks, parallel_state._TP_STATE_PATCHED))

    for op in COLLECTIVES:
        stack.enter_context(mock.patch.object(dist, op, noted(op, note)))


def noted(op: str, note: Callable[[str, Any, list], None]) -> Callable:
    """``torch.distributed``'s function ``op``, with ``note(op, group, tensor arguments)`` called before it."""
    import torch
    import torch.distributed as dist

    original = getattr(dist, op)

    def call(*args, **kwargs):
        given = (*args, *kwargs.values())
        group = next((a for a in given if isinstance(a, dist.ProcessGroup)), None) or dist.group.WORLD
        note(op, group, [a for a in given if isinstance(a, torch.Tensor)])
        return original(*args, **kwargs)

    return call


def _watch_worker(stack: contextlib.ExitStack, turn: Turn) -> None:
    worker = schedulers.draft_worker()
    target, draft = worker.target_worker, worker.draft_model_runner
    run_batch, run_draft, run_target = schedulers.SCHEDULER.run_batch, draft.forward, target.forward_batch_generation

    def batch_ran(batch, *args, **kwargs):
        turn.mode, turn.batch_size = batch.forward_mode.name.lower(), batch.batch_size()
        return run_batch(batch, *args, **kwargs)

    def draft_ran(*args, **kwargs):
        turn.draft_forwards += 1
        return run_draft(*args, **kwargs)

    def target_ran(*args, **kwargs):
        forward = kwargs.get("forward_batch")
        if kwargs.get("is_verify"):
            turn.verify.append(
                {
                    "mode": forward.forward_mode.name.lower(),
                    "graph": bool(forward.can_run_decode_cuda_graph),
                    "peers": forward.original_global_num_tokens_cpu,
                    "tokens": list(forward.global_num_tokens_cpu),
                    "skip_metadata": kwargs.get("skip_attn_backend_init"),
                }
            )
        return run_target(*args, **kwargs)

    stack.enter_context(mock.patch.object(schedulers.SCHEDULER, "run_batch", batch_ran))
    stack.enter_context(mock.patch.object(draft, "forward", draft_ran))
    stack.enter_context(mock.patch.object(target, "forward_batch_generation", target_ran))


def _watch_stages(stack: contextlib.ExitStack, turn: Turn) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    backend = schedulers.draft_worker().target_worker.model_runner.attn_backend
    prepare, pad, metadata = (
        DFlashVerifyInput.prepare_for_verify,
        ForwardBatch.prepare_mlp_sync_batch,
        backend.init_forward_metadata,
    )

    def note(stage: str, forward, syncs: dict[str, int], **more) -> None:
        turn.stages.append(
            {
                "stage": stage,
                "mode": forward.forward_mode.name.lower(),
                "batch_size": forward.batch_size,
                "rows": int(forward.input_ids.shape[0]),
                "positions": int(forward.positions.shape[0]),
                "out_cache_loc": int(forward.out_cache_loc.shape[0]) if forward.out_cache_loc is not None else 0,
                "syncs": syncs,
                **more,
            }
        )

    def prepared(self, batch, worker, **kwargs):
        with counted_syncs() as syncs:
            result = prepare(self, batch, worker, **kwargs)
        note("prepare", result[0], syncs, **kwargs)
        return result

    def padded(self, runner):
        with counted_syncs() as syncs:
            pad(self, runner)
        note("pad", self, syncs)

    def built(forward, *args, **kwargs):
        note("metadata", forward, {})
        return metadata(forward, *args, **kwargs)

    stack.enter_context(mock.patch.object(DFlashVerifyInput, "prepare_for_verify", prepared))
    stack.enter_context(mock.patch.object(ForwardBatch, "prepare_mlp_sync_batch", padded))
    stack.enter_context(mock.patch.object(backend, "init_forward_metadata", built))


@contextlib.contextmanager
def counted_syncs() -> Iterator[dict[str, int]]:
    """How often each of :data:`HOST_SYNCS` is called. On a CPU tensor nothing waits, but the call is the same."""
    import torch

    counts: dict[str, int] = {}

    def watch(name: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in HOST_SYNCS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, watch(name, getattr(torch.Tensor, name))))
        yield counts
