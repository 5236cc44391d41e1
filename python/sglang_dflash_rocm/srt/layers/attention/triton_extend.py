"""SGLang's Triton extend for MiMo: the window that its layers mean, and prefixes in every layout and KV dtype."""

from __future__ import annotations

import copy

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_dflash_rocm.kernels.kv_cache.layout import FP8
from sglang_dflash_rocm.kernels.kv_cache.write import gather_kv

from .window import window_keys


class TritonExtend(TritonAttnBackend):
    """Serves EXTEND and MIXED forwards of FlyDSLAttnBackend, whatever the layout of the pool."""

    def __init__(self, runner) -> None:
        super().__init__(runner)
        self.architectures = tuple(runner.model_config.hf_config.architectures or ())
        self._narrowed: dict[int, RadixAttention] = {}

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return super().forward_extend(q, k, v, self.with_window_left(layer), forward_batch, save_kv_cache, **kwargs)

    def with_window_left(self, layer: RadixAttention) -> RadixAttention:
        """The layer with the number of keys besides the query's own, which is what the Triton kernels take."""
        keys = window_keys(layer.sliding_window_size, self.architectures)
        if keys is None or keys == layer.sliding_window_size + 1:
            return layer
        if layer.layer_id not in self._narrowed:
            narrowed = copy.copy(layer)
            narrowed.sliding_window_size = keys - 1
            self._narrowed[layer.layer_id] = narrowed
        return self._narrowed[layer.layer_id]

    def _forward_extend_kernel(
        self, layer, q, k, v, out, k_cache, v_cache, q_indptr, kv_indptr, kv_indices, *args, **kwargs
    ):
        """The prefix of a vectorized or an fp8 pool is handed over as bf16 rows: the kernels read rows only, and for an
        fp8 cache they would round q and the softmax weights to fp8 too. It costs one copy of the prefix."""
        if k_cache.ndim == 5 or k_cache.dtype == FP8:
            k_cache, v_cache = _rows(k_cache, v_cache, kv_indices, layer, self.page_size)
            kv_indices = torch.arange(len(kv_indices), dtype=kv_indices.dtype, device=kv_indices.device)
        return super()._forward_extend_kernel(
            layer, q, k, v, out, k_cache, v_cache, q_indptr, kv_indptr, kv_indices, *args, **kwargs
        )


def _rows(k_cache, v_cache, slots, layer: RadixAttention, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    # At least one page, because the kernels take the rows for a paged cache.
    count = -(-max(len(slots), 1) // page_size) * page_size
    k = k_cache.new_empty(count, layer.tp_k_head_num, layer.qk_head_dim)
    v = v_cache.new_empty(count, layer.tp_v_head_num, layer.v_head_dim)
    layout = "nhd" if k_cache.ndim == 3 else "vectorized_5d"
    gather_kv(k_cache, v_cache, slots, k[: len(slots)], v[: len(slots)], layout=layout, page_size=page_size)
    return k.to(torch.bfloat16), v.to(torch.bfloat16)
