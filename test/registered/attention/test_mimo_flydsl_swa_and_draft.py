"""MiMo's sliding layers (window 128, sinks) and the draft's block, causal or not.

The window counts the keys that a query sees, its own included: kv > q - window, as transformers' MiMo-V2-Flash masks.
"""

import dataclasses
import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract
from sglang_dflash_rocm.testing.gfx942 import HARDWARE, ORDERS, bytes_read
from sglang_dflash_rocm.testing.paged_cases import PagedCase

register_cpu_ci(est_time=90, suite="base-a-test-cpu")
register_amd_ci(est_time=90, suite="stage-b-test-1-gpu-small-amd")

SLIDING = PagedAttentionContract(q_heads=16, kv_heads=2, qk_dim=192, v_dim=128, window=128, sinks=True)
VERIFY = dataclasses.replace(SLIDING, q_rows=8)
DRAFT = PagedAttentionContract(q_heads=16, kv_heads=2, qk_dim=128, v_dim=128, q_rows=8, sinks=True, causal=False)
LENS = [0, 1, 100, 119, 120, 127, 128, 129, 143, 300]


@pytest.mark.parametrize("contract", [SLIDING, VERIFY], ids=["decode", "verify"])
def test_window_and_sinks(contract):
    PagedCase(contract, LENS).check()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 64])
def test_draft_block(causal, window):
    PagedCase(dataclasses.replace(DRAFT, causal=causal, window=window), [0, 5, 63, 200]).check()


@pytest.mark.parametrize("contract", [SLIDING, VERIFY], ids=["decode", "verify"])
@pytest.mark.parametrize("distance, seen", [(126, True), (127, True), (128, False), (129, False)])
def test_the_edge_of_the_window(contract, distance, seen):
    """One key of huge score at a distance from the last query: it takes the softmax, or it does not exist."""
    case = PagedCase(contract, [300])
    case.q[:] = 1.0
    last = len(case.slots[0]) - 1
    case.k[case.slots[0]] *= 0.01
    case.k[case.slots[0][last - distance]] = 50.0
    case.v[case.slots[0][last - distance]] = 7.0
    out, _ = case.run()
    took_over = (out[-1] - 7.0).abs().max() < 0.1
    assert bool(took_over) is seen
    case.check()


def test_a_window_wider_by_one_is_noticed():
    """The fault that the edge test is there for: SGLang's own extend and verify see 129 keys."""
    case = PagedCase(VERIFY, [300])
    case.q[:] = 1.0
    case.k[case.slots[0][300 + 7 - 128]] = 50.0
    out, _ = case.run(dataclasses.replace(VERIFY, window=129))
    expected, bound = case.reference()
    assert not ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("partitions", [1, 2])
def test_sinks_in_bf16(partitions):
    """As MiMo keeps them: read as they are, so that a weight update reaches them."""
    PagedCase(dataclasses.replace(SLIDING, sinks_dtype="bf16"), [0, 50, 200], partitions=partitions).check()


def test_window_in_partitions():
    PagedCase(VERIFY, LENS, partitions=2).check()


@pytest.mark.skipif(HARDWARE, reason="the hardware runs one order of its own")
@pytest.mark.parametrize("contract", [VERIFY, DRAFT], ids=["verify", "draft"])
def test_every_order_of_the_waves_gives_the_same_bits(contract):
    case = PagedCase(contract, [3, 200])
    outs = [case.run(order=order, seed=seed)[0] for order, seed in ORDERS]
    assert all(torch.equal(outs[0].view(torch.int16), other.view(torch.int16)) for other in outs[1:])


@pytest.mark.skipif(HARDWARE, reason="bytes are counted by the simulator")
def test_keys_in_front_of_the_window_are_not_read():
    case = PagedCase(VERIFY, [1000])
    (launch,) = case.check(cost=True)
    least = (128 + 8 - 1) * 2 * (192 + 128) * 2
    assert bytes_read(launch, "k_cache", "v_cache") == least


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
