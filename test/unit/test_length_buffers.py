"""Device buffers of DFLASH's decode preparation: SGLang's real draft input, step after step."""

from __future__ import annotations

import pkgutil

import pytest
import torch
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

from sglang_dflash_rocm.hook_table import HOOKS
from sglang_dflash_rocm.srt.speculative import dflash_info_v2 as ours

upstream = DFlashDraftInputV2._ensure_prepare_length_buffers


def with_hook(draft_input: DFlashDraftInputV2, bs: int, device) -> None:
    ours.keep_length_buffers(upstream, draft_input, bs, device)


def pointers_of_steps(prepare, sizes: list[int], device="cpu") -> list[tuple[int, int]]:
    """Addresses of both device buffers in each step; every step has a draft input of its own, as in the worker."""
    seen, kept_alive = [], []
    for bs in sizes:
        draft_input = DFlashDraftInputV2.create_idle_input(torch.device("cpu"))
        prepare(draft_input, bs, device)
        buffers = draft_input._prepare_cur_kv_lens_gpu_buf, draft_input._prepare_nxt_kv_lens_gpu_buf
        assert all(buffer.numel() >= bs and buffer.dtype == torch.int32 for buffer in buffers)
        seen.append(tuple(buffer.data_ptr() for buffer in buffers))
        kept_alive.append(draft_input)
    return seen


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(ours, "_kept", {})


def test_no_device_buffer_is_allocated_between_steps():
    seen = pointers_of_steps(with_hook, [4, 9, 1, 32, 2])
    assert len(set(seen)) == 1 and seen[0][0] != seen[0][1]


def test_the_hook_is_in_the_table():
    (hook,) = [hook for hook in HOOKS if hook.impl == f"{ours.__name__}:keep_length_buffers"]
    assert pkgutil.resolve_name(hook.target) is upstream and hook.kind == "around" and hook.group == "dflash"


def test_without_the_hook_every_step_allocates():
    assert len(set(pointers_of_steps(upstream, [4, 9, 1, 32, 2]))) == 5


def test_a_larger_batch_grows_the_buffers_once():
    seen = pointers_of_steps(with_hook, [4, 100, 100, 60])
    assert len(set(seen)) == 2 and seen[1] == seen[2] == seen[3]


def test_allocations_are_counted(monkeypatch):
    """The two device buffers; the host's three stay with their step, because they are copied from asynchronously."""
    counted: list[tuple] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: counted.append(a) or empty(*a, **kw))
    inputs = [DFlashDraftInputV2.create_idle_input(torch.device("cpu")) for _ in range(4)]
    counted.clear()
    for draft_input in inputs:
        with_hook(draft_input, 8, "cpu")
    assert len(counted) == 3 * len(inputs) + 2


def test_a_host_buffer_is_never_shared_between_steps():
    first, second = (DFlashDraftInputV2.create_idle_input(torch.device("cpu")) for _ in range(2))
    with_hook(first, 4, "cpu")
    with_hook(second, 4, "cpu")
    assert first._prepare_nxt_kv_lens_cpu_buf.data_ptr() != second._prepare_nxt_kv_lens_cpu_buf.data_ptr()


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_a_device_is_named_as_its_tensors_name_it(name):
    assert ours.with_index(torch.device(name)) == torch.device("cpu")
