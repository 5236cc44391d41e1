"""Extend through SGLang's Triton kernels as the flydsl backend calls them: MiMo's window, and every pool's prefix.

On an MI300X the kernels run there; elsewhere gfx942sim runs their machine code.
"""

import contextlib
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.kernels.kv_cache.layout import FP8
from sglang_dflash_rocm.testing.gfx942 import HARDWARE
from sglang_dflash_rocm.testing.live.sglang_peers import as_on_mi300x

# Helpers may not lie here: SGLang's runner takes every file of test/registered for a test.
sys.path.insert(0, str(Path(__file__).parents[2] / "attention_stage"))
from backend_stage import FULL, SLIDING, Stage
from stage_extend import StageExtend

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
register_amd_ci(est_time=60, suite="stage-b-test-1-gpu-small-amd")

POOLS = [
    pytest.param(dict(), id="nhd-bf16"),
    pytest.param(dict(layout="vectorized_5d"), id="5d-bf16"),
    pytest.param(dict(dtype=FP8, scales=(0.5, 2.0)), id="nhd-fp8"),
    pytest.param(dict(layout="vectorized_5d", dtype=FP8, page_size=16), id="5d-fp8-page16"),
]


def extend(stage, layer, requests, lens, rows, q=None):
    """(out, q, k, v) of one EXTEND forward of a layer by SGLang's kernels; its keys are stored as the backend does."""
    stage.backend.extend = StageExtend(stage.runner())
    batch = stage.batch("EXTEND", requests, lens, rows)
    inputs = stage.inputs(layer, batch)
    if q is not None:
        inputs = (q, *inputs[1:])
    stage.backend.init_forward_metadata(batch)
    with contextlib.nullcontext() if HARDWARE else as_on_mi300x():
        return stage.forward(layer, batch, *inputs), *inputs


@pytest.mark.parametrize("layer_id", [FULL, SLIDING])
@pytest.mark.parametrize("options", POOLS)
def test_prefix_and_chunk(options, layer_id):
    """C18, C35: ragged chunks, one behind a cached prefix longer than the window, one fresh."""
    stage = Stage(**options)
    stage.prefill(3, 150)
    layer = stage.layers[layer_id]
    requests, rows = [3, 1], [20, 9]
    out, q, k, v = extend(stage, layer, requests, [150, 0], rows)
    # The kernels take the chunk's own keys and values as they are, not as an fp8 pool holds them.
    stage.remember(layer, requests, rows, k, v, exact=True)
    stage.compare(out, *stage.expected(layer, q, requests, rows), "extend")


def takes_over(distance):
    """Whether a key of huge score at this distance from the query is all that the query sees, or does not exist."""
    stage = Stage()
    stage.sinks = [None, None]
    stage.prefill(2, 300)
    key = stage.to_swa[stage.slots[2, 300 - distance]]
    keys, values = stage.buffers(SLIDING)
    keys[stage.to_swa[stage.slots[2, :300]]] *= 0.01
    keys[key], values[key] = 50.0, 7.0
    ones = torch.ones(1, 16, 192).bfloat16().to(keys.device)
    out, *_ = extend(stage, stage.layers[SLIDING], [2], [300], [1], q=ones)
    return bool((out - 7.0).abs().max() < 0.1)


@pytest.mark.parametrize("distance, seen", [(127, True), (128, False), (129, False)])
def test_the_edge_of_the_window(distance, seen):
    """transformers' MiMo-V2-Flash masks with kv > q - window."""
    from transformers.masking_utils import sliding_window_overlay

    assert sliding_window_overlay(128)(0, 0, 300, 300 - distance) is seen
    assert takes_over(distance) is seen


def test_fault_the_layers_own_number_is_handed_on():
    """SGLang's extend sees 129 keys by it: the reason for `with_window_left`."""
    with mock.patch.object(StageExtend, "with_window_left", lambda self, layer: layer):
        assert takes_over(128)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
