"""Matrix instructions against layouts written down by hand (matrix_bench), and against plain matrix products."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import s, v
from tinygrad.runtime.autogen.amd.cdna import ins

import machine
from gfx942sim import mfma
from gfx942sim.decode import decode
from gfx942sim.errors import UnknownInstruction
from matrix_bench import (
    DENSE,
    INDEX,
    INPUT_LAYOUT,
    SPARSE,
    WIDTH,
    A,
    B,
    C,
    Constant,
    D,
    accumulators,
    execute,
    from_registers,
    gather,
    held_by,
    instruction,
    layout_key,
    out_type,
    outputs,
    random_matrices,
    scatter,
    setup,
    to_registers,
)


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
