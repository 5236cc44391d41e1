"""How many keys a query sees: one meaning of the sliding window for every backend of ours.

SGLang stores ``window_left`` (keys besides the query's own) in ``RadixAttention.sliding_window_size``, and its models
subtract one from the config's window to get there; the DFlash draft does so too (``speculative/dflash_utils.py``,
``get_dflash_attention_sliding_window_size``). MiMo-V2 hands the config's window on undiminished
(``models/mimo_v2.py:891``), so that SGLang's extend and verify see one key too many and its Triton decode does not.
transformers' MiMo-V2-Flash masks with ``kv > q - sliding_window``: the query's own key counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_dflash_rocm.checkpoint import TARGETS

#: Architectures whose layers carry the config's window itself, not ``window_left``.
UNDIMINISHED_WINDOW = frozenset({*TARGETS, "MiMoV2MTP"})


def window_keys(sliding_window_size: int | None, architectures: Iterable[str]) -> int | None:
    """Keys a query sees, its own included, or ``None`` for full attention.

    Args:
        sliding_window_size: ``RadixAttention.sliding_window_size``; ``None`` or negative means no window.
        architectures: ``hf_config.architectures`` of the model that the layer belongs to.
    """
    if sliding_window_size is None or sliding_window_size < 0:
        return None
    if UNDIMINISHED_WINDOW.intersection(architectures):
        return sliding_window_size
    return sliding_window_size + 1
