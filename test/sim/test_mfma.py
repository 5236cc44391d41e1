"""Matrix instructions against layouts written down by hand here, and against plain matrix products."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import machine
import numpy as np
import pytest
import torch
from tinygrad.renderer.amd.dsl import s, v
from tinygrad.runtime.autogen.amd.cdna import ins
from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS

from gfx942sim import mfma
from gfx942sim.decode import decode
from gfx942sim.errors import UnknownInstruction

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


@pytest.mark.parametrize("name", DENSE)
def test_one_element_of_a_meets_one_of_b_where_the_guide_says(name):
    """Wave w has a single 1 in A and two in B: one with the same block and k, one that must not count."""
    rows, inner, blocks, a_type, b_type = DENSE[name]
    held = held_by(rows, inner, blocks)
    place = INPUT_LAYOUT[layout_key(a_type, rows, blocks)]
    places = {(lane, e): place(lane, e, held) for lane in range(64) for e in range(held)}
    rng = np.random.default_rng(5)
    a, b = np.zeros((len(places), 64, held)), np.zeros((len(places), 64, held))
    expected = np.zeros((len(places), blocks, rows, rows))
    for wave, ((lane, e), (block, row, k)) in enumerate(places.items()):
        a[wave, lane, e] = 1
        meets = [p for p, (q, _, z) in places.items() if (q, z) == (block, k)]
        misses = [p for p, (q, _, z) in places.items() if (q, z) != (block, k)]
        partner = meets[rng.integers(len(meets))]
        b[(wave, *partner)] = 1
        b[(wave, *misses[rng.integers(len(misses))])] = 1
        expected[wave, block, row, places[partner][1]] = 1
    vgpr = np.zeros((128, len(places), 64), np.uint32)
    for first, registers in ((A, to_registers(a, a_type)), (B, to_registers(b, b_type))):
        vgpr[first : first + len(registers)] = registers
    np.testing.assert_array_equal(outputs(name, execute(name, vgpr)), expected)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("selection", [slice(None), np.array([0, 2])], ids=["all", "some"])
def test_products_plus_c(name, selection):
    vgpr, a, b, c = setup(name, waves=3)
    after = execute(name, vgpr, selection)
    expected = np.einsum("wbik,wbjk->wbij", a, b) + c
    np.testing.assert_array_equal(outputs(name, after)[selection], expected[selection])
    count = DENSE[name][0] ** 2 * DENSE[name][2] // 64 * (2 if out_type(name) == "f64" else 1)
    untouched = np.ones(after.shape, bool)
    untouched[D : D + count, selection] = False
    np.testing.assert_array_equal(after[untouched], vgpr[untouched])


@pytest.mark.parametrize("name", DENSE)
def test_c_may_be_an_inline_constant_and_d_may_be_c(name):
    vgpr, a, b, c = setup(name, waves=2)
    plain = np.einsum("wbik,wbjk->wbij", a, b)
    value = 3 if out_type(name) == "i32" else 4.0
    np.testing.assert_array_equal(outputs(name, execute(name, vgpr, c=Constant(value))), plain + value)
    np.testing.assert_array_equal(outputs(name, execute(name, vgpr, c=Constant(0))), plain)
    np.testing.assert_array_equal(outputs(name, execute(name, vgpr, d=C), first=C), plain + c)


@pytest.mark.parametrize("name", [n for n, shape in DENSE.items() if shape[2] > 1 and shape[3] != "f64"])
def test_cbsz_and_abid_broadcast_blocks_of_a(name):
    vgpr, a, b, c = setup(name, waves=2)
    blocks = DENSE[name][2]
    for cbsz in range(1, blocks.bit_length()):
        for abid in {0, 1, (1 << cbsz) - 1}:
            source = [block - block % (1 << cbsz) + abid for block in range(blocks)]
            expected = np.einsum("wbik,wbjk->wbij", a[:, source], b) + c
            np.testing.assert_array_equal(outputs(name, execute(name, vgpr, cbsz=cbsz, abid=abid)), expected)


BLGP = {1: [0, 1, 0, 1], 2: [2, 3, 2, 3], 3: [1, 2, 3, 0], 4: [0] * 4, 5: [1] * 4, 6: [2] * 4, 7: [3] * 4}


@pytest.mark.parametrize(
    "name", [n for n, s_ in DENSE.items() if s_[3] != "f64" and (s_[2] > 1 or n in ("v_mfma_f32_16x16x4_f32",))]
)
def test_blgp_takes_b_from_other_lanes(name):
    """Each group of 16 lanes is fed from the group in the table, which is the same as moving the registers first."""
    vgpr, _, _, _ = setup(name, waves=2)
    for blgp, groups in BLGP.items():
        moved = vgpr.copy()
        lanes = np.concatenate([np.arange(16) + 16 * group for group in groups])
        moved[B : B + 8] = vgpr[B : B + 8][:, :, lanes]
        got, expected = execute(name, vgpr, blgp=blgp), execute(name, moved)
        np.testing.assert_array_equal(got[D:], expected[D:])
        assert not np.array_equal(got[D:], execute(name, vgpr)[D:])


@pytest.mark.parametrize("name", [n for n in DENSE if "f64" in n])
@pytest.mark.parametrize("blgp", range(8))
def test_blgp_of_f64_negates(name, blgp):
    vgpr, a, b, c = setup(name, waves=2)
    signs = [-1 if blgp >> bit & 1 else 1 for bit in range(3)]
    expected = np.einsum("wbik,wbjk->wbij", signs[0] * a, signs[1] * b) + signs[2] * c
    np.testing.assert_array_equal(outputs(name, execute(name, vgpr, blgp=blgp)), expected)


def test_f64_keeps_the_precision_of_its_inputs():
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 1, 1, 16, 4))
    vgpr = np.zeros((128, 1, 64), np.uint32)
    vgpr[A : A + 2] = to_registers(scatter(a, "f64", 1), "f64")
    vgpr[B : B + 2] = to_registers(scatter(b, "f64", 1), "f64")
    got = outputs("v_mfma_f64_16x16x4_f64", execute("v_mfma_f64_16x16x4_f64", vgpr, c=Constant(-2.0)))
    np.testing.assert_allclose(got, np.einsum("wbik,wbjk->wbij", a, b) - 2, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_products(name):
    """The index sets: 4 of 8 bits for 16-bit inputs, 2 of 16 bits for 8-bit ones; 2 bits per stored element."""
    rows, inner, a_type, b_type = SPARSE[name]
    kind, waves = out_type(name), 2
    rng = np.random.default_rng(9)
    stored = inner * rows // 128  # elements of A in a lane
    a_lanes = random_matrices(rng, (waves, 64, stored), a_type)
    b = random_matrices(rng, (waves, 1, rows, inner), b_type)
    c = rng.integers(-1000, 1000, (waves, 1, rows, rows)).astype(np.float64)
    index = rng.integers(0, 1 << 32, (waves, 64), dtype=np.uint64)
    sets = {2: 4, 1: 2}[WIDTH[a_type]]
    vgpr = np.full((128, waves, 64), 0x7FC17FC1, np.uint32)
    for first, registers in (
        (A, to_registers(a_lanes, a_type)),
        (B, to_registers(scatter(b, b_type, 2 * stored), b_type)),
        (D, accumulators(c, kind, rows, 1)),
        (INDEX, index.astype(np.uint32)[None]),
    ):
        vgpr[first : first + len(registers)] = registers
    for cbsz, abid in [(0, n) for n in range(sets)] + [(1, sets - 1)]:
        chosen = abid if cbsz == 0 else 0
        full = np.zeros((waves, rows, inner))
        for wave in range(waves):
            for lane in range(64):
                bits = int(index[wave, lane]) >> (chosen * 2 * stored)
                for e in range(stored):
                    k = 2 * stored * (lane // rows) + 4 * (e // 2) + (bits >> 2 * e & 3)
                    full[wave, lane % rows, k] += a_lanes[wave, lane, e]
        expected = np.einsum("wik,wjk->wij", full, b[:, 0])[:, None] + c
        for selection in (slice(None), np.array([1])):
            after = execute(name, vgpr, selection, c=INDEX, cbsz=cbsz, abid=abid)
            got = gather(from_registers(after[D : D + rows * rows // 64], kind), kind, rows, 1)
            np.testing.assert_array_equal(got[selection], expected[selection])


def test_sparse_does_not_multiply_what_it_skips():
    """An infinity in a row of B that no index selects must not turn into a NaN by way of 0 * inf."""
    vgpr = np.zeros((128, 1, 64), np.uint32)
    vgpr[A : A + 2] = 0x3C003C00  # 1.0 twice
    vgpr[B : B + 4] = 0x7C003C00  # k even: 1.0, k odd: infinity
    vgpr[INDEX] = 0b10001000  # elements 0 and 2 of each run of four
    after = execute("v_smfmac_f32_16x16x32_f16", vgpr, c=INDEX)
    np.testing.assert_array_equal(after[D : D + 4].view(np.float32), 16.0)


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_a_wave_gets_the_same_bits_in_any_company(name):
    """Values of very different size, so that another order of additions would show."""
    rng = np.random.default_rng(3)
    waves = 37
    vgpr = rng.integers(0, 1 << 32, (128, waves, 64), dtype=np.uint64).astype(np.uint32)
    fields = {"c": INDEX} if name in SPARSE else {}
    together = execute(name, vgpr, **fields)
    for selection in (np.array([5]), np.array([0, 5, 36]), np.arange(1, 37)):
        np.testing.assert_array_equal(execute(name, vgpr, selection, **fields)[D:, selection], together[D:, selection])
    alone = execute(name, vgpr[:, 5:6], **fields)
    np.testing.assert_array_equal(alone[D:, 0], together[D:, 5])


@pytest.mark.parametrize("kind, name", [("f16", "v_mfma_f32_16x16x16_f16"), ("bf16", "v_mfma_f32_16x16x16_bf16")])
def test_denormals_are_kept(kind, name):
    smallest = {"f16": 2.0**-24, "bf16": 2.0**-133}[kind]
    a, b = np.zeros((1, 1, 16, 16)), np.zeros((1, 1, 16, 16))
    a[0, 0, :, 3], b[0, 0, :, 3] = smallest, 0.5
    vgpr = np.zeros((128, 1, 64), np.uint32)
    vgpr[A : A + 2] = to_registers(scatter(a, kind, 4), kind)
    vgpr[B : B + 2] = to_registers(scatter(b, kind, 4), kind)
    np.testing.assert_array_equal(outputs(name, execute(name, vgpr)), np.float32(smallest / 2))


def test_xf32_rounds_inputs_to_ten_bits_to_nearest_even():
    """1 + 2**-11 is a tie and goes down to 1, 1 + 3 * 2**-11 a tie that goes up; NaN stays NaN."""
    bits = [0x3F801000, 0x3F803000, 0x3F801001, 0x7F800001, 0x7F800000]
    rounded = [1.0, 1 + 2.0**-9, 1 + 2.0**-10, np.nan, np.inf]
    for word, expected in zip(bits, rounded, strict=True):
        vgpr = np.zeros((128, 1, 64), np.uint32)
        vgpr[A, 0, :16] = word  # k = 0
        vgpr[B, 0, :16] = 0x3F800000
        got = outputs("v_mfma_f32_16x16x8_xf32", execute("v_mfma_f32_16x16x8_xf32", vgpr))
        np.testing.assert_array_equal(got, np.float32(expected))


def test_f32_sums_are_rounded_once():
    """2**24 + 1 + 1 in f32 steps stays at 2**24; summed exactly it is 2**24 + 2."""
    a = np.zeros((1, 1, 16, 4))
    a[0, 0, :, :3] = 2.0**24, 1, 1
    vgpr = np.zeros((128, 1, 64), np.uint32)
    vgpr[A] = to_registers(scatter(a, "f32", 1), "f32")[0]
    vgpr[B] = 0x3F800000
    np.testing.assert_array_equal(outputs("v_mfma_f32_16x16x4_f32", execute("v_mfma_f32_16x16x4_f32", vgpr)), 2**24 + 2)


def test_i32_wraps():
    vgpr = np.zeros((128, 1, 64), np.uint32)
    vgpr[A : A + 2], vgpr[B : B + 2], vgpr[C : C + 4] = 0x01010101, 0x01010101, 0x7FFFFFF0
    after = execute("v_mfma_i32_16x16x32_i8", vgpr)
    np.testing.assert_array_equal(after[D : D + 4], 0x7FFFFFF0 + 32)


@pytest.mark.parametrize("name, one", [("fp8_fp8", 0x40), ("bf8_bf8", 0x40)])
def test_fp8_nan_is_0x80_only(name, one):
    vgpr = np.zeros((128, 1, 64), np.uint32)
    vgpr[A : A + 2], vgpr[B : B + 2] = one * 0x01010101, one * 0x01010101
    vgpr[A, 0, 0] = 0x80 | one * 0x01010100  # row 0
    got = outputs(f"v_mfma_f32_16x16x32_{name}", execute(f"v_mfma_f32_16x16x32_{name}", vgpr))
    assert np.isnan(got[0, 0, 0]).all()
    np.testing.assert_array_equal(got[0, 0, 1:], 32.0)


@pytest.mark.parametrize("a_acc, b_acc, cd_acc", [(0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 1, 1)])
def test_accumulation_registers_and_exec_is_ignored(a_acc, b_acc, cd_acc):
    """Through the scheduler: registers in either file, EXEC almost empty, all lanes written."""
    name = "v_mfma_f32_16x16x16_bf16"
    vgpr, a, b, c = setup(name, waves=2)
    given = {A + q + 256 * a_acc: vgpr[A + q] for q in range(2)}
    given |= {B + q + 256 * b_acc: vgpr[B + q] for q in range(2)}
    given |= {C + q + 256 * cd_acc: vgpr[C + q] for q in range(4)}
    one = ins.v_mfma_f32_16x16x16_bf16(
        vdst=v[D : D + 3],
        src0=v[A : A + 1],
        src1=v[B : B + 1],
        src2=v[C : C + 3],
        acc=a_acc | b_acc << 1,
        acc_cd=cd_acc,
    )
    batch = machine.run([one], vgpr=given, exec=1)
    first = D + 256 * cd_acc
    np.testing.assert_array_equal(outputs(name, batch.vgpr, first), np.einsum("wbik,wbjk->wbij", a, b) + c)


def test_d_may_lie_on_a_and_partly_on_c():
    name = "v_mfma_f32_16x16x16_f16"
    vgpr, a, b, c = setup(name, waves=2)
    expected = np.einsum("wbik,wbjk->wbij", a, b) + c
    for d in (A, C + 2, C - 2):
        for selection in (slice(None), np.array([0, 1])):
            np.testing.assert_array_equal(outputs(name, execute(name, vgpr, selection, d=d), d), expected)


@pytest.mark.parametrize(
    "name, fields",
    [
        ("v_mfma_f32_16x16x32_bf16", {}),  # gfx950
        ("v_mfma_f32_16x16x16_bf16", {"blgp": 1}),
        ("v_mfma_f32_16x16x16_bf16", {"cbsz": 1}),
        ("v_mfma_f32_16x16x16_bf16", {"abid": 1}),
        ("v_mfma_f32_16x16x4_4b_bf16", {"cbsz": 3}),
        ("v_mfma_f32_16x16x4_4b_bf16", {"cbsz": 1, "abid": 2}),
        ("v_mfma_f32_16x16x16_bf16", {"c": s[0:3]}),
        ("v_smfmac_f32_16x16x32_f16", {"blgp": 1}),
        ("v_smfmac_i32_16x16x64_i8", {"abid": 2}),
    ],
)
def test_what_gfx942_does_not_have_is_refused(name, fields):
    with pytest.raises(UnknownInstruction):
        mfma.translate(instruction(name, **fields), None)


def test_registers_past_the_last_are_refused():
    code = bytearray(ins.v_mfma_f32_16x16x16_bf16(v[4:7], v[0:1], v[2:3], v[4:7]).to_bytes())
    code[0] = 253  # vdst: the assembler would refuse v[253:256]
    with pytest.raises(UnknownInstruction, match="registers 253 to 256"):
        mfma.translate(decode(bytes(code) + bytes(24), 0), None)


@pytest.mark.parametrize("which", ["src0", "src1"])
def test_constant_a_or_b_is_refused(which):
    sources = {"src0": v[0:1], "src1": v[2:3], which: 1.0}
    raw = ins.v_mfma_f32_16x16x16_bf16(vdst=v[4:7], src2=v[4:7], **sources)
    with pytest.raises(UnknownInstruction, match="must be in vector registers"):
        mfma.translate(decode(raw.to_bytes() + bytes(24), 0), None)
