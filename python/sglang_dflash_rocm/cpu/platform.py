"""SGLang platform that serves on plain CPUs: no AMX, no ``sgl_kernel``, no CUDA, float32 by default.

It exists for the demo and the tests. Where SGLang offers a seam (platform methods, backend registry) it is used here;
where it has none, ``compat.HOOKS`` lists a hook of group ``cpu`` that is implemented in ``cpu/hooks.py``.
"""

from __future__ import annotations

import os

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_dflash_rocm import environ

#: Name under which our attention is registered for ``--attention-backend``.
ATTENTION_BACKEND = "torch_paged"
#: What SGLang has filled in for device ``cpu`` by the time it asks the platform; neither knows sinks.
_UPSTREAM_CPU_DEFAULTS = (None, "intel_amx", "torch_native")


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """``SGLANG_PLATFORM=dflash_cpu``: tensors, collectives (gloo) and attention on the host."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(graph_capture=environ.SGLANG_DFLASH_CPU_GRAPH.get())

    def apply_server_args_defaults(self, server_args) -> None:
        """Set what has only one answer here and refuse another one; also called before workers are spawned.

        Raises:
            ValueError: ``--attention-backend`` names a backend that cannot run on this platform.
        """
        _register_attention_backend()
        _set_worker_environment(int(server_args.tp_size))
        here = attention_backends_here()
        if server_args.attention_backend not in (*here, *_UPSTREAM_CPU_DEFAULTS):
            raise ValueError(
                f"--attention-backend {server_args.attention_backend} cannot run with SGLANG_PLATFORM=dflash_cpu: "
                f"leave the flag out or use one of {', '.join(here)}"
            )
        if server_args.attention_backend not in here:
            server_args.attention_backend = ATTENTION_BACKEND
        server_args.sampling_backend = "pytorch"
        server_args.disable_custom_all_reduce = True
        # Attention compares near-ties between prefill, decode and verify shapes; bfloat16 rounds them differently.
        if server_args.dtype == "auto":
            server_args.dtype = "float32"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm == "DFLASH" and backend in attention_backends_here()

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from sglang_dflash_rocm.cpu.pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def get_full_graph_backend_cls(self) -> type:
        from sglang_dflash_rocm.cpu.graph import RerunGraphBackend

        return RerunGraphBackend

    def get_speculative_cache_locs_fn(self):
        return speculative_cache_locs

    def init_backend(self) -> None:
        """Called once in each worker, after SGLang's layers were imported and before a model is built."""
        from sglang_dflash_rocm.cpu.torch_gaps import ignore_record_stream, mirror_custom_ops

        _register_attention_backend()
        ignore_record_stream()
        mirror_custom_ops()

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Pick up custom ops that the model's own module registered, and keep Triton-only fusions off."""
        from sglang_dflash_rocm.cpu.torch_gaps import mirror_custom_ops

        mirror_custom_ops()
        for module in model.modules():
            # models/dflash.py takes a Triton q/k norm + rope kernel for bfloat16 whatever the platform can run.
            if hasattr(module, "use_table_qk_norm_rope"):
                module.use_table_qk_norm_rope = False


def attention_backends_here() -> tuple[str, ...]:
    """What runs here: the platform's own, and ours for gfx942 with float references in place of its kernels."""
    from sglang_dflash_rocm.srt.layers.attention import flydsl_registry

    return (ATTENTION_BACKEND, *flydsl_registry.names())


def speculative_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """Cache slots of the block of each request, one request after another.

    Args:
        req_pool_indices: ``[bs]`` rows of ``req_to_token``.
        req_to_token: ``[pool, max_context]`` int32 token slots.
        start_offset, end_offset: ``[bs]`` half-open position range of the block.

    Returns:
        ``[sum(end - start)]`` int64.
    """
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    parts = [req_to_token[request, start:end] for request, start, end in ranges]
    return torch.cat(parts).to(torch.int64) if parts else req_to_token.new_empty(0, dtype=torch.int64)


def _set_worker_environment(tp_size: int) -> None:
    """Defaults for the worker processes, which inherit the launcher's environment; a value already set is kept."""
    cores = sorted(os.sched_getaffinity(0))
    # One entry per TP rank, or SGLang refuses more ranks than NUMA nodes.
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(tp_size))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # After a crash SGLang waits a minute for CUDA core dumps.
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    # SGLang compiles small helpers with inductor; on a CPU that costs minutes of g++ per process and gains nothing.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def _register_attention_backend() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    from sglang_dflash_rocm.srt.layers.attention import flydsl_registry

    if ATTENTION_BACKEND in ATTENTION_BACKENDS:
        return

    @register_attention_backend(ATTENTION_BACKEND)
    def create_torch_paged_backend(runner):
        from sglang_dflash_rocm.cpu.attention import TorchPagedAttnBackend

        return TorchPagedAttnBackend(runner)

    choices.add_attention_backend_choices([ATTENTION_BACKEND])
    choices.add_draft_attention_backend_choices([ATTENTION_BACKEND])
    flydsl_registry.register(extend=create_torch_paged_backend)
