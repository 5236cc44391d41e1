"""`--attention-backend flydsl`: paged attention of kernels/paged_attention for decode, verify and the draft's block.

Extend goes to another backend (Triton on a GPU), until there is a prefill kernel; KV is written here in every mode.
Without a GPU, on the CPU platform, the kernels are replaced by float references behind the same calls: HARDWARE WE DO
NOT HAVE.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dflash_rocm.kernels.kv_cache.layout import FP8, LAYOUTS, write_reference
from sglang_dflash_rocm.kernels.kv_cache.write import store_kv
from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract, supported
from sglang_dflash_rocm.kernels.paged_attention.launch import UnsupportedContract

from .flydsl_pa import Operations, PageTables
from .window import window_keys

logger = logging.getLogger(__name__)

_KV_DTYPES = {torch.bfloat16: "bf16", FP8: "fp8_fnuz"}
_SINKS_DTYPES = {torch.bfloat16: "bf16", torch.float32: "float32"}


class FlyDSLAttnBackend(AttentionBackend):
    """Target and draft: extend, decode, target verify, the draft's block, idle batches; hybrid sliding-window pools.

    Args:
        runner: SGLang's ModelRunner.
        extend: the backend that serves EXTEND and MIXED forwards; it knows MiMo's window by itself.

    Raises:
        UnsupportedContract: a page size, KV cache or layer shape without a kernel: no request is needed to find it.
    """

    def __init__(self, runner, extend: AttentionBackend) -> None:
        super().__init__()
        self.extend = extend
        self.pool = runner.token_to_kv_pool
        self.architectures = tuple(runner.model_config.hf_config.architectures or ())
        self.has_swa_pool = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        translate = self.pool.translate_loc_from_full_to_swa if self.has_swa_pool else None
        req_to_token = runner.req_to_token_pool.req_to_token
        self.tables = PageTables(req_to_token, runner.page_size, translate)
        self.operations = Operations(req_to_token.device, len(req_to_token), self.tables.max_context)
        self.on_gpu = req_to_token.device.type == "cuda"
        self.layout = _layout(self.pool)
        self._swa_slots: torch.Tensor | None = None
        self._check_layers(runner.model, runner.dtype)
        logger.info(
            "flydsl attention for %s, page size %d, %s: %s; extend by %s",
            ", ".join(self.architectures),
            runner.page_size,
            self.layout,
            "kernels" if self.on_gpu else "float references in place of the kernels, there is no GPU",
            type(extend).__name__,
        )

    def _check_layers(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        if self.on_gpu and dtype != torch.bfloat16:
            raise UnsupportedContract(f"--attention-backend flydsl with --dtype {dtype}; allowed: bfloat16")
        for layer in model.modules():
            if isinstance(layer, RadixAttention):
                try:
                    contract = self._contract(layer, self.pool.get_key_buffer(layer.layer_id), rows=1)
                    reason = supported(contract)
                except UnsupportedContract as error:
                    reason = str(error)
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
        """Nothing: tables are made once, operations compile in the forward that precedes a capture, and `extend` is
        never captured here."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """For a forward without a graph."""
        mode = forward_batch.forward_mode
        if mode.is_idle() or _is_paged(mode):
            self.init_forward_metadata_out_graph(forward_batch)
        else:
            self.extend.init_forward_metadata(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if not _is_paged(mode):
            self.extend.init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        topk = getattr(forward_batch.spec_info, "topk", 1)
        if topk > 1:
            raise UnsupportedContract(f"flydsl: a draft tree (topk {topk}) has its own mask; allowed: a chain, topk 1")
        self.tables.fill(forward_batch.req_pool_indices, forward_batch.seq_lens)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Where sliding layers write, once for all of them: recorded, so that a replay reads its own slots."""
        if self.has_swa_pool and forward_batch.out_cache_loc is not None:
            self._swa_slots = self.pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **_):
        """One query row per request; its key is the last of seq_lens."""
        self._store(k, v, layer, forward_batch, save_kv_cache)
        return self._paged(q, layer, sinks, rows=1, extra=0)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **kwargs):
        """Verify and the draft's block by our kernels, whose keys lie behind seq_lens; everything else by `extend`."""
        self._store(k, v, layer, forward_batch, save_kv_cache)
        if forward_batch.forward_mode.is_target_verify():
            rows = int(forward_batch.spec_info.draft_token_num)
            return self._paged(q, layer, sinks, rows=rows, extra=rows)
        if sinks is not None:
            kwargs["sinks"] = sinks
        return self.extend.forward_extend(q, k, v, layer, forward_batch, save_kv_cache=False, **kwargs)

    def _store(self, k, v, layer: RadixAttention, forward_batch: ForwardBatch, wanted: bool) -> None:
        """Keys and values of this forward, `[tokens, kv_heads, dim]` each, to their slots of the layer's pool."""
        if not wanted or k is None:
            return
        slots = self._swa_slots if self._in_swa_pool(layer) else forward_batch.out_cache_loc
        tokens = len(slots)  # rows behind them are padding
        k_scale, v_scale = _scales(layer)
        (store_kv if self.on_gpu else write_reference)(
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)[:tokens],
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim)[:tokens],
            self.pool.get_key_buffer(layer.layer_id),
            self.pool.get_value_buffer(layer.layer_id),
            slots,
            layout=self.layout,
            page_size=self.tables.page_size,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def _paged(self, q: torch.Tensor, layer: RadixAttention, sinks, rows: int, extra: int) -> torch.Tensor:
        """`q [tokens, q_heads * qk_dim]` to `[tokens, q_heads * v_dim]`; rows behind the last request's give 0."""
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        requests = self.tables.requests
        used = requests * rows
        if used > len(q):
            raise ValueError(f"flydsl: {len(q)} query rows for {requests} requests of {rows} rows each")
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        out[used:] = 0.0
        if requests:
            keys, values = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
            operation, partitions, scratch = self.operations.get(self._contract(layer, keys, rows, sinks), requests)
            k_scale, v_scale = _scales(layer)
            operation(
                out[:used],
                q[:used],
                keys,
                values,
                (self.tables.sliding if self._in_swa_pool(layer) else self.tables.full)[:requests],
                self.tables.seq_lens[:requests],
                scale=layer.scaling,
                scratch=scratch,
                partitions=partitions,
                extra=extra,
                sinks=sinks,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _in_swa_pool(self, layer: RadixAttention) -> bool:
        return self.has_swa_pool and self.pool.layers_mapping[layer.layer_id][1]

    def _contract(self, layer: RadixAttention, keys: torch.Tensor, rows: int, sinks=None) -> PagedAttentionContract:
        if layer.logit_cap:
            raise UnsupportedContract(f"logits soft cap {layer.logit_cap}; allowed: 0")
        # The references of the CPU platform take any float type in place of bf16.
        kv_dtype = _KV_DTYPES.get(keys.dtype, None if self.on_gpu or keys.itemsize == 1 else "bf16")
        if kv_dtype is None:
            raise UnsupportedContract(f"a KV cache of {keys.dtype}; allowed: {', '.join(map(str, _KV_DTYPES))}")
        if sinks is not None and sinks.dtype not in _SINKS_DTYPES:
            raise UnsupportedContract(f"sinks of {sinks.dtype}; allowed: {', '.join(map(str, _SINKS_DTYPES))}")
        return PagedAttentionContract(
            q_heads=layer.tp_q_head_num,
            kv_heads=layer.tp_k_head_num,
            qk_dim=layer.qk_head_dim,
            v_dim=layer.v_head_dim,
            page_size=self.tables.page_size,
            q_rows=rows,
            window=window_keys(layer.sliding_window_size, self.architectures),
            sinks=sinks is not None,
            sinks_dtype="float32" if sinks is None else _SINKS_DTYPES[sinks.dtype],
            causal=layer.attn_type != AttentionType.ENCODER_ONLY and not layer.is_cross_attention,
            kv_dtype=kv_dtype,
            layout=self.layout,
        )


def _is_paged(mode) -> bool:
    return mode.is_decode() or mode.is_target_verify()


def _scales(layer: RadixAttention) -> tuple[float, float]:
    """What stored fp8 numbers of K and V are multiplied with; 1 without calibration."""
    return getattr(layer, "k_scale_float", None) or 1.0, getattr(layer, "v_scale_float", None) or 1.0


def _layout(pool) -> str:
    """Layout of a KV pool, or of both parts of a hybrid one.

    Raises:
        UnsupportedContract: a layout or a quantized pool that our kernels cannot read.
    """
    parts = (pool.full_kv_pool, pool.swa_kv_pool) if isinstance(pool, SWAKVPool) else (pool,)
    layouts = {"quantized" if part.is_quantized_kv_cache else part.kv_cache_layout for part in parts}
    if len(layouts) != 1 or not layouts <= set(LAYOUTS):
        raise UnsupportedContract(
            f"--attention-backend flydsl with a KV pool of layout {' and '.join(sorted(layouts))}; allowed: "
            f"{', '.join(LAYOUTS)} (SGLANG_AITER_KV_CACHE_LAYOUT; unset SGLANG_USE_HND_KVCACHE)"
        )
    return layouts.pop()
