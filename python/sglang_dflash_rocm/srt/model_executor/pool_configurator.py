"""The memory of a DFLASH server: a table at start-up, and which part is too large when the start fails.

Both only look: no size is changed. The arithmetic is in ``srt/mem_cache/draft_kv_budget.py``; here SGLang's objects are
read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sglang_dflash_rocm.srt.mem_cache import draft_kv_budget as budget

logger = logging.getLogger(__name__)


def log_memory_table(_result: None, scheduler: Any) -> None:
    """AFTER ``Scheduler.init_model_worker``: pools, draft, embedding copy and graphs are there, in their final size.

    One table per attention group, logged by its first rank. Never raises.
    """
    try:
        from sglang.srt.runtime_context import get_parallel

        # Another algorithm's worker does not keep a full embedding.
        if not hasattr(type(scheduler.draft_worker), "_cache_full_embed_weight") or get_parallel().attn_tp_rank != 0:
            return
        rank = get_parallel().attn_dp_rank
        logger.info("\n".join(budget.table_lines(f"DFLASH memory per GPU, DP rank {rank}:", memory_parts(scheduler))))
    except Exception as error:
        logger.warning("sglang-dflash-rocm: no memory table: %s: %s", type(error).__name__, error)


def memory_parts(scheduler: Any) -> list[budget.Part]:
    """Predicted and allocated bytes of every part on this rank, the weights as allocated only.

    Args:
        scheduler: SGLang's scheduler after ``init_model_worker``.
    """
    worker, runner = scheduler.draft_worker, scheduler.tp_worker.model_runner
    draft_runner = worker.draft_model_runner
    config = runner.memory_pool_config
    embedding = runner.model.get_input_embeddings().weight
    how = _deployment(
        runner.model_config,
        requests=config.max_running_requests,
        kv_itemsize=runner.kv_cache_dtype.itemsize,
        draft_kv_itemsize=draft_runner.kv_cache_dtype.itemsize,
        weight_itemsize=embedding.dtype.itemsize,
    )
    target, draft = target_of(runner.model_config), draft_of(draft_runner.model_config, how.block_size)
    full, swa = config.full_max_total_num_tokens, config.swa_max_total_num_tokens
    if full is None:
        full, swa = config.max_total_num_tokens, 0
    allocated = _allocated(runner, draft_runner, worker)
    found = [replace(p, allocated=allocated.get(p.name)) for p in budget.parts(target, draft, how, full, swa)]
    weights = [*runner.model.parameters(), *draft_runner.model.parameters()]
    found.insert(0, budget.Part("weights", None, tensor_bytes(weights), source=budget.SOURCES["weights"]))
    if (head := worker._draft_sampler) is not None:
        # SGLang has other heads for other kinds of draft.
        greedy = type(head).__name__ == "_DflashDraftSampler"
        size = budget.graph_head_bytes(_graph_requests(), how.block_size, how.attn_tp, embedding.dtype.itemsize)
        held = tensor_bytes(vars(head).values(), beside=weights)
        found.append(budget.Part("draft graph head", size if greedy else None, held, source=budget.REST))
    return found


def _allocated(runner: Any, draft_runner: Any, worker: Any) -> dict[str, int]:
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    full_pool, swa_pool = getattr(pool, "full_kv_pool", pool), getattr(pool, "swa_kv_pool", None)
    table, draft_table = runner.req_to_token_pool.req_to_token, draft_runner.req_to_token_pool.req_to_token
    index = [getattr(allocator, "full_to_swa_index_mapping", None)]
    for part in ("full_attn_allocator", "swa_attn_allocator"):
        index.append(getattr(getattr(allocator, part, None), "free_pages", None))
    if not hasattr(allocator, "full_attn_allocator"):
        index.append(allocator.free_pages)
    return {
        "target KV, full layers": _pool_bytes(full_pool),
        "target KV, SWA layers": _pool_bytes(swa_pool) if swa_pool is not None else 0,
        "draft KV": _pool_bytes(draft_runner.token_to_kv_pool),
        # One rank per group: SGLang takes a view of the target's table in place of a copy.
        "full embedding copy": tensor_bytes([worker._full_embed_gpu], beside=runner.model.parameters()),
        "request table": tensor_bytes([table]),
        "draft request table": tensor_bytes([draft_table], beside=[table]),
        "slot index": tensor_bytes(index),
    }


def _pool_bytes(pool: Any) -> int:
    if getattr(pool, "post_capture_active", False):
        # The tensors span reserved addresses; less than that is backed by memory.
        return pool.post_capture_backed_bytes
    return tensor_bytes([*pool.k_buffer, *pool.v_buffer])


def tensor_bytes(tensors: Iterable[Any], beside: Iterable[Any] = ()) -> int:
    """Bytes of the storages of ``tensors``, each counted once, without those that ``beside`` holds too."""
    import torch

    counted = {t.untyped_storage().data_ptr() for t in beside}
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in counted:
            counted.add(tensor.untyped_storage().data_ptr())
            total += tensor.untyped_storage().nbytes()
    return total


def target_of(config: Any) -> budget.TargetShape:
    """The target's geometry from SGLang's ``ModelConfig``, as its pools take it."""
    text = config.hf_text_config
    swa_layers = len(config.swa_attention_layer_ids or ()) if config.is_hybrid_swa else 0
    full = budget.KVLayers(
        config.num_hidden_layers - swa_layers, config.get_total_num_kv_heads(), config.head_dim, config.v_head_dim
    )
    swa_heads = getattr(text, "swa_num_key_value_heads", full.kv_heads)
    return budget.TargetShape(
        full=full,
        swa=budget.KVLayers(swa_layers, swa_heads, config.swa_head_dim, config.swa_v_head_dim),
        q_heads=config.num_attention_heads,
        window=getattr(text, "sliding_window", None) or 0,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        context_length=config.context_len,
    )


def draft_of(config: Any, block_size: int) -> budget.DraftShape:
    """The draft's geometry from its ``ModelConfig``."""
    kv = budget.KVLayers(config.num_hidden_layers, config.get_total_num_kv_heads(), config.head_dim, config.v_head_dim)
    return budget.DraftShape(kv, config.num_attention_heads, block_size)


def _deployment(model_config: Any, **known: Any) -> budget.Deployment:
    from sglang.srt.runtime_context import get_parallel, get_schedule, get_spec

    return budget.Deployment(
        attn_tp=get_parallel().attn_tp_size,
        attn_dp=get_parallel().attn_dp_size,
        page_size=get_schedule().page_size,
        swa_ratio=get_schedule().swa_full_tokens_ratio,
        context_length=model_config.context_len,
        block_size=get_spec().speculative_num_draft_tokens,
        draft_window=get_spec().speculative_draft_window_size,
        **known,
    )


def _graph_requests() -> int:
    from sglang.srt.runtime_context import get_exec

    return max(get_exec().graph.cuda_graph_config.decode.bs)


# ---- when it does not fit -----------------------------------------------------------------------------------------


def explain_shortage(original: Any, configurator: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``KVCacheConfigurator.configure``: an error that says memory is short also says which part is too large.

    Raises:
        RuntimeError, ValueError: SGLang's own error, of the same type, with our lines added.
    """
    try:
        return original(configurator, *args, **kwargs)
    except (RuntimeError, ValueError) as error:
        explained = _explained(configurator, error)
        if explained is None:
            raise
        raise explained from error


def _explained(configurator: Any, error: Exception) -> Exception | None:
    try:
        advice = _advice(configurator, str(error))
        return type(error)(f"{error}\nsglang-dflash-rocm: {advice}") if advice else None
    except Exception as ours:
        logger.warning("sglang-dflash-rocm: cannot tell which part is too large: %s", ours)
        return None


def _advice(configurator: Any, text: str) -> str:
    """Our lines for SGLang's error ``text``, empty if it is about something else."""
    if not configurator.spec_algorithm.is_dflash():
        return ""
    from sglang.srt.runtime_context import get_schedule

    fraction = f"--mem-fraction-static (now {get_schedule().mem_fraction_static})"
    if "leave no GPU memory for the KV cache" in text:
        return f"{_resident(configurator)}. Raise {fraction}, or use more GPUs."
    if "out of memory" in text or "can't allocate memory" in text:
        whose = "draft" if configurator.is_draft_worker else "target"
        return (
            f"the {whose}'s pools do not fit beside what is on this GPU already. Lower {fraction} or "
            f"--max-total-tokens; the request tables get smaller with {budget.FLAGS['request table']}."
        )
    if "Not enough memory" in text:
        return f"not one page of tokens fits; {_costs(configurator)}. Or raise {fraction}."
    if "SWA pool (" in text:
        limit = get_schedule().max_total_tokens
        cap = f"--max-total-tokens (now {limit})" if limit is not None else fraction
        return (
            f"too small: the SWA pool, {get_schedule().swa_full_tokens_ratio} of the full pool's tokens. Raise "
            f"--swa-full-tokens-ratio (at most 1) or {cap}; {_costs(configurator)}."
        )
    if "SWA pool cap" in text:
        return (
            f"too large: the SWA pool, sized for --max-running-requests (now {get_schedule().max_running_requests}) "
            f"because the radix cache is off. Lower it or --chunked-prefill-size, or raise {fraction}."
        )
    return ""


def _resident(configurator: Any) -> str:
    how, _, _ = _shapes(configurator)
    config = configurator.model_config
    weights = tensor_bytes(configurator.model.parameters())
    itemsize = configurator.model_dtype.itemsize
    copy = budget.embedding_copy_bytes(config.vocab_size, config.hidden_size, itemsize, how.attn_tp, how.attn_dp)
    return (
        f"on this GPU before the pools: target weights {budget.human(weights)}, the draft's weights, "
        f"full embedding copy {budget.human(copy)}"
    )


def _costs(configurator: Any) -> str:
    how, target, draft_bytes = _shapes(configurator)
    draft = budget.DraftShape(budget.KVLayers(0, 0, 0, 0), 0, how.block_size)
    costs = {**budget.token_cost(target, draft, how), "draft KV": draft_bytes}
    each = ", ".join(f"{name} {budget.human(cost)}" for name, cost in costs.items())
    return f"one token takes {each}; {budget.largest(costs)}"


def _shapes(configurator: Any) -> tuple[budget.Deployment, budget.TargetShape, int]:
    how = _deployment(configurator.model_config, requests=1, kv_itemsize=configurator.kv_cache_dtype.itemsize)
    return how, target_of(configurator.model_config), configurator.dflash_draft_cell_size_per_token or 0
