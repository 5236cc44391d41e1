"""Operand and result modifiers, on encodings that LLVM made: SDWA, DPP, VOP3 neg/abs/op_sel/omod/clamp."""

from __future__ import annotations

import numpy as np
import pytest

import machine
from assembler import Assembled, assemble
from gfx942sim.errors import UnknownInstruction
from gfx942sim.fp8 import BF8, FP8

U32 = np.uint32
KEEP, FLUSH = 0xF << 16, 0
IEEE, DX10_CLAMP = 1 << 23, 1 << 21
SOME = 0xFF00_0FF0_1234_8001
LANE = np.arange(64)


def bits(value) -> np.ndarray:
    return np.asarray(value, np.float32).view(U32)


def halves(value) -> np.ndarray:
    return np.asarray(value, np.float16).view(np.uint16).astype(U32)


RNG = np.random.default_rng(1)
V3, V4, V5, OLD = (RNG.integers(0, 1 << 32, (2, 64), dtype=np.uint64).astype(U32) for _ in range(4))
H3, H4, H5 = (halves(RNG.normal(0, 3, (2, 64))) | halves(RNG.normal(0, 3, (2, 64))) << 16 for _ in range(3))


def run(line, v3=V3, v4=V4, v5=V5, old=OLD, **options):
    return machine.run([assemble(line)], vgpr={2: old, 3: v3, 4: v4, 5: v5}, **options)


def byte(value, n):
    return value >> U32(8 * n) & U32(255)


def word(value, n):
    return value >> U32(16 * n) & U32(0xFFFF)


def h(value):
    """Low 16 bits as f16."""
    return (value & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)


def sext8(value):
    return value.astype(np.uint8).view(np.int8).astype(np.int32)


SDWA = "dst_sel:DWORD dst_unused:UNUSED_PAD"
SDWA_CASES = {
    f"v_add_u32_sdwa v2, v3, v4 {SDWA} src0_sel:BYTE_0 src1_sel:BYTE_3": byte(V3, 0) + byte(V4, 3),
    f"v_add_u32_sdwa v2, v3, v4 {SDWA} src0_sel:BYTE_1 src1_sel:WORD_1": byte(V3, 1) + word(V4, 1),
    f"v_add_u32_sdwa v2, v3, v4 {SDWA} src0_sel:BYTE_2 src1_sel:DWORD": byte(V3, 2) + V4,
    f"v_mov_b32_sdwa v2, sext(v3) {SDWA} src0_sel:BYTE_2": sext8(byte(V3, 2)).view(U32),
    f"v_add_u32_sdwa v2, sext(v3), sext(v4) {SDWA} src0_sel:WORD_1 src1_sel:BYTE_0": (
        word(V3, 1).astype(np.uint16).view(np.int16).astype(np.int32) + sext8(byte(V4, 0))
    ).view(U32),
    "v_add_u32_sdwa v2, v3, v4 dst_sel:BYTE_2 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD": (
        (V3 + V4 & U32(255)) << U32(16)
    ),
    "v_add_u32_sdwa v2, v3, v4 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD": (V3 + V4)
    << U32(16)
    | OLD & U32(0xFFFF),
    "v_add_u32_sdwa v2, v3, v4 dst_sel:BYTE_0 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD": (V3 + V4)
    & U32(255)
    | OLD & U32(0xFFFFFF00),
    "v_add_u32_sdwa v2, v3, v4 dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:DWORD src1_sel:DWORD": (
        sext8(V3 + V4 & U32(255)) << 8
    ).view(U32),
    "v_add_u32_sdwa v2, v3, v4 dst_sel:WORD_0 dst_unused:UNUSED_SEXT src0_sel:DWORD src1_sel:DWORD": (
        (V3 + V4).astype(np.uint16).view(np.int16).astype(np.int32).view(U32)
    ),
}


@pytest.mark.parametrize("line", SDWA_CASES)
def test_sdwa(line):
    assert np.array_equal(run(line).vgpr[2], SDWA_CASES[line])


def test_sdwa_float_modifiers_and_scalar_operand():
    line = "v_mul_f16_sdwa v2, -v3, |v4| dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:WORD_0"
    expected = halves(-h(H3 >> 16) * np.abs(h(H4))) << 16 | OLD & 0xFFFF
    assert np.array_equal(run(line, H3, H4).vgpr[2], expected)
    line = f"v_lshlrev_b32_sdwa v2, s3, v4 {SDWA} src0_sel:DWORD src1_sel:BYTE_1"
    assert np.array_equal(run(line, sgpr={3: [5, 36]}).vgpr[2], byte(V4, 1) << np.array([[5], [4]], U32))


def test_sdwa_compare_writes_sdst_or_vcc():
    expected = byte(V3, 1) < byte(V4, 2)
    batch = run("v_cmp_lt_u32_sdwa s[6:7], v3, v4 src0_sel:BYTE_1 src1_sel:BYTE_2", vcc=5)
    assert np.array_equal(batch.read_lane_mask(slice(None), 6), expected)
    assert (batch.sgpr[106] == 5).all()
    batch = run("v_cmp_lt_u32_sdwa vcc, v3, v4 src0_sel:BYTE_1 src1_sel:BYTE_2", exec=SOME)
    on = (SOME >> LANE.astype(object) & 1).astype(bool)
    assert np.array_equal(batch.read_lane_mask(slice(None), 106), expected & on)


def test_sdwa_carry():
    batch = run(f"v_add_co_u32_sdwa v2, vcc, v3, v4 {SDWA} src0_sel:BYTE_3 src1_sel:DWORD", v4=V4 | U32(0xFFFFFF00))
    total = byte(V3, 3).astype(np.uint64) + (V4 | U32(0xFFFFFF00))
    assert np.array_equal(batch.vgpr[2], total.astype(U32))
    assert np.array_equal(batch.read_lane_mask(slice(None), 106), total >> 32 != 0)


def test_fp8_bytes_by_sdwa():
    got = run("v_cvt_f32_fp8_sdwa v2, v3 src0_sel:BYTE_3").vgpr[2]
    assert np.array_equal(got.view(np.float32), FP8[byte(V3, 3)], equal_nan=True)
    batch = machine.run([assemble("v_cvt_pk_f32_bf8_sdwa v[6:7], v3 src0_sel:WORD_1")], vgpr={3: V3})
    for i in (0, 1):
        assert np.array_equal(batch.vgpr[6 + i].view(np.float32), BF8[byte(V3, 2 + i)], equal_nan=True)


ROW, IN_ROW = LANE // 16 * 16, LANE % 16
ALL_LANES = np.ones(64, bool)
# control -> (source lane, whether it exists)
DPP_CASES = {
    "quad_perm:[3,0,1,2]": (LANE // 4 * 4 + np.array([3, 0, 1, 2])[LANE % 4], ALL_LANES),
    "row_shl:3": (LANE + 3, IN_ROW + 3 < 16),
    "row_shr:1": (LANE - 1, IN_ROW >= 1),
    "row_shr:15": (LANE - 15, IN_ROW >= 15),
    "row_ror:4": (ROW + (IN_ROW + 12) % 16, ALL_LANES),
    "wave_shl:1": (LANE + 1, LANE < 63),
    "wave_rol:1": ((LANE + 1) % 64, ALL_LANES),
    "wave_shr:1": (LANE - 1, LANE > 0),
    "wave_ror:1": ((LANE + 63) % 64, ALL_LANES),
    "row_mirror": (ROW + 15 - IN_ROW, ALL_LANES),
    "row_half_mirror": (LANE // 8 * 8 + 7 - LANE % 8, ALL_LANES),
    "row_bcast:15": (ROW - 1, LANE >= 16),
    "row_bcast:31": (np.full(64, 31), LANE >= 32),
    "row_newbcast:5": (ROW + 5, ALL_LANES),
}


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("exec_mask", [(1 << 64) - 1, SOME])
@pytest.mark.parametrize("control", DPP_CASES)
def test_dpp_move(control, exec_mask, bound):
    source, exists = DPP_CASES[control]
    source = np.where(exists, source, 0)
    on = (exec_mask >> LANE.astype(object) & 1).astype(bool)
    valid = exists & on[source]
    ctrl = "bound_ctrl:0" if bound else ""
    batch = run(f"v_mov_b32_dpp v2, v3 {control} row_mask:0xf bank_mask:0xf {ctrl}", exec=exec_mask)
    moved = np.where(valid, V3[:, source], 0)
    written = on if bound else on & valid
    assert np.array_equal(batch.vgpr[2], np.where(written, moved, OLD))


def test_dpp_masks_disable_lanes():
    batch = run("v_mov_b32_dpp v2, v3 quad_perm:[0,1,2,3] row_mask:0xa bank_mask:0x6 bound_ctrl:0")
    written = np.isin(LANE // 16, (1, 3)) & np.isin(LANE % 16 // 4, (1, 2))
    assert np.array_equal(batch.vgpr[2], np.where(written, V3, OLD))


def test_dpp_reads_all_lanes_before_writing():
    batch = run("v_add_u32_dpp v3, v3, v4 row_shr:1 row_mask:0xf bank_mask:0xf")
    shifted = np.where(IN_ROW > 0, np.roll(V3, 1, 1) + V4, V3)
    assert np.array_equal(batch.vgpr[3], shifted)


def test_dpp_float_modifiers_accumulate_and_carry():
    x, y = bits(RNG.normal(size=(2, 64))), bits(RNG.normal(size=(2, 64)))
    batch = run("v_sub_f32_dpp v2, -v3, |v4| row_ror:1 row_mask:0xf bank_mask:0xf", x, y)
    source = ROW + (IN_ROW + 15) % 16
    expected = -x.view(np.float32)[:, source] - np.abs(y.view(np.float32))
    assert np.array_equal(batch.vgpr[2].view(np.float32), expected)
    batch = run("v_dot4c_i32_i8_dpp v2, v3, v4 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf")
    other = V3[:, LANE ^ 1]
    total = OLD.view(np.int32) + sum(sext8(byte(other, i)) * sext8(byte(V4, i)) for i in range(4))
    assert np.array_equal(batch.vgpr[2], total.view(U32))
    batch = run("v_add_co_u32_dpp v2, vcc, v3, v4 row_shl:1 row_mask:0xf bank_mask:0xf bound_ctrl:0")
    total = np.where(IN_ROW < 15, np.roll(V3, -1, 1), 0).astype(np.uint64) + V4
    assert np.array_equal(batch.vgpr[2], total.astype(U32))
    assert np.array_equal(batch.read_lane_mask(slice(None), 106), total >> 32 != 0)
    with pytest.raises(UnknownInstruction):
        run("v_add_co_u32_dpp v2, vcc, v3, v4 row_shl:1 row_mask:0xf bank_mask:0xf")


def test_dpp_of_a_pair():
    batch = machine.run(
        [assemble("v_mov_b64_dpp v[6:7], v[4:5] row_newbcast:3 row_mask:0xf bank_mask:0xf")], vgpr={4: V4, 5: V5}
    )
    assert np.array_equal(batch.vgpr[6], V4[:, ROW + 3]) and np.array_equal(batch.vgpr[7], V5[:, ROW + 3])


def test_negative_and_absolute():
    x = np.array([[1.5, -2.0, np.inf, -0.0] * 16] * 2, np.float32)
    y = np.array([[-3.0, 4.0, -1.0, 0.0] * 16] * 2, np.float32)
    got = run("v_add_f32 v2, -|v3|, |v4|", bits(x), bits(y)).vgpr[2].view(np.float32)
    assert np.array_equal(got, -np.abs(x) + np.abs(y))
    got = run("v_fma_f16 v2, -v3, |v4|, -|v5|", H3, H4, H5, OLD).vgpr[2]
    assert np.array_equal(got & 0xFFFF, halves(-h(H3) * np.abs(h(H4)) - np.abs(h(H5))))
    batch = machine.run(
        [assemble("v_mul_f64 v[6:7], -v[2:3], |v[4:5]|")],
        vgpr={2: 0, 3: np.where(LANE % 2, 0x3FF80000, 0xBFF80000), 4: 0, 5: np.where(LANE % 3, 0xC0000000, 0x40000000)},
    )
    assert np.array_equal(batch.vgpr[7][0], np.where(LANE % 2, 0xC0080000, 0x40080000))
    # v_cndmask has float modifiers on raw bits: NaN payloads survive.
    batch = run("v_cndmask_b32 v2, -v3, |v4|, s[6:7]", sgpr={6: 0xFFFF0000, 7: 0x0000FFFF})
    lanes = np.isin(LANE // 16, (1, 2))
    assert np.array_equal(batch.vgpr[2], np.where(lanes, V4 & U32(0x7FFFFFFF), V3 ^ U32(0x80000000)))


def test_op_sel_picks_halves():
    expected = halves(h(H3 >> 16) * h(H4) + h(H5 >> 16))
    got = run("v_fma_f16 v2, v3, v4, v5 op_sel:[1,0,1,0]", H3, H4, H5).vgpr[2]
    assert np.array_equal(got, expected | OLD & 0xFFFF0000)
    got = run("v_fma_f16 v2, v3, v4, v5 op_sel:[1,0,1,1]", H3, H4, H5).vgpr[2]
    assert np.array_equal(got, expected << 16 | OLD & 0xFFFF)
    got = run("v_pack_b32_f16 v2, v3, -v4 op_sel:[1,0,0]").vgpr[2]
    assert np.array_equal(got, word(V3, 1) | (word(V4, 0) ^ 0x8000) << 16)
    got = run("v_mad_u32_u16 v2, v3, v4, v5 op_sel:[1,0,0,0]").vgpr[2]
    assert np.array_equal(got, word(V3, 1) * word(V4, 0) + V5)


@pytest.mark.parametrize("op_sel,shift", [("", 0), ("op_sel:[0,0,1]", 16)])
def test_fp8_pair_goes_to_the_half_that_op_sel_names(op_sel, shift):
    import torch

    x, y = (RNG.normal(0, 40, (2, 64)).astype(np.float32) for _ in range(2))
    expected = [torch.tensor(v).to(torch.float8_e4m3fnuz).view(torch.uint8).numpy().astype(U32) for v in (-x, y)]
    got = run(f"v_cvt_pk_fp8_f32 v2, -v3, v4 {op_sel}", bits(x), bits(y)).vgpr[2]
    kept = OLD & (0xFFFF0000 >> shift)
    assert np.array_equal(got, kept | (expected[0] | expected[1] << 8) << shift)


def saturate(value, low, high):
    return np.clip(value, low, high).astype(np.int64).astype(U32)


I3, I4, I5 = (v.view(np.int32).astype(np.int64) for v in (V3, V4, V5))
S3, S4, S5 = (v.astype(np.int16).astype(np.int64) for v in (V3, V4, V5))
W3, W4, W5 = (v.astype(np.int64) & 0xFFFF for v in (V3, V4, V5))
CLAMPED = {
    "v_add_u32 v2, v3, v4 clamp": saturate(V3.astype(np.int64) + V4, 0, 2**32 - 1),
    "v_sub_u32 v2, v3, v4 clamp": saturate(V3.astype(np.int64) - V4, 0, 2**32 - 1),
    "v_subrev_u32 v2, v3, v4 clamp": saturate(V4.astype(np.int64) - V3, 0, 2**32 - 1),
    "v_add_i32 v2, v3, v4 clamp": saturate(I3 + I4, -(2**31), 2**31 - 1),
    "v_sub_i32 v2, v3, v4 clamp": saturate(I3 - I4, -(2**31), 2**31 - 1),
    "v_add_u16 v2, v3, v4 clamp": saturate(W3 + W4, 0, 65535),
    "v_sub_u16 v2, v3, v4 clamp": saturate(W3 - W4, 0, 65535),
    "v_add_i16 v2, v3, v4 clamp": saturate(S3 + S4, -32768, 32767) & 0xFFFF | OLD & 0xFFFF0000,
    "v_mad_u16 v2, v3, v4, v5 clamp": saturate(W3 * W4 + W5, 0, 65535) | OLD & 0xFFFF0000,
    "v_mad_i16 v2, v3, v4, v5 clamp": saturate(S3 * S4 + S5, -32768, 32767) & 0xFFFF | OLD & 0xFFFF0000,
    "v_mad_i32_i16 v2, v3, v4, v5 clamp": saturate(S3 * S4 + I5, -(2**31), 2**31 - 1),
    "v_mad_u32_u24 v2, v3, v4, v5 clamp": saturate(
        (V3.astype(np.int64) & 0xFFFFFF) * (V4.astype(np.int64) & 0xFFFFFF) + V5, 0, 2**32 - 1
    ),
    "v_mad_i32_i24 v2, v3, v4, v5 clamp": saturate(((I3 << 40) >> 40) * ((I4 << 40) >> 40) + I5, -(2**31), 2**31 - 1),
}


@pytest.mark.parametrize("line", CLAMPED)
def test_integer_clamp_saturates(line):
    assert np.array_equal(run(line).vgpr[2], CLAMPED[line])


def test_float_clamp():
    x = np.array([[-1.0, 0.25, 0.75, 3.0, np.inf, -np.inf, -0.0, np.nan] * 8] * 2, np.float32)
    got = run("v_add_f32 v2, v3, v3 clamp", bits(x), rsrc1=KEEP | DX10_CLAMP).vgpr[2]
    expected = bits(np.array([0, 0.5, 1, 1, 1, 0, 0, 0] * 8))
    assert np.array_equal(got[0], expected)
    got = run("v_add_f32 v2, v3, v3 clamp", bits(x), rsrc1=KEEP).vgpr[2].view(np.float32)
    assert np.isnan(got[:, 7::8]).all() and np.array_equal(got[0, :7], expected.view(np.float32)[:7])


@pytest.mark.parametrize("modifier,factor", [("mul:2", 2), ("mul:4", 4), ("div:2", 0.5)])
def test_output_modifier_needs_flushing_and_no_ieee(modifier, factor):
    x, y = (RNG.normal(size=(2, 64)).astype(np.float32) for _ in range(2))
    line = f"v_add_f32 v2, v3, v4 {modifier}"
    assert np.array_equal(
        run(line, bits(x), bits(y), rsrc1=FLUSH).vgpr[2].view(np.float32), (x + y) * np.float32(factor)
    )
    for mode in (KEEP, FLUSH | IEEE):
        assert np.array_equal(run(line, bits(x), bits(y), rsrc1=mode).vgpr[2].view(np.float32), x + y)


def test_denormals_follow_the_mode():
    tiny, normal = np.float32(1e-40), np.float32(2.0**-126)
    x = np.array([[tiny, -tiny, normal, 1.0] * 16] * 2, np.float32)
    kept = run("v_mul_f32 v2, 0.5, v3", bits(x), rsrc1=KEEP).vgpr[2].view(np.float32)
    assert np.array_equal(kept, x * np.float32(0.5))
    flushed = run("v_mul_f32 v2, 0.5, v3", bits(x), rsrc1=FLUSH).vgpr[2]
    assert flushed[0, :4].tolist() == [0, 0x80000000, 0, 0x3F000000]
    # A denormal operand is zero, not just a denormal result.
    flushed = run("v_mul_f32 v2, 0x70000000, v3", bits(x), rsrc1=FLUSH).vgpr[2]
    assert flushed[0, 0] == 0 and flushed[0, 1] == 0x80000000 and flushed[0, 2] != 0
    # Moves, selects and integer instructions never flush.
    for line in ("v_mov_b32 v2, v3", "v_cndmask_b32 v2, v3, v3, vcc", "v_or_b32 v2, v3, v3"):
        assert np.array_equal(run(line, bits(x), rsrc1=FLUSH).vgpr[2], bits(x)), line
    # f16 and f64 have a bit of their own.
    small = np.full((2, 64), 0x0001, U32)
    assert (run("v_add_f16 v2, v3, v3", small, rsrc1=3 << 16).vgpr[2] == 0).all()
    assert (run("v_add_f16 v2, v3, v3", small, rsrc1=3 << 18).vgpr[2] == 2).all()


@pytest.mark.parametrize("exec_mask", [(1 << 64) - 1, SOME])
def test_fp16_ovfl_saturates_finite_results(exec_mask):
    """Bit 26 of rsrc1, or MODE bit 23 by s_setreg: Triton sets it in kernels that convert to fp8."""
    x = np.resize(np.array([300.0, -1e9, 70000.0, 65519.0, 1.0, np.inf, np.nan], np.float32), (2, 64))
    on = (exec_mask >> LANE.astype(object) & 1).astype(bool)
    two = halves(np.full((2, 64), 60000.0)) * 0x10001
    lines = {
        "v_cvt_pk_fp8_f32 v2, v3, v3": ([0x7F7F, 0xFFFF, 0x7F7F, 0x7F7F, 0x4040, 0x8080, 0x8080], 0x8080),
        "v_cvt_pk_bf8_f32 v2, v3, v3": ([None, 0xFFFF, 0x7F7F, 0x7F7F, 0x4040, 0x8080, 0x8080], 0x8080),
        "v_cvt_f16_f32 v2, v3": ([0x5CB0, 0xFBFF, 0x7BFF, 0x7BFF, 0x3C00, 0x7C00, None], 0x7C00),
        "v_pk_add_f16 v2, v4, v4": ([0x7BFF7BFF] * 7, 0x7C007C00),
        "v_pk_fma_f16 v2, v4, v4, v4": ([0x7BFF7BFF] * 7, 0x7C007C00),
        "v_add_f16 v2, v4, v4": ([0x7BFF] * 7, 0x7C00),
        "v_fma_mixlo_f16 v2, v4, 2.0, v4 op_sel_hi:[1,0,1]": ([0x7BFF] * 7, 0x7C00),
    }
    for line, (saturated, otherwise) in lines.items():
        got = run(line, bits(x), two, old=OLD * 0, rsrc1=KEEP | 1 << 26, exec=exec_mask).vgpr[2]
        for lane in np.flatnonzero(on):
            if saturated[lane % 7] is not None:
                assert got[0, lane] == saturated[lane % 7], (line, lane)
        plain = run(line, bits(x), two, old=OLD * 0, rsrc1=KEEP, exec=exec_mask).vgpr[2]
        assert plain[0, np.flatnonzero(on & (LANE % 7 == 2))[0]] == otherwise, line


@pytest.mark.parametrize(
    "index,bit", [(1, 0x80), (7, 0x20), (1, 0x08), (7, 0x08)], ids=["clamp", "neg", "op_sel", "omod"]
)
def test_modifiers_that_an_instruction_does_not_have_are_refused(index, bit):
    code = bytearray(assemble("v_bfe_u32 v2, v3, v4, v5").to_bytes())
    code[index] |= bit
    with pytest.raises(UnknownInstruction):
        machine.run([Assembled(bytes(code))], vgpr={3: V3, 4: V4, 5: V5})
