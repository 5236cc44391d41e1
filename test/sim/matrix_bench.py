"""Layouts of the matrix instructions written down by hand, and the bench that the tests of them stand on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from tinygrad.renderer.amd.dsl import v
from tinygrad.runtime.autogen.amd.cdna import ins
from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS

from gfx942sim import mfma
from gfx942sim.decode import decode

# mnemonic: (rows = columns, inner, blocks, type of A, type of B)
DENSE = {
    "v_mfma_f32_32x32x1_2b_f32": (32, 1, 2, "f32", "f32"),
    "v_mfma_f32_16x16x1_4b_f32": (16, 1, 4, "f32", "f32"),
    "v_mfma_f32_4x4x1_16b_f32": (4, 1, 16, "f32", "f32"),
    "v_mfma_f32_32x32x2_f32": (32, 2, 1, "f32", "f32"),
    "v_mfma_f32_16x16x4_f32": (16, 4, 1, "f32", "f32"),
    "v_mfma_f32_32x32x4_xf32": (32, 4, 1, "f32", "f32"),
    "v_mfma_f32_16x16x8_xf32": (16, 8, 1, "f32", "f32"),
    "v_mfma_f32_32x32x4_2b_f16": (32, 4, 2, "f16", "f16"),
    "v_mfma_f32_16x16x4_4b_f16": (16, 4, 4, "f16", "f16"),
    "v_mfma_f32_4x4x4_16b_f16": (4, 4, 16, "f16", "f16"),
    "v_mfma_f32_32x32x8_f16": (32, 8, 1, "f16", "f16"),
    "v_mfma_f32_16x16x16_f16": (16, 16, 1, "f16", "f16"),
    "v_mfma_f32_32x32x4_2b_bf16": (32, 4, 2, "bf16", "bf16"),
    "v_mfma_f32_16x16x4_4b_bf16": (16, 4, 4, "bf16", "bf16"),
    "v_mfma_f32_4x4x4_16b_bf16": (4, 4, 16, "bf16", "bf16"),
    "v_mfma_f32_32x32x8_bf16": (32, 8, 1, "bf16", "bf16"),
    "v_mfma_f32_16x16x16_bf16": (16, 16, 1, "bf16", "bf16"),
    "v_mfma_i32_32x32x4_2b_i8": (32, 4, 2, "i8", "i8"),
    "v_mfma_i32_16x16x4_4b_i8": (16, 4, 4, "i8", "i8"),
    "v_mfma_i32_4x4x4_16b_i8": (4, 4, 16, "i8", "i8"),
    "v_mfma_i32_32x32x16_i8": (32, 16, 1, "i8", "i8"),
    "v_mfma_i32_16x16x32_i8": (16, 32, 1, "i8", "i8"),
    "v_mfma_f64_16x16x4_f64": (16, 4, 1, "f64", "f64"),
    "v_mfma_f64_4x4x4_4b_f64": (4, 4, 4, "f64", "f64"),
    **{f"v_mfma_f32_16x16x32_{a}_{b}": (16, 32, 1, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
    **{f"v_mfma_f32_32x32x16_{a}_{b}": (32, 16, 1, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
}
SPARSE = {
    "v_smfmac_f32_16x16x32_f16": (16, 32, "f16", "f16"),
    "v_smfmac_f32_32x32x16_f16": (32, 16, "f16", "f16"),
    "v_smfmac_f32_16x16x32_bf16": (16, 32, "bf16", "bf16"),
    "v_smfmac_f32_32x32x16_bf16": (32, 16, "bf16", "bf16"),
    "v_smfmac_i32_16x16x64_i8": (16, 64, "i8", "i8"),
    "v_smfmac_i32_32x32x32_i8": (32, 32, "i8", "i8"),
    **{f"v_smfmac_f32_16x16x64_{a}_{b}": (16, 64, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
    **{f"v_smfmac_f32_32x32x32_{a}_{b}": (32, 32, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
}

# What lane `l` holds as its element `e` of A, when it holds `h` of them: (block, row, k). B the same with its column.
INPUT_LAYOUT = {
    ("x", 32, 1): lambda lane, e, h: (0, lane % 32, h * (lane // 32) + e),
    ("x", 16, 1): lambda lane, e, h: (0, lane % 16, h * (lane // 16) + e),
    ("x", 32, 2): lambda lane, e, h: (lane // 32, lane % 32, e),
    ("x", 16, 4): lambda lane, e, h: (lane // 16, lane % 16, e),
    ("x", 4, 16): lambda lane, e, h: (lane // 4, lane % 4, e),
    ("f64", 16, 1): lambda lane, e, h: (0, lane % 16, lane // 16),
    ("f64", 4, 4): lambda lane, e, h: (lane // 4 % 4, lane % 4, lane // 16),
}
# What lane `l` gets in its output number `r`: (block, row, column).
OUTPUT_LAYOUT = {
    ("x", 32, 1): lambda lane, r: (0, 8 * (r // 4) + 4 * (lane // 32) + r % 4, lane % 32),
    ("x", 16, 1): lambda lane, r: (0, 4 * (lane // 16) + r, lane % 16),
    ("x", 32, 2): lambda lane, r: (r // 16, 8 * (r % 16 // 4) + 4 * (lane // 32) + r % 4, lane % 32),
    ("x", 16, 4): lambda lane, r: (r // 4, 4 * (lane // 16) + r % 4, lane % 16),
    ("x", 4, 16): lambda lane, r: (lane // 4, r, lane % 4),
    ("f64", 16, 1): lambda lane, r: (0, 4 * r + lane // 16, lane % 16),
    ("f64", 4, 4): lambda lane, r: (lane // 4 % 4, lane // 16, lane % 4),
}


class Constant(NamedTuple):
    """An inline constant as an operand."""

    value: float


WIDTH = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i8": 1, "fp8": 1, "bf8": 1}
TORCH = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "fp8": torch.float8_e4m3fnuz,
    "bf8": torch.float8_e5m2fnuz,
}
A, B, C, D, INDEX = 0, 16, 32, 64, 100  # first registers


def to_registers(values: np.ndarray, kind: str) -> np.ndarray:
    """float64 [waves, 64, elements] -> uint32 [registers, waves, 64] in the format `kind`, rounded by torch."""
    raw = torch.from_numpy(np.ascontiguousarray(values)).to(TORCH[kind]).contiguous().view(torch.uint8).numpy()
    words = np.ascontiguousarray(raw).reshape(*values.shape[:2], -1).view(np.uint32)
    return words.transpose(2, 0, 1)


def from_registers(registers: np.ndarray, kind: str) -> np.ndarray:
    """uint32 [registers, waves, 64] -> [waves, 64, outputs]."""
    words = np.ascontiguousarray(registers.transpose(1, 2, 0))
    return words.view({"f32": np.float32, "i32": np.int32, "f64": np.float64}[kind])


def registers(first: int, count: int):
    return v[first : first + count - 1] if count > 1 else v[first]


def instruction(name: str, *, a=A, b=B, c=C, d=D, **fields):
    if name.endswith("_xf32"):  # decoded as plain VOP3P; these two fields are not 0 by default
        fields = {"opsel_hi": 0, "opsel_hi2": 0, **fields}
    make = getattr(ins, name)
    bits = {field: row[1] for field, row in OPERANDS.get(make.args[0], {}).items()}
    sources = {"src0": a, "src1": b, "src2": c, "vdst": d}
    operands = {
        field: registers(first, bits.get(field, 32) // 32) if type(first) is int else getattr(first, "value", first)
        for field, first in sources.items()
    }
    return decode(make(**operands, **fields).to_bytes() + bytes(24), 0)


def execute(name: str, vgpr: np.ndarray, selection=slice(None), **fields) -> np.ndarray:
    """Run one instruction on a copy of `vgpr` [registers, waves, 64]; returns the copy."""
    batch = SimpleNamespace(vgpr=vgpr.copy())
    with np.errstate(all="ignore"):
        mfma.translate(instruction(name, **fields), None)(batch, selection)
    return batch.vgpr


def layout_key(kind: str, rows: int, blocks: int):
    return "f64" if kind == "f64" else "x", rows, blocks


def held_by(rows: int, inner: int, blocks: int) -> int:
    return rows * inner * blocks // 64


def scatter(matrices: np.ndarray, kind: str, held: int) -> np.ndarray:
    """A as [waves, blocks, rows, inner], or B transposed, to the lanes' elements [waves, 64, held]."""
    waves, blocks, rows, _ = matrices.shape
    place = INPUT_LAYOUT[layout_key(kind, rows, blocks)]
    found = np.zeros((waves, 64, held))
    for lane in range(64):
        for e in range(held):
            block, row, k = place(lane, e, held)
            found[:, lane, e] = matrices[:, block, row, k]
    return found


def gather(outputs: np.ndarray, kind: str, rows: int, blocks: int) -> np.ndarray:
    """[waves, 64, outputs] -> [waves, blocks, rows, columns]; every place must be hit exactly once."""
    place = OUTPUT_LAYOUT[layout_key(kind, rows, blocks)]
    found = np.zeros((outputs.shape[0], blocks, rows, rows), outputs.dtype)
    seen = set()
    for lane in range(64):
        for r in range(outputs.shape[2]):
            where = place(lane, r)
            seen.add(where)
            found[:, where[0], where[1], where[2]] = outputs[:, lane, r]
    assert len(seen) == blocks * rows * rows == 64 * outputs.shape[2]
    return found


def random_matrices(rng, shape, kind: str) -> np.ndarray:
    """Small integers: exact in every format, and so is every sum of their products."""
    limit = {"bf8": 4, "fp8": 8}.get(kind, 16)
    return rng.integers(-limit, limit + 1, shape).astype(np.float64)


def out_type(name: str) -> str:
    return name.split("_")[2]


def accumulators(c: np.ndarray, kind: str, rows: int, blocks: int) -> np.ndarray:
    """C [waves, blocks, rows, columns] to registers."""
    per_lane = rows * rows * blocks // 64
    place = OUTPUT_LAYOUT[layout_key(kind, rows, blocks)]
    lanes = np.zeros((c.shape[0], 64, per_lane), {"f32": np.float32, "i32": np.int32, "f64": np.float64}[kind])
    for lane in range(64):
        for r in range(per_lane):
            block, row, column = place(lane, r)
            lanes[:, lane, r] = c[:, block, row, column]
    return lanes.view(np.uint32).transpose(2, 0, 1)


def setup(name: str, waves: int, seed: int = 0):
    """(vgpr with A, B and C in place, A, B, C as matrices; B transposed: [waves, blocks, columns, inner])."""
    rows, inner, blocks, a_type, b_type = DENSE[name]
    rng = np.random.default_rng(seed)
    a = random_matrices(rng, (waves, blocks, rows, inner), a_type)
    b = random_matrices(rng, (waves, blocks, rows, inner), b_type)
    c = rng.integers(-1000, 1000, (waves, blocks, rows, rows)).astype(np.float64)
    held = held_by(rows, inner, blocks)
    vgpr = np.full((128, waves, 64), 0x7FC17FC1, np.uint32)
    for first, registers in (
        (A, to_registers(scatter(a, a_type, held), a_type)),
        (B, to_registers(scatter(b, b_type, held), b_type)),
        (C, accumulators(c, out_type(name), rows, blocks)),
    ):
        vgpr[first : first + len(registers)] = registers
    return vgpr, a, b, c


def outputs(name: str, vgpr: np.ndarray, first: int = D) -> np.ndarray:
    rows, _, blocks, _, _ = DENSE[name]
    kind = out_type(name)
    count = rows * rows * blocks // 64 * (2 if kind == "f64" else 1)
    return gather(from_registers(vgpr[first : first + count], kind), kind, rows, blocks)
