"""A plugin that writes down the size of each real tensor, on every rank. Loaded only by ``test_budget.py``."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def install() -> None:
    target = "sglang.srt.managers.scheduler.Scheduler.init_model_worker"
    HookRegistry.register(target, write_sizes, HookType.AFTER)


def write_sizes(_result: None, scheduler) -> None:
    """AFTER ``init_model_worker``: one JSON object per rank, named by its place among all ranks."""
    import torch.distributed

    worker, runner = scheduler.draft_worker, scheduler.tp_worker.model_runner
    draft = worker.draft_model_runner
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    tensors = {
        "target KV, full layers": [*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer],
        "target KV, SWA layers": [*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer],
        "draft KV": [*draft.token_to_kv_pool.k_buffer, *draft.token_to_kv_pool.v_buffer],
        "full embedding copy": [worker._full_embed_gpu],
        "request table": [runner.req_to_token_pool.req_to_token],
        "draft request table": [draft.req_to_token_pool.req_to_token],
        "slot index": [
            allocator.full_to_swa_index_mapping,
            allocator.full_attn_allocator.free_pages,
            allocator.swa_attn_allocator.free_pages,
        ],
    }
    sizes = {name: sum(tensor.numel() * tensor.element_size() for tensor in held) for name, held in tensors.items()}
    file = Path(os.environ["DFLASH_PROBE"]) / f"{torch.distributed.get_rank()}.json"
    file.write_text(json.dumps(sizes))
