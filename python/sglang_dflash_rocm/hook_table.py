"""Every name of SGLang that we patch or lean on: the only list there is. The plugin installs from it.

To add a hook: write the function, add a line here, run ``dflash-rocm fingerprints --write`` (stores the target's
fingerprint and rewrites ``docs/patches.md``), add a test that fails without it.

Kinds: ``before``, ``after``, ``around`` and ``replace`` are SGLang's ``HookType``; ``value`` assigns a constant of a
module; ``reads`` patches nothing, the name is only relied on. Groups: ``core`` is installed in every process that loads
the plugin, the others when they are asked for (``gate.py``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """One line of the contract. ``impl`` is ``module:name`` in this package, imported only when the hook is installed;
    ``upstream`` is the place in SGLang 0.5.23, below ``sglang/``."""

    target: str
    kind: str
    group: str
    impl: str
    why: str
    upstream: str
    remove_when: str


_CPU = "sglang_dflash_rocm.cpu.hooks"
_IDLE_VERIFY = "sglang_dflash_rocm.srt.speculative.idle_verify"
_POOLS = "sglang_dflash_rocm.srt.model_executor.pool_configurator"

HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.arg_groups.validation_hook.check_server_args",
        kind="after",
        group="core",
        impl="sglang_dflash_rocm.gate:check_resolved_server_args",
        why="Arguments from a config file or the Python engine are not in sys.argv; look at the resolved ones too",
        upstream="srt/entrypoints/engine.py:1165",
        remove_when="SGLang hands plugins the server arguments",
    ),
    Hook(
        target="sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks",
        kind="reads",
        group="core",
        impl="",
        why="Wrapped once, because right after it is the only moment at which our hooks can be verified as applied",
        upstream="srt/plugins/__init__.py:165",
        remove_when="the loader fails when a hook cannot be applied",
    ),
    Hook(
        target="sglang.srt.arg_groups.attention_hook.handle_attention_backend_compatibility",
        kind="before",
        group="core",
        impl="sglang_dflash_rocm.srt.arg_groups.attention_hook:choose_backend",
        why="Without a flag MiMo-V2 gets aiter on gfx942, which is wrong for it; flydsl has no kernel for page size 1",
        upstream="srt/arg_groups/model_override_base.py:326",
        remove_when="SGLang's default for MiMo-V2 on ROCm is right, and backends declare their page size",
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
        kind="around",
        group="flydsl",
        impl="sglang_dflash_rocm.srt.mem_cache.kv_cache_configurator:draft_pool_in_nhd",
        why="SGLANG_AITER_KV_CACHE_LAYOUT=vectorized_5d reaches the draft's pool too, which DFLASH writes by token",
        upstream="srt/mem_cache/memory_pool.py:2270",
        remove_when="the draft's pool is nhd whatever the target's layout is",
    ),
    Hook(
        target="sglang.srt.layers.attention.triton_backend.TritonAttnBackend._forward_extend_kernel",
        kind="reads",
        group="flydsl",
        impl="",
        why="Overridden, to hand it a gathered prefix of a vectorized pool",
        upstream="srt/layers/attention/triton_backend.py:1918",
        remove_when="there is a prefill kernel of ours",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.init_model_worker",
        kind="after",
        group="budget",
        impl=f"{_POOLS}:log_memory_table",
        why="Nothing tells what the draft's KV, its embedding copy and the tables cost; here all of them exist",
        upstream="srt/managers/scheduler.py:1128",
        remove_when="SGLang itemises a speculative server's memory",
    ),
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure",
        kind="around",
        group="budget",
        impl=f"{_POOLS}:explain_shortage",
        why="The errors for too little memory do not say which part is too large nor which flag helps",
        upstream="srt/mem_cache/kv_cache_configurator.py:457",
        remove_when="SGLang's errors name the part and the flag",
    ),
    Hook(
        target="sglang.srt.arg_groups.speculative_hook._handle_dflash",
        kind="around",
        group="cpu",
        impl=f"{_CPU}:handle_dflash",
        why="DFLASH with DP attention is refused on every device but CUDA and NPU; its other checks are kept",
        upstream="srt/arg_groups/speculative_hook.py:303",
        remove_when="the check asks the platform, as the one above it does",
    ),
    Hook(
        target="sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        kind="replace",
        group="cpu",
        impl=f"{_CPU}:assign_req_to_token_pool",
        why="Triton kernel whose only twin is in sgl_kernel",
        upstream="srt/mem_cache/allocation.py:737",
        remove_when="capabilities.supports_triton is asked here",
    ),
    Hook(
        target="sglang.srt.mem_cache.allocation.get_last_loc",
        kind="replace",
        group="cpu",
        impl=f"{_CPU}:get_last_loc",
        why="Takes its torch variant only for the backend name torch_native, else a Triton kernel (page size above 1)",
        upstream="srt/mem_cache/allocation.py:107",
        remove_when="capabilities.supports_triton is asked here",
    ),
    Hook(
        target="sglang.srt.layers.dp_attention.memcpy",
        kind="replace",
        group="cpu",
        impl=f"{_CPU}:memcpy",
        why="DP gather and scatter copy rows with a Triton kernel unless SGLANG_USE_CPU_ENGINE is set",
        upstream="srt/layers/dp_attention.py:647",
        remove_when="the choice of memcpy_func asks the platform",
    ),
    Hook(
        target="sglang.srt.model_executor.forward_batch_info._is_cpu",
        kind="value",
        group="cpu",
        impl=f"{_CPU}:IS_CPU",
        why="DP padding pins host memory unless this constant says that there is no accelerator",
        upstream="srt/model_executor/forward_batch_info.py:1948",
        remove_when="is_pin_memory_available of the platform is asked here",
    ),
    Hook(
        target="sglang.srt.mem_cache.memory_pool._use_aiter",
        kind="value",
        group="cpu",
        impl=f"{_CPU}:HONOUR_KV_LAYOUT",
        why="SGLANG_AITER_KV_CACHE_LAYOUT is ignored off ROCm; with it the vectorized layout is served here too",
        upstream="srt/mem_cache/memory_pool.py:2269",
        remove_when="the pool asks the platform",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        kind="after",
        group="cpu",
        impl=f"{_CPU}:keep_input_embeds_dtype",
        why="Input embeddings are cast to bfloat16 whatever the model's dtype is",
        upstream="srt/model_executor/model_runner.py:1772",
        remove_when="the cast follows the model's dtype",
    ),
    Hook(
        target="sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        kind="replace",
        group="cpu",
        impl=f"{_CPU}:keep_checkpoint_sizes",
        why="Device cpu pads heads and widths for AMX kernels by the whole TP size, blind to DP attention",
        upstream="srt/model_executor/model_runner.py:1302",
        remove_when="the padding is left to the platform",
    ),
    Hook(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator._all_gather_into_tensor",
        kind="before",
        group="cpu",
        impl=f"{_CPU}:flatten_all_gather",
        why="gloo wants tensors of equal rank where NCCL only counts elements (logits gather)",
        upstream="srt/layers/logits_processor.py:1246",
        remove_when="the caller passes a flat output",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph",
        kind="replace",
        group="cpu_graph",
        impl="sglang_dflash_rocm.cpu.graph:capture_decode_graph",
        why="For device cpu SGLang asks for torch.compile and its own runner, which refuses DP attention and drafts",
        upstream="srt/model_executor/model_runner_components/cuda_graph_setup.py:703",
        remove_when="get_graph_runner_cls of the platform is asked before the device",
    ),
    Hook(
        target="sglang.srt.model_executor.forward_batch_info.ForwardMode.is_cpu_graph",
        kind="replace",
        group="cpu_graph",
        impl="sglang_dflash_rocm.cpu.graph:is_cpu_graph",
        why="Only plain decode counts as a graph mode on device cpu; verify and idle replay graphs elsewhere",
        upstream="srt/model_executor/model_runner.py:1986",
        remove_when="the mode check asks the graph runner",
    ),
    Hook(
        target="sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.init_cuda_graphs",
        kind="around",
        group="draft_graph",
        impl="sglang_dflash_rocm.srt.speculative.dflash_worker_v2:init_cuda_graphs",
        why="The draft runs eager whenever the target has DP attention, although it has no DP peers itself",
        upstream="srt/speculative/dflash_worker_v2.py:718",
        remove_when="SGLang captures DFLASH drafts under DP attention, as it does DSpark's",
    ),
    Hook(
        target="sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._forward_is_dp_local",
        kind="after",
        group="draft_graph",
        impl="sglang_dflash_rocm.srt.speculative.dflash_worker_v2:forward_is_dp_local",
        why="A draft graph would be keyed by the busiest DP rank's batch, which the draft's own batches do not carry",
        upstream="srt/model_executor/runner/decode_cuda_graph_runner.py:776",
        remove_when="SGLang answers this from the draft's parallel layout",
    ),
    Hook(
        target="sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify",
        kind="after",
        group="idle_verify",
        impl=f"{_IDLE_VERIFY}:note_agreement",
        why="The gathered graph vote is overwritten right after this when a DP rank is idle",
        upstream="srt/speculative/dflash_worker_v2.py:2846",
        remove_when="SGLang replays verify graphs on idle DP ranks for DFLASH, as it does for EAGLE",
    ),
    Hook(
        target="sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        kind="before",
        group="idle_verify",
        impl=f"{_IDLE_VERIFY}:apply_agreement",
        why="Last place before the model runner chooses between graph and eager",
        upstream="srt/speculative/dflash_worker_v2.py:2454",
        remove_when="SGLang replays verify graphs on idle DP ranks for DFLASH, as it does for EAGLE",
    ),
    Hook(
        target="sglang.srt.managers.tp_worker.TpModelWorker.init_cuda_graphs",
        kind="after",
        group="idle_verify",
        impl=f"{_IDLE_VERIFY}:compare_graphs",
        why="An agreement without a collective per step rests on equal captured batch sizes",
        upstream="srt/managers/tp_worker.py:433",
        remove_when="SGLang replays verify graphs on idle DP ranks for DFLASH, as it does for EAGLE",
    ),
    Hook(
        target="sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.__init__",
        kind="around",
        group="dflash",
        impl="sglang_dflash_rocm.srt.speculative.dflash_worker_v2:with_target_seed",
        why="The draft's seed broadcast compares a rank of the draft's group with a rank of the world",
        upstream="srt/managers/tp_worker.py:380",
        remove_when="TpModelWorker broadcasts the seed with the world rank",
    ),
    Hook(
        target="sglang.srt.speculative.dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE",
        kind="value",
        group="dflash",
        impl="sglang_dflash_rocm.srt.speculative.dflash_utils:AVAILABLE",
        why="temperature > 0 is verified greedily, with one warning, where SGLang has no tree kernel",
        upstream="srt/speculative/dflash_worker_v2.py:2212",
        remove_when="DFLASH verifies chains with the chain kernel on ROCm",
    ),
    Hook(
        target="sglang.srt.speculative.dflash_utils.tree_speculative_sampling_target_only",
        kind="value",
        group="dflash",
        impl="sglang_dflash_rocm.srt.speculative.dflash_utils:tree_speculative_sampling_target_only",
        why="None on ROCm; the chain kernel that does exist there has another interface",
        upstream="srt/speculative/dflash_utils.py:1012",
        remove_when="DFLASH verifies chains with the chain kernel on ROCm",
    ),
    Hook(
        target="sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton",
        kind="reads",
        group="dflash",
        impl="",
        why="The chain kernel that samples; called with positional arguments",
        upstream="kernels/ops/speculative/reject_sampling.py:242",
        remove_when="DFLASH verifies chains with the chain kernel on ROCm",
    ),
    Hook(
        target="sglang.srt.speculative.dflash_info_v2.DFlashDraftInputV2._ensure_prepare_length_buffers",
        kind="around",
        group="dflash",
        impl="sglang_dflash_rocm.srt.speculative.dflash_info_v2:keep_length_buffers",
        why="Allocates device buffers in every step: a new draft input each time, and cuda is not cuda:0",
        upstream="srt/speculative/dflash_info_v2.py:75",
        remove_when="the worker hands the buffers from step to step",
    ),
    Hook(
        target="sglang.srt.managers.schedule_batch.ScheduleBatch._swa_eviction_trigger",
        kind="around",
        group="swa_interval",
        impl="sglang_dflash_rocm.srt.managers.schedule_batch:swa_eviction_trigger",
        why="An eviction interval of its own for DFLASH, in tokens, aligned to page and block",
        upstream="srt/managers/schedule_batch.py:4047",
        remove_when="SGLANG_SWA_EVICTION_INTERVAL means the same in the trigger and in the pool cap",
    ),
    Hook(
        target="sglang.srt.model_executor.pool_configurator.compute_swa_request_cap",
        kind="around",
        group="swa_interval",
        impl="sglang_dflash_rocm.srt.managers.schedule_batch:swa_request_cap",
        why="Reserves the interval times the draft block although the trigger counts tokens",
        upstream="srt/model_executor/pool_configurator.py:937",
        remove_when="SGLANG_SWA_EVICTION_INTERVAL means the same in the trigger and in the pool cap",
    ),
)
