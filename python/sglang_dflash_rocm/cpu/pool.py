"""KV pool of the CPU platform."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """SGLang's pool without the Triton KV mover, which only tree drafts (``topk > 1``) use."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
