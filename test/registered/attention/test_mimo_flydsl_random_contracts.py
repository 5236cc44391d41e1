"""Contracts and contexts drawn by hypothesis: whatever `supported` allows gives the reference's result.

The default run draws the same few each time; the slow one draws new ones.
"""

import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.kernels.paged_attention.contract import (
    KV_DTYPES,
    LAYOUTS,
    MAX_Q_ROWS,
    PAGE_SIZES,
    SINKS_DTYPES,
    PagedAttentionContract,
    supported,
)
from sglang_dflash_rocm.testing.paged_cases import PagedCase

register_cpu_ci(est_time=90, suite="base-a-test-cpu")
register_amd_ci(est_time=60, suite="stage-b-test-1-gpu-small-amd")


@st.composite
def contracts(draw):
    """Any contract that `supported` lets pass, and some group sizes that no MiMo has."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 4, 5, 8, 16]))
    contract = PagedAttentionContract(
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        qk_dim=draw(st.sampled_from([128, 192])),
        v_dim=128,
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        q_rows=draw(st.integers(1, MAX_Q_ROWS)),
        window=draw(st.none() | st.integers(1, 200)),
        sinks=draw(st.booleans()),
        causal=draw(st.booleans()),
        kv_dtype=draw(st.sampled_from(KV_DTYPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        sinks_dtype=draw(st.sampled_from(SINKS_DTYPES)),
    )
    assert supported(contract) is None
    return contract


lengths = st.lists(st.integers(0, 180), min_size=1, max_size=3)
draws = given(contracts(), lengths, st.integers(1, 4), st.sampled_from([1.0, 8.0, 30.0]), st.integers(0, 2**20))


def check(contract, lens, partitions, k_size, seed):
    PagedCase(contract, lens, seed=seed, k_size=k_size, partitions=partitions).check()


options = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck))
test_a_few_contracts = settings(max_examples=5, derandomize=True, **options)(draws(check))
test_many_contracts = pytest.mark.slow(pytest.mark.timeout(1800)(settings(max_examples=100, **options)(draws(check))))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
