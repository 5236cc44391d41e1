"""The CPU platform's pieces that need no server, and that nothing of it is active where it was not selected."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from sglang_dflash_rocm.cpu import activate, hooks, torch_gaps, torchvision_shim
from sglang_dflash_rocm.hook_table import HOOKS


def _in_process(code: str, **env: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_activate_only_when_selected(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "somebody_elses")
    assert activate.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "dflash_cpu")
    assert activate.activate() == "sglang_dflash_rocm.cpu.platform.CpuPlatform"


@pytest.mark.parametrize(
    ("name", "value"), [("SGLANG_DFLASH_ROCM", "0"), ("SGLANG_PLUGINS", "another_plugin, a_third")]
)
def test_selected_but_switched_off_is_refused(monkeypatch, name, value):
    monkeypatch.setenv("SGLANG_PLATFORM", "dflash_cpu")
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=name):
        activate.activate()


_STATE = """
import json, torch
before = torch.Tensor.record_stream
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
import sglang.srt.model_executor.model_runner
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.platforms import current_platform
import sys
print(json.dumps({
    "platform": type(current_platform).__name__,
    "patched": sorted(HookRegistry._patched),
    "backend": "torch_paged" in ATTENTION_BACKENDS,
    "record_stream": torch.Tensor.record_stream is before,
    "is_cpu": forward_batch_info._is_cpu,
    "ours": sorted(m for m in sys.modules if m.startswith("sglang_dflash_rocm.cpu.") and not m.endswith("activate")),
    "mirrored": torch._C._dispatch_has_kernel_for_dispatch_key("sglang::inplace_all_reduce", "CPU"),
}))
"""


def test_nothing_is_patched_in_a_process_that_did_not_select_the_platform():
    run = _in_process(_STATE, SGLANG_PLATFORM="")
    assert run.returncode == 0, run.stderr[-2000:]
    state = json.loads(run.stdout.splitlines()[-1])
    assert state["platform"] != "CpuPlatform"
    assert not state["backend"] and not state["mirrored"] and not state["is_cpu"]
    assert state["record_stream"], "torch.Tensor was changed"
    assert state["ours"] == []
    core = {hook.target for hook in HOOKS if hook.group == "core" and hook.kind != "reads"}
    assert set(state["patched"]) == core


def test_the_selected_platform_is_complete():
    """The same probe sees every change where the platform is selected, so the test above would notice a leak."""
    run = _in_process(_STATE, SGLANG_PLATFORM="dflash_cpu")
    assert run.returncode == 0, run.stderr[-2000:]
    state = json.loads(run.stdout.splitlines()[-1])
    assert state["platform"] == "CpuPlatform"
    assert state["backend"] and state["mirrored"] and state["is_cpu"] and not state["record_stream"]
    assert "sglang.srt.layers.dp_attention.memcpy" in state["patched"]


@pytest.mark.parametrize("offset_src", [False, True])
@pytest.mark.parametrize(("offset", "rows"), [(0, 3), (2, 3), (5, 3), (6, 2), (4, 0)])
def test_memcpy_copies_rows_and_clips(offset, rows, offset_src):
    src = torch.arange(12.0).view(6, 2)
    dst = torch.full((7, 2), -1.0)
    hooks.memcpy(dst, src, 0, offset, rows, offset_src)
    want = torch.full((7, 2), -1.0)
    for i in range(rows):
        at_src, at_dst = (offset + i, i) if offset_src else (i, offset + i)
        if at_src < 6 and at_dst < 7:
            want[at_dst] = src[at_src]
    assert torch.equal(dst, want)


def test_memcpy_refuses_other_dimensions():
    with pytest.raises(ValueError, match="only dim 0"):
        hooks.memcpy(torch.zeros(2, 2), torch.zeros(2, 2), 1, 0, 1, False)


def test_assign_req_to_token_pool_writes_only_the_named_slots():
    table = torch.full((4, 8), -1, dtype=torch.int32)
    slots = torch.tensor([10, 11, 12, 20], dtype=torch.int64)
    hooks.assign_req_to_token_pool(torch.tensor([2, 0]), table, torch.tensor([1, 5]), torch.tensor([4, 6]), slots, 2)
    want = torch.full((4, 8), -1, dtype=torch.int32)
    want[2, 1:4], want[0, 5] = torch.tensor([10, 11, 12], dtype=torch.int32), 20
    assert torch.equal(table, want)


def test_custom_ops_get_a_cpu_kernel_that_calls_the_registered_one():
    lib = torch.library.Library("sglang", "FRAGMENT")
    lib.define("dflash_test_double(Tensor x) -> Tensor")
    lib.impl("dflash_test_double", lambda x: x * 2, "PrivateUse1")
    op = torch.ops.sglang.dflash_test_double
    with pytest.raises(NotImplementedError):
        op(torch.ones(2))
    assert "sglang::dflash_test_double" in torch_gaps.mirror_custom_ops()
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))
    assert torch_gaps.mirror_custom_ops() == []


def test_torchvision_shim_leaves_other_failures_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(torchvision_shim, "import_error", lambda: "ModuleNotFoundError: No module named 'torchvision'")
    with pytest.raises(RuntimeError, match="No module named"):
        torchvision_shim.install(tmp_path)
    assert not list(tmp_path.iterdir())


def test_torchvision_shim_takes_its_file_back_when_it_does_not_help(monkeypatch, tmp_path):
    monkeypatch.setattr(torchvision_shim, "import_error", lambda: torchvision_shim._SYMPTOM)
    with pytest.raises(RuntimeError, match="still does not import"):
        torchvision_shim.install(tmp_path)
    assert not list(tmp_path.iterdir())
