"""Attention backend of the CPU platform: every mode of the runtime on ``kernels.paged_attention.reference``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dflash_rocm.kernels.kv_cache.layout import FP8, linear
from sglang_dflash_rocm.kernels.paged_attention.reference import paged_attention
from sglang_dflash_rocm.srt.layers.attention.window import window_keys


@dataclass(frozen=True)
class _Metadata:
    """What one forward reads: query rows per request and cache slots per request."""

    q_lens: list[int]
    full_slots: list[torch.Tensor]
    swa_slots: list[torch.Tensor]


class TorchPagedAttnBackend(AttentionBackend):
    """Extend, decode, target verify, draft block (causal or not), and idle batches, for target and draft.

    Reads the KV pools through ``req_to_token``, so page size, prefix reuse and the draft's private table all look the
    same. K and V may differ in width; hybrid sliding-window pools are read through their own slots; a vectorized pool,
    or one of fp8 without scales, that `flydsl` has written is read too.
    """

    def __init__(self, runner) -> None:
        super().__init__()
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.pool, self.page_size = runner.token_to_kv_pool, runner.page_size
        self.architectures = tuple(runner.model_config.hf_config.architectures or ())
        self.has_swa_pool = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate: metadata is built anew before each replay (``cpu/graph.py``)."""

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        kv_lens, q_lens = _lengths(forward_batch)
        rows = forward_batch.req_pool_indices.tolist()[: len(kv_lens)]
        full = [self.req_to_token[row, :n].to(torch.int64) for row, n in zip(rows, kv_lens, strict=True)]
        swa = full
        if self.has_swa_pool:
            swa = [self.pool.translate_loc_from_full_to_swa(slots).to(torch.int64) for slots in full]
        self.forward_metadata = _Metadata(q_lens, full, swa)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """``q [rows, q_heads * qk_dim]`` to ``[rows, q_heads * v_dim]`` in ``q``'s dtype.

        Raises:
            NotImplementedError: the layer has a logits soft cap, which no model served here uses.
        """
        if layer.logit_cap:
            raise NotImplementedError(f"torch_paged: logits soft cap {layer.logit_cap} is not supported, only 0")
        metadata = self.forward_metadata
        in_swa_pool = self.has_swa_pool and self.pool.layers_mapping[layer.layer_id][1]
        if save_kv_cache and k is not None:
            # Not from the metadata: a graph replay pads the rows, and its metadata is built from the unpadded batch.
            slots = forward_batch.out_cache_loc
            swa_slots = self.pool.translate_loc_from_full_to_swa(slots) if in_swa_pool else None
            self.pool.set_kv_buffer(layer, KVWriteLoc(slots, swa_slots), k, v)
        keys, values = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
        slots = metadata.swa_slots if in_swa_pool else metadata.full_slots
        if keys.ndim == 5 or keys.dtype == FP8:
            keys, values, slots = linear(keys, values, slots, self.page_size)
        out, _lse = paged_attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            values,
            slots,
            metadata.q_lens,
            scale=layer.scaling,
            window_keys=window_keys(layer.sliding_window_size, self.architectures),
            causal=layer.attn_type != AttentionType.ENCODER_ONLY and not layer.is_cross_attention,
            sinks=sinks,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim).to(q.dtype)

    forward_decode = forward_extend


def _lengths(forward_batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Keys and query rows of each request. At verify ``seq_lens`` excludes the block; everywhere else it is the end."""
    mode = forward_batch.forward_mode
    if mode.is_idle():
        return [], []
    kv_lens = forward_batch.seq_lens.tolist()
    if mode.is_decode():
        return kv_lens, [1] * len(kv_lens)
    if mode.is_target_verify():
        block = int(forward_batch.spec_info.draft_token_num)
        return [n + block for n in kv_lens], [block] * len(kv_lens)
    return kv_lens, forward_batch.extend_seq_lens.tolist()
