"""Runs one vector instruction on edge values: helpers of the instruction tests."""

from __future__ import annotations

import functools
import re

import numpy as np
from tinygrad.renderer.amd.dsl import Reg, v
from tinygrad.runtime.autogen.amd.cdna import enum, ins

import machine

LANES = 64
VCC_IN = 0xF0F0_A5A5_3C3C_9669
SPECIAL_32 = [
    *(0, 1, 2, 3, 7, 15, 16, 23, 24, 31, 32, 33, 63, 64, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x00FFFFFF),
    *(0x01000000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x7F80FF80, 0x01020304, 0x0C0D0B0A),
]
SPECIAL_F32 = [
    *(0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 3.0, 255.0, 255.5, 256.0, 65504.0, 65520.0, -3e4),
    *(2.0**31, -(2.0**31), 2.0**32, 4294967040.0, 1e-40, -1e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38),
    *(np.inf, -np.inf, np.nan, 1 + 2.0**-12, 1 + 2.0**-23, 2.0**-24, 2.0**-75, 16777217.0, 0.1, -0.75, 1e-7, 6e-8),
]
_CLASSES = ["VOP1", "VOP2", "VOPC", "VOP3SD", "VOP3P", "VOP3"]


@functools.cache
def find(mnemonic: str):
    """(class of instructions, opcode) of the shortest encoding."""
    for name in _CLASSES:
        for op in getattr(enum, f"{name}Op"):
            if re.sub(r"_E(32|64)$", "", op.name).lower() == mnemonic:
                return getattr(ins, name), op
    raise KeyError(mnemonic)


def registers(first: int, bits: int) -> Reg:
    return v[first] if bits <= 32 else v[first : first + bits // 32 - 1]


def build(mnemonic: str, literal: int | None = None):
    """The instruction with sources v2, v4, v6 and destination v8 (each up to a pair); returns (it, source bits,
    destination bits)."""
    cls, op = find(mnemonic)
    if literal is not None:
        cls = getattr(ins, f"{cls.__name__}_LIT")
    fields = dict(cls._fields)
    sizes = {name: spec[1] for name, spec in _operands(op).items()}
    arguments, source_bits = {}, []
    for name in ("src0", "src1", "vsrc1", "src2"):
        if name not in fields or name not in sizes:
            continue
        arguments[name] = registers(2 + 2 * len(source_bits), sizes[name])
        source_bits.append(sizes[name])
    if "vdst" in fields:
        arguments["vdst"] = registers(8, sizes.get("vdst", 32))
    if literal is not None:
        arguments["literal"] = literal
    if cls is ins.VOP3P:
        arguments |= {"opsel_hi": 3, "opsel_hi2": 1}
    if "sdst" in fields:
        arguments["sdst"] = Reg(106, 2)
    if mnemonic in ("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32", "v_cndmask_b32"):
        source_bits = source_bits[:2]
        if "src2" in arguments:
            arguments["src2"] = Reg(106, 2)
    return cls(op, **arguments), source_bits, sizes.get("vdst", 32)


def _operands(op):
    from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS

    return OPERANDS[op]


def edge_values(count: int, bits: int, is_float: bool, rng: np.random.Generator) -> np.ndarray:
    """uint64 [count]: edge values and random ones of that width."""
    if is_float:
        dtype, raw = {16: (np.float16, np.uint16), 32: (np.float32, np.uint32), 64: (np.float64, np.uint64)}[bits]
        with np.errstate(over="ignore"):
            special = np.array(SPECIAL_F32).astype(dtype).view(raw)
            near = rng.normal(0, 4, 64).astype(dtype).view(raw)
        quiet = {16: 0x7E01, 32: 0x7FC00001, 64: 0x7FF8000000000001}[bits]
        signalling = {16: 0x7C01, 32: 0x7F800001, 64: 0x7FF0000000000001}[bits]
        special = np.concatenate([special, np.array([quiet, signalling], raw)])
    else:
        special = np.array(SPECIAL_32, np.uint64)
        if bits == 64:
            special = np.concatenate([special, special << np.uint64(32), ~special])
        near = rng.integers(0, 1 << min(bits, 63), 64, dtype=np.uint64)
    wild = rng.integers(0, 1 << 63, 32, dtype=np.uint64) * np.uint64(2) & np.uint64((1 << bits) - 1)
    pool = np.concatenate([special.astype(np.uint64), special.astype(np.uint64), near.astype(np.uint64), wild])
    return pool[rng.integers(0, len(pool), count)]


def run_instruction(instruction, sources: list[np.ndarray], old: np.ndarray, waves: int, **options):
    """Run with uint64 `sources` [waves, 64] in v2, v4, v6 and `old` in v8, v9. Returns the batch."""
    vgpr = {}
    for i, value in enumerate([*sources, None, None, None][:3]):
        if value is not None:
            vgpr[2 + 2 * i] = value & np.uint64(0xFFFFFFFF)
            vgpr[3 + 2 * i] = value >> np.uint64(32)
    vgpr[8], vgpr[9] = old & np.uint64(0xFFFFFFFF), old >> np.uint64(32)
    return machine.run([instruction], vgpr=vgpr, waves=waves, vcc=VCC_IN, **options)
