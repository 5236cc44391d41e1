"""What each matrix instruction of gfx942 multiplies, where its elements lie, and how long it keeps the unit busy.

Sources: "AMD Instinct MI300" ISA guide, chapter "Matrix Arithmetic Instructions" (layouts, CBSZ/ABID/BLGP, passes); the
clocks and the modifiers that an instruction accepts agree with AMD's matrix instruction calculator for CDNA3.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np

LANES = 64

# Clocks for which one SIMD's matrix unit is busy: 4 per pass. The rest of an instruction is in its name.
CLOCKS = {
    "v_mfma_f32_32x32x1_2b_f32": 64,
    "v_mfma_f32_16x16x1_4b_f32": 32,
    "v_mfma_f32_4x4x1_16b_f32": 8,
    "v_mfma_f32_32x32x2_f32": 64,
    "v_mfma_f32_16x16x4_f32": 32,
    "v_mfma_f32_32x32x4_xf32": 32,
    "v_mfma_f32_16x16x8_xf32": 16,
    "v_mfma_f32_32x32x4_2b_f16": 64,
    "v_mfma_f32_16x16x4_4b_f16": 32,
    "v_mfma_f32_4x4x4_16b_f16": 8,
    "v_mfma_f32_32x32x8_f16": 32,
    "v_mfma_f32_16x16x16_f16": 16,
    "v_mfma_f32_32x32x4_2b_bf16": 64,
    "v_mfma_f32_16x16x4_4b_bf16": 32,
    "v_mfma_f32_4x4x4_16b_bf16": 8,
    "v_mfma_f32_32x32x8_bf16": 32,
    "v_mfma_f32_16x16x16_bf16": 16,
    "v_mfma_i32_32x32x4_2b_i8": 64,
    "v_mfma_i32_16x16x4_4b_i8": 32,
    "v_mfma_i32_4x4x4_16b_i8": 8,
    "v_mfma_i32_32x32x16_i8": 32,
    "v_mfma_i32_16x16x32_i8": 16,
    "v_mfma_f64_16x16x4_f64": 32,
    "v_mfma_f64_4x4x4_4b_f64": 16,
    "v_smfmac_f32_16x16x32_f16": 16,
    "v_smfmac_f32_32x32x16_f16": 32,
    "v_smfmac_f32_16x16x32_bf16": 16,
    "v_smfmac_f32_32x32x16_bf16": 32,
    "v_smfmac_i32_16x16x64_i8": 16,
    "v_smfmac_i32_32x32x32_i8": 32,
}
for _a in ("fp8", "bf8"):
    for _b in ("fp8", "bf8"):
        CLOCKS[f"v_mfma_f32_16x16x32_{_a}_{_b}"] = 16
        CLOCKS[f"v_mfma_f32_32x32x16_{_a}_{_b}"] = 32
        CLOCKS[f"v_smfmac_f32_16x16x64_{_a}_{_b}"] = 16
        CLOCKS[f"v_smfmac_f32_32x32x32_{_a}_{_b}"] = 32

_BITS = {"f64": 64, "f32": 32, "xf32": 32, "i32": 32, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8}
_NAME = re.compile(r"v_(s?mfma)c?_(f32|f64|i32)_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_([a-z]+\d+)(?:_([a-z]+\d+))?$")
# Single-block instructions that still take BLGP; those that came with CDNA3 and the f16/bf16 ones do not.
_PERMUTED_SINGLE_BLOCK = ("v_mfma_f32_32x32x2_f32", "v_mfma_f32_16x16x4_f32")

# BLGP -> the lane that each lane of B is taken from.
_LANE = np.arange(LANES)
BLGP_LANES = (
    _LANE,
    _LANE % 32,
    _LANE % 32 + 32,
    (_LANE + 16) % 64,
    _LANE % 16,
    _LANE % 16 + 16,
    _LANE % 16 + 32,
    _LANE % 16 + 48,
)


@dataclass(frozen=True)
class MatrixInstruction:
    """One v_mfma or v_smfmac: D = A x B + C in every block; A is `rows` x `inner`, B is `inner` x `columns`.

    a_type, b_type, out_type: "f16", "fp8", "i32", ... sparse: A holds 2 of every 4 elements along `inner`.

    Layout of A (and of B, with columns for rows): lane = row + rows * (block + blocks * (k // held)), element k % held
    of the lane's registers, lowest bits first, where `held` consecutive k lie in one lane.

    Layout of C and D: bands of `band` rows (4; 1 for f64) by all columns fill the lanes. With
    row = h + band * (m + lane_bands * g),
    lane = column + columns * (block % lane_blocks + lane_blocks * m) and
    element = h + band * (g + groups * (block // lane_blocks)).
    """

    mnemonic: str
    out_type: str
    rows: int
    columns: int
    inner: int
    blocks: int
    a_type: str
    b_type: str
    sparse: bool
    clocks: int

    @property
    def b_held(self) -> int:
        """Elements of B in one lane."""
        return self.inner * self.columns * self.blocks // LANES

    @property
    def a_held(self) -> int:
        """Elements of A in one lane; a sparse A stores half of them."""
        return self.inner * self.rows * self.blocks // LANES // (2 if self.sparse else 1)

    @property
    def a_registers(self) -> int:
        return self.a_held * _BITS[self.a_type] // 32

    @property
    def b_registers(self) -> int:
        return self.b_held * _BITS[self.b_type] // 32

    @property
    def out_registers(self) -> int:
        return self.rows * self.columns * self.blocks // LANES * _BITS[self.out_type] // 32

    @property
    def inner_lanes(self) -> int:
        """Groups of lanes along `inner`: what is left of the 64 when rows and blocks are laid out."""
        return LANES // (self.rows * self.blocks)

    @property
    def band(self) -> int:
        return 1 if self.out_type == "f64" else 4

    @property
    def lane_blocks(self) -> int:
        """Blocks that share one output register."""
        return -(-LANES // (self.rows * self.columns // self.band))

    @property
    def lane_bands(self) -> int:
        """Bands of one block that share one output register."""
        return LANES // self.lane_blocks // self.columns

    @property
    def groups(self) -> int:
        """Groups of registers that one block's rows take."""
        return self.rows // (self.band * self.lane_bands)

    @property
    def broadcasts(self) -> bool:
        """CBSZ and ABID choose blocks of A."""
        return self.blocks > 1 and self.out_type != "f64"

    @property
    def permutes(self) -> bool:
        """BLGP chooses lanes of B."""
        return self.broadcasts or self.mnemonic in _PERMUTED_SINGLE_BLOCK

    @property
    def multiplications(self) -> int:
        """Multiply-adds of one wave-instruction (for a sparse one, those that the hardware does)."""
        return self.rows * self.columns * self.inner * self.blocks // (2 if self.sparse else 1)


@functools.cache
def matrix_instruction(mnemonic: str) -> MatrixInstruction | None:
    """The matrix instruction of that name, or None if gfx942 has none (gfx950 has more)."""
    if mnemonic not in CLOCKS:
        return None
    kind, out_type, rows, columns, inner, blocks, a_type, b_type = _NAME.fullmatch(mnemonic).groups()
    return MatrixInstruction(
        mnemonic,
        out_type,
        int(rows),
        int(columns),
        int(inner),
        int(blocks or 1),
        a_type,
        b_type or a_type,
        kind == "smfma",
        CLOCKS[mnemonic],
    )
