"""Graphs on the CPU platform: SGLang's real decode graph runner, with a replay that runs the forward again.

A CPU has no graphs to capture, but everything that goes wrong with graphs under DP attention happens around the
capture: which ranks decide to replay, which bucket they pad to, what the static buffers hold in padded rows, which
collectives the fabricated batch of an idle rank enters. All of that is SGLang's ``DecodeCudaGraphRunner``, which runs
here unchanged. Only what belongs to the device is replaced: a replay calls the captured forward again on the same
static buffers, so its collectives happen for real; and no stream is involved. It says nothing about a graph's speed.
On with ``SGLANG_DFLASH_CPU_GRAPH=1``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend


class RerunGraphBackend(BaseCudaGraphBackend):
    """Keeps the forward of each captured shape and calls it again to replay it."""

    def __init__(self, _runner: DecodeCudaGraphRunner, **_: object) -> None:
        self._forwards: dict[ShapeKey, Callable[[], Any]] = {}

    @contextmanager
    def capture_session(self, stream: object) -> Iterator[None]:
        yield

    def capture_one(
        self,
        shape_key: ShapeKey,
        forward_fn: Callable[[], Any],
        capture_inputs: object = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        forward_fn()
        if post_warmup_hook is not None:
            post_warmup_hook()
        self._forwards[shape_key] = forward_fn

    def can_run(self, forward_batch: object, shape_key: ShapeKey) -> bool:
        return shape_key in self._forwards

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: ShapeKey, static_forward_batch: object, **_: object) -> Any:
        return self._forwards[shape_key]()

    def cleanup(self) -> None:
        self._forwards.clear()


class CpuGraphRunner(DecodeCudaGraphRunner):
    """SGLang's decode graph runner without streams and events."""

    def _capture(self) -> None:
        self.warmup()
        self.buffers.seq_lens.fill_(self.seq_len_fill_value)
        self.buffers.seq_lens_cpu.fill_(self.seq_len_fill_value)
        self.buffers.reset_index_buffers()
        self._profiler = None
        with self.backend.capture_session(None):
            self._capture_one_stream()

    def _record_in_graph_metadata_prep_done(self) -> None:
        """No stream, no event to record."""

    def _resolve_shared_read_ends(self, attn_backend: object, forward_mode: object) -> SharedReadEnds:
        return SharedReadEnds.UNKNOWN


def capture_decode_graph(*, model_runner) -> GraphCapture:
    """REPLACE: for device ``cpu`` SGLang captures only what ``torch.compile`` can take; neither DP nor drafts."""
    if model_runner.is_draft_worker:
        phase = "draft_decode"
    else:
        phase = "target_verify" if model_runner.spec_algorithm.is_speculative() else "decode"
    disabled = check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    runner = None if disabled else CpuGraphRunner(model_runner)
    return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0, capture_time=0)


def is_cpu_graph(mode: ForwardMode) -> bool:
    """REPLACE: the modes that replay a graph on an accelerator: decode, target verify, idle and diffusion extend."""
    return mode.is_cuda_graph()
