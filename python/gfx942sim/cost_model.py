"""What an instruction costs on an MI300X, as far as the cost report models it: busy clocks of the units, no latency.

Every time that follows from these numbers is a bound from one resource, not a timing: nothing here was measured on
hardware, and waiting (memory latency, dependencies, instruction issue, barriers) is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .code_object import LDS_BYTES_PER_CU, MAX_WAVES_PER_SIMD, VGPRS_PER_LANE, Resources
from .decode import Instruction
from .mfma_shapes import matrix_instruction

LANES = 64


@dataclass(frozen=True)
class MI300X:
    """The machine: AMD Instinct MI300X data sheet (compute units, engine clock, HBM) and MI300 ISA guide (LDS, SIMDs).

    clock in Hz, hbm_bandwidth in bytes per second (peak), cache_line in bytes (L2), lds_bytes_per_clock per CU.
    """

    compute_units: int = 304
    simds_per_cu: int = 4
    clock: float = 2.1e9
    hbm_bandwidth: float = 5.3e12
    cache_line: int = 128
    lds_banks: int = 32
    lds_bytes_per_clock: int = 128


# Clocks a SIMD of 16 lanes is busy with one wave of 64: 4; a quarter-rate instruction 16.
VALU_CLOCKS = 4
QUARTER_RATE_CLOCKS = 16
# Mnemonics start with one of these. f64 arithmetic counts 4: the data sheet's 81.7 TFLOP/s of vector f64 are one fused
# multiply-add per lane and clock; only the f64 reciprocals and roots are quarter rate.
_QUARTER_RATE = (
    *("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_"),
    *("v_mul_lo_u32", "v_mul_lo_i32", "v_mul_hi_u32", "v_mul_hi_i32", "v_mad_u64_u32", "v_mad_i64_i32"),
)
# ds_permute, ds_bpermute and ds_swizzle go through the LDS crossbar: 64 lanes of 4 bytes.
LDS_CROSSBAR_CLOCKS = 2

_WAIT = ("s_waitcnt", "s_nop", "s_sleep")
_CONTROL = ("s_branch", "s_cbranch", "s_endpgm", "s_setpc", "s_swappc", "s_call", "s_getpc", "s_trap", "s_set")

CLASSES = ("mfma", "valu", "salu", "smem", "lds", "vmem", "scratch", "barrier", "wait", "control")


def instruction_class(instruction: Instruction) -> str:
    """One of CLASSES. "wait" is s_waitcnt, s_nop and s_sleep; "control" is branches, priorities and the end."""
    name, family = instruction.mnemonic, instruction.encoding.split("_")[0]
    if name.startswith(("v_mfma", "v_smfmac")):
        return "mfma"
    if name == "s_barrier":
        return "barrier"
    if name.startswith(_WAIT):
        return "wait"
    if family == "SOPP" or name.startswith(_CONTROL):
        return "control"
    known = {"SMEM": "smem", "DS": "lds", "SCRATCH": "scratch", "MUBUF": "vmem", "GLOBAL": "vmem", "FLAT": "vmem"}
    if family in known:
        return known[family]
    return "salu" if name.startswith("s_") else "valu"


def is_quarter_rate(mnemonic: str) -> bool:
    return mnemonic.startswith(_QUARTER_RATE)


def valu_clocks(mnemonic: str) -> int:
    """Clocks that one wave-instruction keeps its SIMD's vector unit busy."""
    return QUARTER_RATE_CLOCKS if is_quarter_rate(mnemonic) else VALU_CLOCKS


def mfma_clocks(mnemonic: str) -> int:
    """Clocks that one wave-instruction keeps its SIMD's matrix unit busy."""
    return matrix_instruction(mnemonic).clocks


def lds_crossbar(mnemonic: str) -> bool:
    return mnemonic.startswith(("ds_permute", "ds_bpermute", "ds_swizzle"))


def lds_clocks(address: np.ndarray, active: np.ndarray, size: int, atomic: bool = False) -> int:
    """Clocks for which LDS is busy with one access of each wave, bank conflicts included.

    The model: lanes go in groups that fill 128 bytes (32 lanes of up to 4 bytes, 16 of 8, 8 of 12 or 16), in the order
    of their numbers; a group takes as many clocks as its busiest bank has different dwords, at least one. Lanes that
    read or write the same dword share it, except in atomics. The hardware groups the lanes of wide accesses in another
    order, which this does not follow.

    Args:
        address: int64 [waves, 64], bytes. active: bool, same shape. size: bytes per lane.
    """
    machine = MI300X()
    dwords = max(1, size // 4)
    in_group = machine.lds_bytes_per_clock // 4 // {1: 1, 2: 2}.get(dwords, 4)
    groups = address.size // in_group
    dword = (address >> 2).reshape(groups, in_group, 1) + np.arange(dwords)
    taken = np.broadcast_to(active.reshape(groups, in_group, 1), dword.shape).reshape(groups, -1)
    dword = dword.reshape(groups, -1)
    if not atomic:
        dword = np.sort(np.where(taken, dword, -1), axis=1)
        taken = dword >= 0
        taken[:, 1:] &= dword[:, 1:] != dword[:, :-1]
    slot = np.arange(groups)[:, None] * machine.lds_banks + dword % machine.lds_banks
    in_bank = np.bincount(slot[taken], minlength=groups * machine.lds_banks).reshape(groups, -1)
    return int(np.maximum(in_bank.max(axis=1), 1).sum())


def workgroups_per_cu(resources: Resources, threads: int, dynamic_lds: int = 0) -> int:
    """Work-groups that fit on one CU at a time, by registers, wave slots and LDS; at least 1."""
    waves = -(-threads // LANES)
    per_simd = min(MAX_WAVES_PER_SIMD, VGPRS_PER_LANE // max(8, -(-resources.vgpr // 8) * 8))
    groups = per_simd * MI300X().simds_per_cu // waves
    lds = resources.lds + dynamic_lds
    if lds:
        groups = min(groups, LDS_BYTES_PER_CU // lds)
    return max(1, groups)
