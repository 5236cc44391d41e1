"""Hooks of group ``cpu``: the places where SGLang 0.5.23 has no platform seam. ``compat.HOOKS`` says why for each."""

from __future__ import annotations

import torch

#: VALUE: there is no accelerator in this process, so there is nothing to pin host memory for.
IS_CPU = True

#: VALUE: KV pools look at SGLANG_AITER_KV_CACHE_LAYOUT, as on ROCm; nothing else in their module asks this.
HONOUR_KV_LAYOUT = True


def handle_dflash(original, server_args):
    """AROUND ``_handle_dflash``: its DP attention branch knows CUDA and NPU only. Keeps the branch's other checks."""
    from sglang.srt.arg_groups import speculative_hook

    cfg = speculative_hook.resolving_view(server_args)
    dp_attention = speculative_hook.attn_dp_enabled_of
    if dp_attention(cfg):
        _check_dp_attention(cfg)
    speculative_hook.attn_dp_enabled_of = lambda _cfg: False
    try:
        return original(server_args)
    finally:
        speculative_hook.attn_dp_enabled_of = dp_attention


def _check_dp_attention(cfg) -> None:
    from sglang.srt.environ import envs

    if not cfg.enable_dp_lm_head:
        raise ValueError("DFLASH with --enable-dp-attention needs --enable-dp-lm-head: add the flag")
    if cfg.attn_cp_size != 1:
        raise ValueError(
            f"DFLASH with --enable-dp-attention needs attention context parallel 1, got {cfg.attn_cp_size}"
        )
    if envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get():
        raise ValueError("DFLASH with --enable-dp-attention needs SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION=0")


def assign_req_to_token_pool(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size
) -> None:
    """REPLACE: write new slots ``out_cache_loc [sum(end - start)]`` into rows of ``req_to_token [pool, context]``."""
    starts, ends = start_offset.tolist(), end_offset.tolist()
    parts = out_cache_loc.split([end - start for start, end in zip(starts, ends, strict=True)])
    for row, start, end, slots in zip(req_pool_indices.tolist(), starts, ends, parts, strict=True):
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)


def memcpy(dst: torch.Tensor, src: torch.Tensor, dim: int, offset: int, sz: int, offset_src: bool) -> None:
    """REPLACE: copy ``sz`` rows, from ``src[offset:]`` if ``offset_src`` else to ``dst[offset:]``, clipped to both."""
    if dim != 0:
        raise ValueError(f"memcpy: only dim 0 is used by DP gather and scatter, got {dim}")
    offset, sz = int(offset), int(sz)
    source = src[offset : offset + sz] if offset_src else src[:sz]
    target = dst[:sz] if offset_src else dst[offset : offset + sz]
    rows = min(len(source), len(target))
    target[:rows].copy_(source[:rows])


def keep_input_embeds_dtype(kwargs, runner, forward_batch, pp_proxy_tensors):
    """AFTER: the draft's input embeddings keep the model's dtype instead of being rounded to bfloat16."""
    if "input_embeds" in kwargs and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds.to(runner.dtype)
    return kwargs


def keep_checkpoint_sizes(model_config, load_config, tp_size):
    """REPLACE: no head padding. Upstream pads for its AMX kernels, by the whole TP size, blind to DP attention."""
    return model_config


def flatten_all_gather(group, output: torch.Tensor, input: torch.Tensor):
    """BEFORE: gloo wants output and input of the same rank where NCCL only counts elements."""
    return (group, output.view(-1), input.reshape(-1)), {}


def get_last_loc(req_to_token: torch.Tensor, req_pool_indices_tensor: torch.Tensor, prefix_lens_tensor: torch.Tensor):
    """REPLACE: upstream's own torch variant, which it takes for the backend name ``torch_native`` only."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
