"""A plugin that writes down what each rank does: every collective with its group, and what a draft step costs the host.

Loaded only by the tests that ask for it (fixture ``record``). Each process appends JSON lines to a file of its own.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.utils._python_dispatch import TorchDispatchMode

import faults
from sglang_dflash_rocm.testing.live.recording import COLLECTIVES, noted

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_out = None


def install() -> None:
    """Entry point: record in this process into ``DFLASH_RECORD_DIR``."""
    global _out
    if "DFLASH_FAULT" in os.environ:
        faults.install()
    _out = Path(os.environ["DFLASH_RECORD_DIR"], f"{os.getpid()}.jsonl").open("a", buffering=1)
    for op in COLLECTIVES:
        setattr(dist, op, noted(op, _collective))
    HookRegistry.register(f"{RUNNER}.forward", _counted_draft_step, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.tp_worker.TpModelWorker.__init__", _seed, HookType.AFTER)
    backend = "sglang_dflash_rocm.cpu.graph.RerunGraphBackend.replay"
    if os.environ.get("SGLANG_DFLASH_CPU_GRAPH"):
        HookRegistry.register(backend, _not_counted, HookType.AROUND)
    attention = "sglang_dflash_rocm.cpu.attention.TorchPagedAttnBackend.init_forward_metadata_out_graph"
    HookRegistry.register(attention, _not_counted, HookType.AROUND)


def _collective(op: str, group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> None:
    # Groups of the same ranks (TP, attention TP, MoE) are different communicators, each with its own order.
    line = {"id": group.group_name, "group": dist.get_process_group_ranks(group), "rank": dist.get_rank()}
    _out.write(json.dumps({**line, "op": op, "sizes": [tensor.numel() for tensor in tensors]}) + "\n")


def _seed(_result, worker, *_args, **_kwargs) -> None:
    line = {"seed": worker.random_seed, "rank": dist.get_rank(), "draft": worker.is_draft_worker}
    _out.write(json.dumps(line) + "\n")


class _Counter(TorchDispatchMode):
    """Counts dispatched calls that touch data, and the ones that read a value back to the host."""

    VIEWS = (
        "view",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "t.",
        "transpose",
        "permute",
        "expand",
        "detach",
        "alias",
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.host_reads = 0
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if not self.paused and not name.startswith(self.VIEWS):
            self.calls += 1
            self.host_reads += name.startswith(("_local_scalar_dense", "nonzero", "is_nonzero"))
        return func(*args, **(kwargs or {}))


_counter: _Counter | None = None


def _counted_draft_step(original, runner, *args, **kwargs):
    global _counter
    if not runner.is_draft_worker:
        return original(runner, *args, **kwargs)
    with _Counter() as _counter:
        result = original(runner, *args, **kwargs)
    line = {"draft_step": bool(result.can_run_graph), "calls": _counter.calls, "host_reads": _counter.host_reads}
    _counter = None
    _out.write(json.dumps(line) + "\n")
    return result


def _not_counted(original, *args, **kwargs):
    if _counter is None:
        return original(*args, **kwargs)
    _counter.paused = True
    try:
        return original(*args, **kwargs)
    finally:
        _counter.paused = False


def read(folder: Path) -> Iterator[dict]:
    """All lines, each process's in order."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                yield json.loads(line)


def check_collectives(folder: Path, tail: int = 8) -> dict[tuple, int]:
    """Every rank of a group entered the same collectives of that group, in the same order and with the same sizes.

    The server is stopped in the middle of its loop, so the last ``tail`` entries may be missing on some ranks.

    Returns:
        Collectives by group of ranks.
    """
    by_group: dict[tuple, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for line in read(folder):
        if "op" in line:
            by_group[line["id"], tuple(line["group"])][line["rank"]].append((line["op"], line["sizes"]))
    counted: dict[tuple, int] = defaultdict(int)
    for group, by_rank in by_group.items():
        ranks = set(group[1])
        assert set(by_rank) == ranks, f"group {group}: entered by {sorted(by_rank)} only"
        shortest = min(map(len, by_rank.values()))
        assert max(map(len, by_rank.values())) - shortest <= tail, {r: len(calls) for r, calls in by_rank.items()}
        first = by_rank[min(ranks)]
        for rank, calls in by_rank.items():
            wrong = next((i for i in range(shortest) if calls[i] != first[i]), None)
            assert wrong is None, f"group {group}, call {wrong}: rank {rank} {calls[wrong]}, first rank {first[wrong]}"
        counted[tuple(sorted(ranks))] += shortest
    return dict(counted)
