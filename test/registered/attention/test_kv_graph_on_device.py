"""Page tables, slot translation and KV writes in a real graph of a GPU: any CUDA or HIP device, nothing without one."""

import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci

from sglang_dflash_rocm.kernels.kv_cache.layout import LAYOUTS
from sglang_dflash_rocm.testing.device_graph import check

register_amd_ci(est_time=30, suite="stage-b-test-1-gpu-small-amd")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph needs a GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_over_changing_batches(layout):
    check(torch.device("cuda"), layout)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
