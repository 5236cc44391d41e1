"""`--attention-backend flydsl`: paged attention of kernels/paged_attention for decode, verify and the draft's block.

Extend goes to another backend of SGLang's (Triton on a GPU), until there is a prefill kernel. Without a GPU, on the CPU
platform, the kernels are replaced by the float reference behind the same call: HARDWARE WE DO NOT HAVE.
"""

from __future__ import annotations

import copy
import logging

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dflash_rocm.kernels.kv_cache.layout import FP8
from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract, supported
from sglang_dflash_rocm.kernels.paged_attention.launch import UnsupportedContract

from .flydsl_pa import Operations, PageTables
from .window import window_keys

logger = logging.getLogger(__name__)


class FlyDSLAttnBackend(AttentionBackend):
    """Target and draft: extend, decode, target verify, the draft's block, idle batches; hybrid sliding-window pools.

    Args:
        runner: SGLang's ModelRunner.
        extend: the backend that serves EXTEND and MIXED forwards.
        window_left: `extend` takes a layer's sliding_window_size for the keys besides the query's own, as SGLang's
            Triton kernels do; MiMo's layers carry the window itself, so it is handed one less.

    Raises:
        UnsupportedContract: a page size or a layer's shape without a kernel: no request is needed to find it.
    """

    def __init__(self, runner, extend: AttentionBackend, window_left: bool) -> None:
        super().__init__()
        self.extend, self.window_left = extend, window_left
        self.pool = runner.token_to_kv_pool
        self.architectures = tuple(runner.model_config.hf_config.architectures or ())
        self.has_swa_pool = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        translate = self.pool.translate_loc_from_full_to_swa if self.has_swa_pool else None
        req_to_token = runner.req_to_token_pool.req_to_token
        self.tables = PageTables(req_to_token, runner.page_size, translate)
        self.operations = Operations(req_to_token.device, len(req_to_token), self.tables.max_context)
        self._sinks: dict[int, torch.Tensor] = {}
        self._narrowed: dict[int, RadixAttention] = {}
        self._check_layers(runner.model)
        logger.info(
            "flydsl attention for %s, page size %d: %s; extend by %s",
            ", ".join(self.architectures),
            runner.page_size,
            "kernels" if req_to_token.is_cuda else "float reference in place of the kernels, there is no GPU",
            type(extend).__name__,
        )

    def _check_layers(self, model: torch.nn.Module) -> None:
        for layer in model.modules():
            if isinstance(layer, RadixAttention):
                keys = self.pool.get_key_buffer(layer.layer_id)
                reason = supported(self._contract(layer, keys, rows=1, sinks=False))
                if reason is not None:
                    raise UnsupportedContract(
                        f"--attention-backend flydsl, layer {layer.layer_id} of {', '.join(self.architectures)}: "
                        f"{reason}; use --attention-backend triton"
                    )

    def support_triton(self) -> bool:
        return self.extend.support_triton()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing of ours: tables are made once, and operations compile in the forward that precedes a capture."""
        self.extend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if not _is_paged(mode):
            self.extend.init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        self.tables.fill(forward_batch.req_pool_indices, forward_batch.seq_lens)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        if not mode.is_idle() and not _is_paged(mode):
            self.extend.init_forward_metadata_in_graph(forward_batch)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **_):
        """One query row per request; its key is the last of seq_lens."""
        return self._paged(q, k, v, layer, forward_batch, save_kv_cache, sinks, rows=1, extra=0)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **kwargs):
        """Verify and the draft's block by our kernels, whose keys lie behind seq_lens; everything else by `extend`."""
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            rows = int(forward_batch.spec_info.draft_token_num)
            return self._paged(q, k, v, layer, forward_batch, save_kv_cache, sinks, rows=rows, extra=rows)
        if sinks is not None:
            kwargs["sinks"] = sinks
        return self.extend.forward_extend(q, k, v, self._for_extend(layer), forward_batch, save_kv_cache, **kwargs)

    def _paged(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        sinks: torch.Tensor | None,
        rows: int,
        extra: int,
    ) -> torch.Tensor:
        """`q [requests * rows, q_heads * qk_dim]` to `[requests * rows, q_heads * v_dim]`."""
        in_swa_pool = self.has_swa_pool and self.pool.layers_mapping[layer.layer_id][1]
        if save_kv_cache and k is not None:
            slots = forward_batch.out_cache_loc
            swa_slots = self.pool.translate_loc_from_full_to_swa(slots) if in_swa_pool else None
            self.pool.set_kv_buffer(layer, KVWriteLoc(slots, swa_slots), k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        requests = q.shape[0] // rows
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if requests:
            keys, values = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
            contract = self._contract(layer, keys, rows, sinks is not None)
            operation, partitions, scratch = self.operations.get(contract, requests)
            operation(
                out,
                q,
                keys,
                values,
                (self.tables.sliding if in_swa_pool else self.tables.full)[:requests],
                self.tables.seq_lens[:requests],
                scale=layer.scaling,
                scratch=scratch,
                partitions=partitions,
                extra=extra,
                sinks=self._float_sinks(layer, sinks),
                k_scale=getattr(layer, "k_scale_float", None) or 1.0,
                v_scale=getattr(layer, "v_scale_float", None) or 1.0,
            )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _contract(self, layer: RadixAttention, keys: torch.Tensor, rows: int, sinks: bool) -> PagedAttentionContract:
        if layer.logit_cap:
            raise UnsupportedContract(f"flydsl: logits soft cap {layer.logit_cap}; allowed: 0")
        return PagedAttentionContract(
            q_heads=layer.tp_q_head_num,
            kv_heads=layer.tp_k_head_num,
            qk_dim=layer.qk_head_dim,
            v_dim=layer.v_head_dim,
            page_size=self.tables.page_size,
            q_rows=rows,
            window=window_keys(layer.sliding_window_size, self.architectures),
            sinks=sinks,
            causal=layer.attn_type != AttentionType.ENCODER_ONLY and not layer.is_cross_attention,
            kv_dtype="fp8_fnuz" if keys.dtype == FP8 else "bf16",
        )

    def _float_sinks(self, layer: RadixAttention, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """The layer's sinks in float32, converted once: weights do not change while a server runs."""
        if sinks is None:
            return None
        if layer.layer_id not in self._sinks:
            self._sinks[layer.layer_id] = sinks.float()
        return self._sinks[layer.layer_id]

    def _for_extend(self, layer: RadixAttention) -> RadixAttention:
        """The layer with the window that `extend` expects."""
        keys = window_keys(layer.sliding_window_size, self.architectures)
        if not self.window_left or keys is None or keys == layer.sliding_window_size + 1:
            return layer
        if layer.layer_id not in self._narrowed:
            narrowed = copy.copy(layer)
            narrowed.sliding_window_size = keys - 1
            self._narrowed[layer.layer_id] = narrowed
        return self._narrowed[layer.layer_id]


def _is_paged(mode) -> bool:
    return mode.is_decode() or mode.is_target_verify()
