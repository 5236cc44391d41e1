"""The draft's KV pool keeps its rows together, whatever the target's layout is."""

from __future__ import annotations

from typing import Any


def draft_pool_in_nhd(original: Any, configurator: Any, **kwargs: Any) -> Any:
    """AROUND `_build_mha_kv_pool`: DFLASH writes the draft's KV by token, so a vectorized pool would be corrupted."""
    if not configurator.is_draft_worker:
        return original(configurator, **kwargs)
    from sglang.srt.environ import envs

    with envs.SGLANG_AITER_KV_CACHE_LAYOUT.override("nhd"):
        return original(configurator, **kwargs)
