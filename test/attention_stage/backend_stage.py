"""FlyDSLAttnBackend over SGLang's real pools, without a model: three layers of MiMo's shapes, every forward mode.

On an MI300X the kernels run; elsewhere the backend's float references stand in for them (HARDWARE WE DO NOT HAVE), and
the pools, page tables, slot translation and layouts are still the real ones. Everything that no request owns is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sglang_dflash_rocm.kernels.kv_cache.layout import FP8, as_bytes, quantize, write_reference
from sglang_dflash_rocm.kernels.paged_attention.reference import attend, first_visible_key
from sglang_dflash_rocm.testing.gfx942 import DEVICE, HARDWARE
from sglang_dflash_rocm.testing.paged_cases import ROUNDING, poison

CONTEXT = 512
FULL, SLIDING = 0, 1


@dataclass
class Stage:
    """Pools for `requests` requests, a full and a sliding layer of the target, and the backend over them.

    layout, dtype, page_size: of the KV cache. scales: k_scale and v_scale of the layers (fp8 only).
    """

    architecture = "MiMoV2ForCausalLM"

    layout: str = "nhd"
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 64
    requests: int = 4
    scales: tuple[float, float] | None = None
    seed: int = 0
    keys: dict = field(default_factory=dict)
    values: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        torch.manual_seed(self.seed)
        self.req_to_token_pool = ReqToTokenPool(self.requests, CONTEXT, DEVICE.type, False)
        self.pool = self._pool()
        self._poison()
        pages = self.requests * CONTEXT // self.page_size
        # Page 0 takes the writes of padding; the others are dealt without order.
        dealt = (torch.randperm(pages) + 1).view(self.requests, -1)
        slots = (dealt[:, :, None] * self.page_size + torch.arange(self.page_size)).flatten(1)
        self.slots = torch.cat([torch.zeros(1, CONTEXT, dtype=torch.int64), slots])
        self.req_to_token_pool.req_to_token.copy_(self.slots)
        swa_pages = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(pages) + 1])
        every = torch.arange((pages + 1) * self.page_size)
        self.to_swa = swa_pages[every // self.page_size] * self.page_size + every % self.page_size
        # SGLang appends one entry, so that slot -1 stays -1.
        if hasattr(self.pool, "register_mapping"):
            self.pool.register_mapping(torch.cat([self.to_swa, torch.tensor([-1])]).to(DEVICE))
        self.layers = self._layers()
        for layer in self.layers:
            if self.scales:
                layer.k_scale_float, layer.v_scale_float = self.scales
                layer.k_scale, layer.v_scale = (torch.tensor(scale, device=DEVICE) for scale in self.scales)
        # As MiMo's sliding layers have them.
        self.sinks = [None, torch.randn(16).bfloat16()]
        self.backend = self._backend()

    def _layers(self) -> list:
        from sglang.srt.layers.radix_attention import RadixAttention

        make = dict(num_heads=16, head_dim=192, scaling=192**-0.5, v_head_dim=128)
        return [
            RadixAttention(num_kv_heads=1, layer_id=FULL, **make),
            RadixAttention(num_kv_heads=2, layer_id=SLIDING, sliding_window_size=128, **make),
        ]

    def _pool(self):
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache import memory_pool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        from sglang_dflash_rocm.cpu.pool import CpuMHATokenToKVPool

        size = self.requests * CONTEXT
        with (
            mock.patch.object(memory_pool, "_use_aiter", True),
            envs.SGLANG_AITER_KV_CACHE_LAYOUT.override(self.layout),
        ):
            return SWAKVPool(
                size=size,
                size_swa=size,
                page_size=self.page_size,
                dtype=self.dtype,
                head_num=1,
                head_dim=192,
                v_head_dim=128,
                swa_head_num=2,
                swa_head_dim=192,
                swa_v_head_dim=128,
                swa_attention_layer_ids=[SLIDING],
                full_attention_layer_ids=[FULL],
                device=DEVICE.type,
                enable_alt_stream=False,
                **({} if HARDWARE else dict(token_to_kv_pool_class=CpuMHATokenToKVPool)),
            )

    def _poison(self) -> None:
        for layer in (FULL, SLIDING):
            for buffer in self.buffers(layer):
                as_bytes(buffer).copy_(as_bytes(poison(buffer.shape, self.dtype)))

    def buffers(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, in the pool's layout."""
        return self.pool.get_key_buffer(layer_id), self.pool.get_value_buffer(layer_id)

    def runner(self) -> SimpleNamespace:
        """As much of a ModelRunner as the backends look at."""
        return SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.req_to_token_pool,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            model=torch.nn.ModuleList(self.layers),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[self.architecture])),
        )

    def _backend(self):
        from sglang_dflash_rocm.srt.layers.attention.flydsl_backend import FlyDSLAttnBackend

        if HARDWARE:
            from stage_extend import StageExtend as Extend
        else:
            from sglang_dflash_rocm.cpu.attention import TorchPagedAttnBackend as Extend
        return FlyDSLAttnBackend(self.runner(), Extend(self.runner()))

    def prefill(self, request: int, length: int) -> None:
        """Keys and values of the first `length` tokens of a request (from 1), written by the reference."""
        for layer in self.layers:
            k, v = self._new(layer, length)
            self._remember(layer, request, k, v)
            self._write(layer, k, v, self.slots[request, :length])

    def _new(self, layer, tokens: int):
        k = torch.randn(tokens, layer.tp_k_head_num, layer.qk_head_dim).bfloat16()
        return k, torch.randn(tokens, layer.tp_v_head_num, layer.v_head_dim).bfloat16()

    def _write(self, layer, k, v, slots) -> None:
        caches = [buffer.cpu() for buffer in self.buffers(layer.layer_id)]
        slots = self.to_swa[slots] if self._in_swa_pool(layer) else slots
        write_reference(k, v, *caches, slots, self.layout, self.page_size, *(self.scales or (1.0, 1.0)))
        for buffer, cache in zip(self.buffers(layer.layer_id), caches, strict=True):
            as_bytes(buffer).copy_(as_bytes(cache))

    def _in_swa_pool(self, layer) -> bool:
        return layer.layer_id == SLIDING

    def _remember(self, layer, request: int, k, v, exact: bool = False) -> None:
        for store, new, scale in zip((self.keys, self.values), (k, v), self.scales or (1.0, 1.0), strict=True):
            if self.dtype == FP8 and not exact:
                new = quantize(new, FP8, scale).float() * scale
            name = layer.layer_id, request
            store[name] = torch.cat([store[name], new.double()]) if name in store else new.double()

    def batch(self, mode: str, requests: Sequence[int], lens: Sequence[int], rows: Sequence[int]) -> Any:
        """A ForwardBatch's worth of fields. `lens` are keys in front of this forward's rows; the block is 8."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        out = [self.slots[r, n : n + new] for r, n, new in zip(requests, lens, rows, strict=True)]
        verify = mode == "TARGET_VERIFY"
        ends = [n if verify else n + new for n, new in zip(lens, rows, strict=True)]
        return SimpleNamespace(
            forward_mode=ForwardMode[mode],
            mha_one_shot=False,
            batch_size=len(requests),
            req_pool_indices=torch.tensor(list(requests), device=DEVICE),
            seq_lens=torch.tensor(ends, dtype=torch.int64, device=DEVICE),
            seq_lens_cpu=torch.tensor(ends, dtype=torch.int64),
            seq_lens_sum=sum(ends),
            extend_seq_lens=torch.tensor(list(rows), dtype=torch.int32, device=DEVICE),
            extend_seq_lens_cpu=list(rows),
            extend_prefix_lens=torch.tensor(list(lens), dtype=torch.int32, device=DEVICE),
            extend_prefix_lens_cpu=list(lens),
            out_cache_loc=torch.cat(out).to(DEVICE) if out else torch.zeros(0, dtype=torch.int64, device=DEVICE),
            spec_info=SimpleNamespace(draft_token_num=rows[0] if rows else 8) if verify else None,
        )

    def forward(self, layer, batch, q, k, v):
        """One layer of the backend, as RadixAttention calls it."""
        sinks = self.sinks[layer.layer_id]
        sinks = None if sinks is None else sinks.to(DEVICE)
        method = self.backend.forward_decode if batch.forward_mode.is_decode() else self.backend.forward_extend
        return method(q.flatten(1), k, v, layer, batch, sinks=sinks)

    def inputs(self, layer, batch):
        """(q, k, v) of one forward, on the device."""
        k, v = self._new(layer, len(batch.out_cache_loc))
        q = torch.randn(len(k), layer.tp_q_head_num, layer.qk_head_dim).bfloat16()
        return tuple(t.to(DEVICE) for t in (q, k, v))

    def expected(self, layer, q, requests: Sequence[int], rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(result, error that rounding explains) of rows that are the last of each request's remembered keys."""
        sinks, window, causal = self.sinks[layer.layer_id], *self.mask(layer)
        mode = dict(scale=layer.scaling, window_keys=window, causal=causal)
        mode["sinks"] = None if sinks is None else sinks.double()
        outs, sizes = [], []
        for request, mine in zip(requests, q.cpu().double().split(list(rows)), strict=True):
            k, v = self.keys[layer.layer_id, request], self.values[layer.layer_id, request]
            first = first_visible_key(len(k), len(mine), window)
            mode |= dict(first_key=first, kv_len=len(k))
            outs.append(attend(mine, k[first:], v[first:], **mode)[0])
            sizes.append(attend(mine, k[first:], v[first:].abs(), **mode)[0])
        return torch.cat(outs).flatten(1), torch.cat(sizes).flatten(1) * ROUNDING + 1e-6

    def mask(self, layer) -> tuple[int | None, bool]:
        """(keys that a query sees or None, causal): what MiMo means, said without the code under test."""
        return (None, True) if layer.layer_id == FULL else (128, True)

    def remember(self, layer, requests: Sequence[int], rows: Sequence[int], k, v, exact: bool = False) -> None:
        """This forward's keys and values belong to the requests from now on, as the pool holds them unless `exact`."""
        for request, new_k, new_v in zip(requests, k.cpu().split(list(rows)), v.cpu().split(list(rows)), strict=True):
            self._remember(layer, request, new_k, new_v, exact)

    def step(self, mode: str, requests: Sequence[int], lens: Sequence[int], rows: Sequence[int]) -> None:
        """One forward of every layer without a graph, compared with the reference.

        Raises:
            AssertionError: a value is wrong or not finite.
        """
        batch = self.batch(mode, requests, lens, rows)
        self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            q, k, v = self.inputs(layer, batch)
            out = self.forward(layer, batch, q, k, v)
            self.remember(layer, requests, rows, k, v)
            self.compare(out, *self.expected(layer, q, requests, rows), f"{mode}, layer {layer.layer_id}")

    @staticmethod
    def compare(out, expected, bound, what: str) -> None:
        wrong = ~((out.cpu().double() - expected).abs() <= bound)
        assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} values differ"


class DraftStage(Stage):
    """The DFlash draft's shapes: 128/128, one pool of rows, a block that sees itself in full layers."""

    architecture = "DFlashDraftModel"

    def _pool(self):
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from sglang_dflash_rocm.cpu.pool import CpuMHATokenToKVPool

        return (MHATokenToKVPool if HARDWARE else CpuMHATokenToKVPool)(
            size=self.requests * CONTEXT,
            page_size=self.page_size,
            dtype=self.dtype,
            head_num=2,
            head_dim=128,
            layer_num=2,
            device=DEVICE.type,
            enable_memory_saver=False,
            enable_alt_stream=False,
        )

    def _layers(self) -> list:
        from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

        make = dict(num_heads=16, num_kv_heads=2, head_dim=128, scaling=128**-0.5)
        return [
            RadixAttention(layer_id=FULL, attn_type=AttentionType.ENCODER_ONLY, **make),
            # SGLang's draft takes one off the config's window, 64.
            RadixAttention(layer_id=SLIDING, sliding_window_size=63, **make),
        ]

    def _in_swa_pool(self, layer) -> bool:
        return False

    def mask(self, layer) -> tuple[int | None, bool]:
        return (None, False) if layer.layer_id == FULL else (64, True)
