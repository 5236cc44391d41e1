"""Scratch buffers of DFLASH's decode preparation that live longer than one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

#: Device buffers for the KV lengths before and after a step, by device.
_kept: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def keep_length_buffers(
    original: Callable, draft_input: DFlashDraftInputV2, bs: int, device: torch.device | str
) -> None:
    """AROUND ``DFlashDraftInputV2._ensure_prepare_length_buffers``: no device allocation between steps.

    SGLang makes a new draft input in every step and compares ``"cuda"`` with ``"cuda:0"``, so that it allocates anew
    each time. The device buffers are written and read on one stream, in order, which makes them safe to keep; the host
    buffers are copied from asynchronously and stay with their step.
    """
    device = with_index(torch.device(device))
    if draft_input._prepare_cur_kv_lens_gpu_buf is None and device in _kept:
        draft_input._prepare_cur_kv_lens_gpu_buf, draft_input._prepare_nxt_kv_lens_gpu_buf = _kept[device]
    original(draft_input, bs, device)
    _kept[device] = (draft_input._prepare_cur_kv_lens_gpu_buf, draft_input._prepare_nxt_kv_lens_gpu_buf)


def with_index(device: torch.device) -> torch.device:
    """``device`` as a tensor on it reports it: accelerators carry an index, the CPU does not."""
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None:
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device
