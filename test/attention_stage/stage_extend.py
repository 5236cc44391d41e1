"""Our TritonExtend over the pools of a Stage: SGLang's real kernels and forward, metadata made here as SGLang makes it.

The constructor of SGLang's backend wants a whole server around it, so it is left out.
"""

from __future__ import annotations

import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention.triton_backend import ForwardMetadata

from sglang_dflash_rocm.srt.layers.attention.triton_extend import TritonExtend
from sglang_dflash_rocm.testing.gfx942 import DEVICE

WINDOW = 128


class StageExtend(TritonExtend):
    """Serves EXTEND and MIXED batches of a Stage; `runner` is Stage.runner()."""

    def __init__(self, runner) -> None:
        self.architectures = runner.model_config.hf_config.architectures
        self._narrowed = {}
        self.token_to_kv_pool, self.page_size = runner.token_to_kv_pool, runner.page_size
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.extend_attention_fwd = extend_attention_fwd
        self.dcp_size, self.dllm_attention = 1, None
        self.enable_deterministic = self.allow_bidirectional_attention_in_extend = False
        self.use_verify_splitkv = self.use_verify_shared_kv = self.use_dense_fp8_chunked_prefill = False

    def init_forward_metadata(self, batch) -> None:
        rows = batch.req_pool_indices.tolist()
        lens = batch.extend_prefix_lens_cpu
        prefix = [self.req_to_token[row, :n].to(torch.int64) for row, n in zip(rows, lens, strict=True)]
        seen = [self.token_to_kv_pool.translate_loc_from_full_to_swa(slots[-WINDOW:]) for slots in prefix]
        starts = [max(0, n - WINDOW) for n in lens]
        empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
        values = dict.fromkeys(ForwardMetadata.__dataclass_fields__)
        values |= dict(
            max_extend_len=max(batch.extend_seq_lens_cpu),
            kv_indptr=_starts(len(slots) for slots in prefix),
            kv_indices=torch.cat([empty, *prefix]),
            qo_indptr=_starts(batch.extend_seq_lens_cpu),
            window_kv_indptr=_starts(len(slots) for slots in seen),
            window_kv_indices=torch.cat([empty, *seen]),
            window_kv_offsets=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        )
        self.forward_metadata = ForwardMetadata(**values)


def _starts(lengths) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(list(lengths)).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
