"""SGLang's Triton attention, launched by its own wrappers as on a HIP GPU, on the simulator.

It is the path that a user of gfx942 has today, so it is what our kernels are compared with. Only what tells the
wrappers that this is an MI300X is replaced (HARDWARE WE DO NOT HAVE); kernels and launch parameters are SGLang's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from sglang_dflash_rocm.testing.gfx942 import HARDWARE
from sglang_dflash_rocm.testing.paged_cases import PagedCase

COMPUTE_UNITS = 304
MAX_SPLITS = 16


@contextmanager
def as_on_mi300x(*buffers: Any, **options: Any) -> Iterator[Any]:
    """SGLang's wrappers believe in an MI300X, and Triton launches run on the simulator. Yields the device."""
    if HARDWARE:
        raise RuntimeError("this GPU runs SGLang's kernels itself")
    from sglang.kernels.ops.attention import decode_attention, extend_attention

    from gfx942sim.triton_target import simulated_triton

    with (
        mock.patch.object(decode_attention, "_is_hip", True),
        mock.patch.object(extend_attention, "_is_hip", True),
        mock.patch.object(decode_attention, "get_device_core_count", lambda *_: COMPUTE_UNITS),
        simulated_triton(*buffers, **options) as device,
    ):
        yield device


def _visible(case: PagedCase, extra: int) -> list:
    """Slots that SGLang hands its kernels per request: all, or the last `window` of them."""
    window = case.contract.window
    kept = []
    for slots, length in zip(case.slots, case.lens, strict=True):
        seen = slots[: length + extra]
        kept.append(seen if window is None else seen[-window:])
    return kept


def decode(case: PagedCase, splits: int, **options: Any):
    """(out, launches) of decode_attention_fwd for a case with one query row per request.

    Args:
        splits: partitions per request, which SGLang computes on the device.
    """
    import torch
    from sglang.kernels.ops.attention import decode_attention

    c = case.contract
    slots = _visible(case, extra=1)
    n = case.requests
    indptr = torch.tensor([0, *torch.tensor([len(s) for s in slots]).cumsum(0).tolist()], dtype=torch.int32)
    out = torch.zeros(n, c.q_heads, c.v_dim, dtype=torch.bfloat16)
    with as_on_mi300x(**options) as device:
        decode_attention.decode_attention_fwd(
            case.q,
            case.k,
            case.v,
            out,
            indptr,
            torch.cat(slots),
            torch.zeros(n, c.q_heads, MAX_SPLITS, c.v_dim),
            torch.zeros(n, c.q_heads, MAX_SPLITS),
            torch.full((n,), splits, dtype=torch.int32),
            MAX_SPLITS,
            case.scale,
            1.0,
            1.0,
            sinks=None if case.sinks is None else case.sinks.bfloat16(),
            page_size=c.page_size,
            enable_lean=False,
        )
    return out, device.launches


def verify(case: PagedCase, **options: Any):
    """(out, launches) of extend_attention_fwd for the block of a verify: its keys come apart from the cache's."""
    import torch
    from sglang.kernels.ops.attention import extend_attention

    c = case.contract
    n, rows = case.requests, c.q_rows
    prefix = _visible(case, extra=0)
    block = torch.cat([s[length:] for s, length in zip(case.slots, case.lens, strict=True)])
    indptr = torch.tensor([0, *torch.tensor([len(s) for s in prefix]).cumsum(0).tolist()], dtype=torch.int32)
    out = torch.zeros(n * rows, c.q_heads, c.v_dim, dtype=torch.bfloat16)
    window = {}
    if c.window is not None:
        # What MiMo hands over: one key more than the window, see srt/layers/attention/window.py.
        window = dict(sliding_window_size=c.window, window_kv_offsets=torch.zeros(n, dtype=torch.int32))
    with as_on_mi300x(**options) as device:
        extend_attention.extend_attention_fwd(
            case.q,
            case.k[block],
            case.v[block],
            out,
            case.k,
            case.v,
            torch.arange(n + 1, dtype=torch.int32) * rows,
            indptr,
            torch.cat(prefix),
            None,
            True,
            None,
            rows,
            1.0,
            1.0,
            case.scale,
            sinks=None if case.sinks is None else case.sinks.bfloat16(),
            page_size=c.page_size,
            extend_seq_lens_cpu=[rows] * n,
            **window,
        )
    return out, device.launches
