"""SGLang's Triton attention kernels run on the simulator and give the reference's numbers: a fair peer."""

from __future__ import annotations

import pytest

from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract
from sglang_dflash_rocm.testing.gfx942 import HARDWARE
from sglang_dflash_rocm.testing.live import sglang_peers
from sglang_dflash_rocm.testing.paged_cases import PagedCase

pytestmark = pytest.mark.skipif(HARDWARE, reason="the simulator's test")
FULL = PagedAttentionContract(q_heads=16, kv_heads=1, qk_dim=192, v_dim=128)
SLIDING = PagedAttentionContract(q_heads=16, kv_heads=2, qk_dim=192, v_dim=128, window=128, sinks=True)


def close(case, out):
    expected, bound = case.reference()
    return bool(((out.double() - expected).abs() <= 4 * bound).all())


@pytest.mark.parametrize("contract", [FULL, SLIDING], ids=["full", "sliding"])
def test_decode(contract):
    case = PagedCase(contract, [99, 299])
    out, launches = sglang_peers.decode(case, splits=2)
    assert close(case, out)
    assert [launch.kernel for launch in launches] == ["_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2"]


def test_verify():
    case = PagedCase(PagedAttentionContract(16, 1, 192, 128, q_rows=8), [300])
    out, launches = sglang_peers.verify(case)
    assert close(case, out)
    assert [launch.kernel for launch in launches] == ["_fwd_kernel"]
