"""MiMo-V2.6-Flash's geometry, served on eight GPUs, and SGLang's own pool sizing for it."""

from __future__ import annotations

import dataclasses

from sglang_dflash_rocm.srt.mem_cache import draft_kv_budget as budget

#: MiMo-V2.6-Flash: 48 layers, 9 of them full.
FLASH = budget.TargetShape(
    full=budget.KVLayers(9, 4, 192, 128),
    swa=budget.KVLayers(39, 8, 192, 128),
    q_heads=64,
    window=128,
    vocab_size=152576,
    hidden_size=4096,
    context_length=262144,
    fused_tp=4,
)
DRAFT = budget.RELEASED_DRAFT


def deployment(**changes) -> budget.Deployment:
    """Eight GPUs as two groups of four."""
    base = budget.Deployment(
        attn_tp=4, attn_dp=2, page_size=1, swa_ratio=0.8, requests=24, context_length=262144, block_size=8
    )
    return dataclasses.replace(base, **changes)


def upstream_sizing(how: budget.Deployment):
    """SGLang's own sizing with the geometry of ``FLASH``. Its constructor wants a running server, the rest does not."""
    from sglang.srt.model_executor.pool_configurator import HybridSWAPoolConfigurator

    sizing = object.__new__(HybridSWAPoolConfigurator)
    sizing.__dict__.update(
        _full_layers_num=FLASH.full.layers,
        _swa_layers_num=FLASH.swa.layers,
        _full_per_token=FLASH.full.bytes_per_token(how.attn_tp, how.kv_itemsize) // FLASH.full.layers,
        _swa_per_token=FLASH.swa.bytes_per_token(how.attn_tp, how.kv_itemsize) // FLASH.swa.layers,
        _draft_cell_size=DRAFT.kv.bytes_per_token(how.attn_tp, how.draft_kv_itemsize),
        _swa_full_tokens_ratio=how.swa_ratio,
        _sliding_window_size=FLASH.window,
        _page_size=how.page_size,
        _enable_unified_memory=False,
        _draft_full_layers_num=0,
        _draft_swa_layers_num=0,
        _draft_swa_full_layers_num=0,
        _fused_full_entry=None,
        _fused_swa_entry=None,
    )
    sizing._recompute_cell_size()
    return sizing
