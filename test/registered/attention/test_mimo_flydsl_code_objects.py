"""Gates on the machine code of every shape in the table: no spills, no scratch, LDS, waves per SIMD."""

import dataclasses
import sys

import pytest
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract
from sglang_dflash_rocm.testing.gfx942 import HARDWARE
from sglang_dflash_rocm.testing.paged_cases import PagedCase

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
register_amd_ci(est_time=20, suite="stage-b-test-1-gpu-small-amd")

FULL = PagedAttentionContract(q_heads=16, kv_heads=1, qk_dim=192, v_dim=128)
SLIDING = PagedAttentionContract(q_heads=16, kv_heads=2, qk_dim=192, v_dim=128, window=128, sinks=True)
DRAFT = PagedAttentionContract(16, 2, 128, 128, q_rows=8, window=1024, sinks=True, causal=False)
SHAPES = {
    "decode full": (FULL, 2),
    "decode sliding": (SLIDING, 2),
    "decode full fp8": (dataclasses.replace(FULL, kv_dtype="fp8_fnuz"), 2),
    "decode full 5d": (dataclasses.replace(FULL, layout="vectorized_5d"), 2),
    "verify full": (dataclasses.replace(FULL, q_rows=8), 1),
    "verify full, split": (dataclasses.replace(FULL, q_rows=8, split=True), 1),
    "verify full fp8": (dataclasses.replace(FULL, q_rows=8, kv_dtype="fp8_fnuz"), 1),
    "verify full 5d": (dataclasses.replace(FULL, q_rows=8, layout="vectorized_5d"), 1),
    "verify sliding": (dataclasses.replace(SLIDING, q_rows=8), 1),
    "draft block": (DRAFT, 1),
}


@pytest.mark.skipif(HARDWARE, reason="code objects are looked at by the simulator")
@pytest.mark.parametrize("name", SHAPES)
def test_registers_and_lds(name):
    contract, waves = SHAPES[name]
    for launch in PagedCase(contract, [20], partitions=6 if contract.split else 1).check():
        resources = launch.resources
        assert resources.vgpr_spills == resources.sgpr_spills == resources.scratch == 0, resources
        assert resources.lds <= 64 * 1024
        assert resources.waves_per_simd(256) >= waves, resources


def vmcnt(instruction) -> int:
    """Vector memory operations that an s_waitcnt leaves in flight."""
    immediate = instruction.field("simm16")
    return immediate & 15 | (immediate >> 14 & 3) << 4


@pytest.mark.skipif(HARDWARE, reason="code objects are looked at by the simulator")
@pytest.mark.parametrize("contract", [FULL, SLIDING], ids=["full", "sliding"])
def test_the_next_tile_is_in_flight_while_one_is_computed(contract):
    """In the loop of a decode every wait leaves at least the ten loads of a tile (six of K, four of V) in flight."""
    from gfx942sim.decode import disassemble

    (launch,) = PagedCase(contract, [20]).check()
    code = launch.code
    start, size = code.symbols[launch.kernel]
    found = disassemble(code.image, start, size)
    loops = [i for i in found if i.mnemonic.startswith(("s_cbranch", "s_branch")) and i.branch_target < i.address]
    first = min(i.branch_target for i in loops)
    loop = [i for i in found if first <= i.address <= max(i.address for i in loops)]
    assert sum(i.mnemonic.startswith("v_mfma") for i in loop) == 2 * (12 + 8)
    assert sum(i.mnemonic.startswith("buffer_load") for i in loop) == 2 * 10
    waits = [vmcnt(i) for i in loop if i.mnemonic == "s_waitcnt" and vmcnt(i) < 63]
    assert waits and min(waits) >= 10, waits


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
