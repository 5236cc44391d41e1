"""How often a DFLASH server gives back slots of the sliding-window pool (``SGLANG_DFLASH_SWA_TOKEN_INTERVAL``).

SGLang evicts a request once ``SGLANG_SWA_EVICTION_INTERVAL`` tokens have slid out of its window, and reserves that
interval *times the draft block* for every request, as if it counted steps. This interval counts tokens in both places:
for the same number of evictions it reserves about an eighth at block 8, which leaves room for more requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dflash_rocm import environ, gate

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def aligned_interval(tokens: int, page_size: int, block_size: int) -> int:
    """``tokens`` rounded up to whole pages and whole draft blocks, at least one of each.

    Slots are freed in pages, and a request moves by up to a block per step: a finer interval would only be evaluated
    more often.
    """
    unit = math.lcm(page_size, block_size)
    return max(1, math.ceil(tokens / unit)) * unit


def swa_eviction_trigger(
    original: Callable[..., Callable[[Req], bool]],
    batch: ScheduleBatch,
    sliding_window_size: int,
    eviction_interval: int,
) -> Callable[[Req], bool]:
    """AROUND ``ScheduleBatch._swa_eviction_trigger``: SGLang's token trigger with our interval."""
    if not _is_dflash():
        return original(batch, sliding_window_size, eviction_interval)
    page_size = batch.token_to_kv_pool_allocator.page_size
    return original(batch, sliding_window_size, interval_tokens(page_size))


def swa_request_cap(original: Callable[..., int], *, page_size: int, **kwargs: Any) -> int:
    """AROUND ``compute_swa_request_cap``: reserve what the interval lets a request hold, not that times the block.

    The overshoot is the interval plus the block that a request may gain before the next look; SGLang multiplies its
    interval by the block, so it is told ``interval / block + 1``.
    """
    from sglang.srt.environ import envs

    if not _is_dflash():
        return original(page_size=page_size, **kwargs)
    if envs.SGLANG_AMD_USE_FLYDSL_MEGA_MOE.get():
        gate.stop(
            [
                "SGLANG_DFLASH_SWA_TOKEN_INTERVAL counts tokens, SGLANG_AMD_USE_FLYDSL_MEGA_MOE=1 makes SGLang count "
                "forwards: unset one of them"
            ]
        )
    steps = interval_tokens(page_size) // _block_size() + 1
    with envs.SGLANG_SWA_EVICTION_INTERVAL.override(steps):
        return original(page_size=page_size, **kwargs)


def interval_tokens(page_size: int) -> int:
    """The interval in force, in tokens."""
    return aligned_interval(environ.SGLANG_DFLASH_SWA_TOKEN_INTERVAL.get(), page_size, _block_size())


def _is_dflash() -> bool:
    from sglang.srt.runtime_context import get_spec

    return (get_spec().speculative_algorithm or "").upper() == "DFLASH"


def _block_size() -> int:
    # Not speculative_dflash_block_size: SGLang leaves it None when the block comes from the draft's configuration.
    from sglang.srt.runtime_context import get_spec

    return int(get_spec().speculative_num_draft_tokens)
