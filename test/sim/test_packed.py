"""VOP3P: op_sel, neg, clamp and constants, on encodings that LLVM made. Plain forms are in test_vector_pcode.py."""

from __future__ import annotations

import numpy as np
import pytest

import machine
from assembler import assemble
from gfx942sim.errors import UnknownInstruction

RNG = np.random.default_rng(4)
U32 = np.uint32
SOME = 0xFF00_0FF0_1234_8001
ON = (SOME >> np.arange(64).astype(object) & 1).astype(bool)
HALVES = RNG.normal(0, 4, (3, 2, 64, 2)).astype(np.float16)
SHORTS = RNG.integers(-32768, 32768, (3, 2, 64, 2)).astype(np.int16)
SINGLES = RNG.normal(0, 4, (3, 2, 2, 64)).astype(np.float32)
BOTH_EXECS = pytest.mark.parametrize("exec_mask", [(1 << 64) - 1, SOME])


def word(pair):
    """[..., 2] of 16 bits to uint32 [...]."""
    return np.ascontiguousarray(pair).view(U32)[..., 0]


def run16(line, data, exec_mask=(1 << 64) - 1, **options):
    """data in v3, v4, v5; returns v2 as [2, 64, 2] of data's dtype. v2 was 0xABCDEF01."""
    vgpr = {2: 0xABCDEF01, **{3 + i: word(data[i]) for i in range(3)}}
    got = machine.run([assemble(line)], vgpr=vgpr, exec=exec_mask, **options).vgpr[2]
    on = (exec_mask >> np.arange(64).astype(object) & 1).astype(bool)
    assert (got[:, ~on] == 0xABCDEF01).all()
    return np.ascontiguousarray(got)[..., None].view(data.dtype).reshape(2, 64, 2)[:, on], on


@BOTH_EXECS
@pytest.mark.parametrize("select", [((0, 1), (0, 1)), ((1, 0), (0, 0)), ((1, 1), (1, 0)), ((0, 0), (1, 1))])
def test_op_sel_of_halves(select, exec_mask):
    """select[i]: the half of source i that the low and the high result use."""
    low, high = zip(*select, strict=True)
    modifiers = f"op_sel:[{low[0]},{low[1]}] op_sel_hi:[{high[0]},{high[1]}]"
    got, on = run16(f"v_pk_mul_f16 v2, v3, v4 {modifiers}", HALVES, exec_mask)
    a, b = (HALVES[i][:, on][..., list(select[i])] for i in (0, 1))
    assert np.array_equal(got, (a.astype(np.float32) * b.astype(np.float32)).astype(np.float16))
    got, on = run16(f"v_pk_sub_i16 v2, v3, v4 {modifiers}", SHORTS, exec_mask)
    assert np.array_equal(got, SHORTS[0][:, on][..., list(select[0])] - SHORTS[1][:, on][..., list(select[1])])


def test_negated_halves_and_fma():
    got, _ = run16("v_pk_fma_f16 v2, v3, v4, v5 neg_lo:[1,0,0] neg_hi:[0,1,1]", HALVES)
    a, b, c = (HALVES[i].astype(np.float64) for i in range(3))
    expected = np.stack([-a[..., 0] * b[..., 0] + c[..., 0], -a[..., 1] * b[..., 1] - c[..., 1]], -1)
    assert np.array_equal(got, expected.astype(np.float16))


def test_scalar_and_constant_operands():
    x = HALVES[0].astype(np.float32)
    got, _ = run16("v_pk_mul_f16 v2, v3, 2.0 op_sel_hi:[1,0]", HALVES)
    assert np.array_equal(got, (x * 2).astype(np.float16))
    # The constant's high half is zero.
    got, _ = run16("v_pk_add_f16 v2, v3, 2.0", HALVES)
    assert np.array_equal(got, (x + np.array([2, 0], np.float32)).astype(np.float16))
    # An integer is sign-extended to 32 bits.
    got, _ = run16("v_pk_add_u16 v2, v3, -3", SHORTS)
    assert np.array_equal(got, SHORTS[0] + np.array([-3, -1], np.int16))
    got, _ = run16("v_pk_add_u16 v2, v3, s6", SHORTS, sgpr={6: [0x00020001, 0x00040003]})
    assert np.array_equal(got, SHORTS[0] + np.array([[[1, 2]], [[3, 4]]], np.int16))
    got, _ = run16("v_pk_add_u16 v2, 7, s6 op_sel_hi:[0,1]", SHORTS, sgpr={6: 0x00020001})
    assert (got == [8, 9]).all()


INTEGER_CLAMPS = {
    "v_pk_add_i16": (np.int16, lambda a, b, c: a + b),
    "v_pk_sub_i16": (np.int16, lambda a, b, c: a - b),
    "v_pk_add_u16": (np.uint16, lambda a, b, c: a + b),
    "v_pk_sub_u16": (np.uint16, lambda a, b, c: a - b),
    "v_pk_mad_i16": (np.int16, lambda a, b, c: a * b + c),
    "v_pk_mad_u16": (np.uint16, lambda a, b, c: a * b + c),
}


@BOTH_EXECS
@pytest.mark.parametrize("name", INTEGER_CLAMPS)
def test_integer_clamp(name, exec_mask):
    dtype, function = INTEGER_CLAMPS[name]
    data = SHORTS.view(dtype)
    third = ", v5" if "mad" in name else ""
    got, on = run16(f"{name} v2, v3, v4{third} clamp", data, exec_mask)
    limits = np.iinfo(dtype)
    expected = np.clip(function(*(data[i][:, on].astype(np.int64) for i in range(3))), limits.min, limits.max)
    assert np.array_equal(got, expected.astype(dtype))


def test_float_clamp_of_halves():
    got, _ = run16("v_pk_add_f16 v2, v3, v4 clamp", HALVES)
    total = HALVES[0].astype(np.float32) + HALVES[1].astype(np.float32)
    assert np.array_equal(got, np.clip(total, 0, 1).astype(np.float16))


def run_pairs(line, exec_mask=(1 << 64) - 1, **options):
    """SINGLES in v[4:5], v[6:7], v[8:9]; returns v[2:3] as float32 [2, 2, lanes]."""
    vgpr = {2: 5, 3: 6}
    for i in range(3):
        vgpr[4 + 2 * i], vgpr[5 + 2 * i] = SINGLES[i].view(U32)
    batch = machine.run([assemble(line)], vgpr=vgpr, exec=exec_mask, **options)
    on = (exec_mask >> np.arange(64).astype(object) & 1).astype(bool)
    assert (batch.vgpr[2][:, ~on] == 5).all() and (batch.vgpr[3][:, ~on] == 6).all()
    return batch.vgpr[2:4].view(np.float32)[:, :, on], on


@BOTH_EXECS
def test_packed_f32(exec_mask):
    a, b, c = SINGLES
    got, on = run_pairs("v_pk_mul_f32 v[2:3], v[4:5], v[6:7] op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[1,0]", exec_mask)
    assert np.array_equal(got, np.stack([-a[1] * b[0], a[0] * b[1]])[:, :, on])
    got, on = run_pairs("v_pk_add_f32 v[2:3], v[4:5], 1.0 neg_hi:[0,1]", exec_mask)
    assert np.array_equal(got, np.stack([a[0] + 1, a[1] - 1])[:, :, on])
    got, on = run_pairs(
        "v_pk_fma_f32 v[2:3], v[4:5], s[6:7], v[8:9] op_sel_hi:[1,0,1]", exec_mask, sgpr={6: 0x40000000}
    )
    assert np.array_equal(got, (a * 2 + c)[:, :, on])


def test_packed_f32_reads_before_it_writes():
    code = [assemble("v_pk_mul_f32 v[4:5], v[4:5], v[6:7] op_sel:[1,0] op_sel_hi:[0,1]")]
    a, b, _ = SINGLES
    vgpr = {4: a[0].view(U32), 5: a[1].view(U32), 6: b[0].view(U32), 7: b[1].view(U32)}
    batch = machine.run(code, vgpr=vgpr)
    assert np.array_equal(batch.vgpr[4:6].view(np.float32), np.stack([a[1] * b[0], a[0] * b[1]]))


@BOTH_EXECS
def test_packed_move(exec_mask):
    got, on = run_pairs("v_pk_mov_b32 v[2:3], v[4:5], v[6:7] op_sel:[1,0]", exec_mask)
    assert np.array_equal(got, np.stack([SINGLES[0][1], SINGLES[1][0]])[:, :, on])
    batch = machine.run([assemble("v_pk_mov_b32 v[4:5], v[4:5], v[4:5] op_sel:[1,0]")], vgpr={4: 40, 5: 50})
    assert (batch.vgpr[4] == 50).all() and (batch.vgpr[5] == 40).all()


@BOTH_EXECS
def test_mixed_fma(exec_mask):
    """v_mad_mix_f32, v_mad_mixlo_f16, v_mad_mixhi_f16: v_fma_mix in LLVM, with one rounding."""
    on = (exec_mask >> np.arange(64).astype(object) & 1).astype(bool)
    a, b, c = HALVES[0], SINGLES[1][0], HALVES[2]
    vgpr = {2: 0xABCDEF01, 3: word(a), 4: b.view(U32), 5: word(c)}
    exact = a[..., 1].astype(np.float64) * -b.astype(np.float64) + np.abs(c[..., 0]).astype(np.float64)
    operands = "v2, v3, -v4, |v5| op_sel:[1,0,0] op_sel_hi:[1,0,1]"
    single = exact.astype(np.float32)
    half = single.astype(np.float16).view(np.uint16).astype(U32)
    wanted = {"": single.view(U32), "lo": half | 0xABCD0000, "hi": half << 16 | 0xEF01}
    for part, value in wanted.items():
        name = f"v_fma_mix{part}_f{16 if part else 32}"
        got = machine.run([assemble(f"{name} {operands}")], vgpr=vgpr, exec=exec_mask).vgpr[2]
        assert np.array_equal(got, np.where(on, value, 0xABCDEF01)), name
    clamped = machine.run([assemble(f"v_fma_mix_f32 {operands} clamp")], vgpr=vgpr).vgpr[2].view(np.float32)
    assert np.array_equal(clamped, np.clip(single, 0, 1))
    constants = machine.run([assemble("v_fma_mix_f32 v2, v3, 2.0, 1.0 op_sel_hi:[1,0,1]")], vgpr=vgpr).vgpr[2]
    assert np.array_equal(constants.view(np.float32), a[..., 0].astype(np.float32) * 2 + 1)


def test_mixed_fma_rounds_once():
    """24929 * 673 = 2^24 + 1 is a tie that the addend decides."""
    values = {3: np.float32(24929), 4: np.float32(673), 5: np.float32(2.0**-40)}
    batch = machine.run([assemble("v_fma_mix_f32 v2, v3, v4, v5")], vgpr={k: v.view(U32) for k, v in values.items()})
    assert (batch.vgpr[2].view(np.float32) == 2.0**24 + 2).all()


@pytest.mark.parametrize("bits,count", [(16, 2), (8, 4), (4, 8)])
@pytest.mark.parametrize("signed", [True, False])
def test_integer_dot_clamps(bits, count, signed):
    a, b, c = (RNG.integers(0, 1 << 32, (2, 64)).astype(U32) for _ in range(3))
    c[:, ::2] = 0x7FFFFFF0 if signed else 0xFFFFFFF0
    letter = "i" if signed else "u"

    def field(value, i):
        part = value.astype(np.int64) >> bits * i & ((1 << bits) - 1)
        return np.where(part >> (bits - 1), part - (1 << bits), part) if signed else part

    exact = sum(field(a, i) * field(b, i) for i in range(count)) + (c.view(np.int32) if signed else c).astype(np.int64)
    limits = np.iinfo(np.int32 if signed else np.uint32)
    name = f"v_dot{count}_{letter}32_{letter}{bits}"
    for suffix, expected in (("", exact), (" clamp", np.clip(exact, limits.min, limits.max))):
        batch = machine.run([assemble(f"{name} v2, v3, v4, v5{suffix}")], vgpr={2: 0, 3: a, 4: b, 5: c})
        assert np.array_equal(batch.vgpr[2], (expected & 0xFFFFFFFF).astype(U32)), suffix


def test_half_dot_modifiers():
    a, b, c = HALVES[0].astype(np.float32), HALVES[1].astype(np.float32), SINGLES[0][0]
    batch = machine.run(
        [assemble("v_dot2_f32_f16 v2, v3, v4, v5 neg_lo:[1,0,0] neg_hi:[0,0,0]")],
        vgpr={2: 0, 3: word(HALVES[0]), 4: word(HALVES[1]), 5: c.view(U32)},
    )
    expected = (c - a[..., 0] * b[..., 0]) + a[..., 1] * b[..., 1]
    assert np.array_equal(batch.vgpr[2].view(np.float32), expected)


def test_flushing_mode_reaches_packed_instructions():
    lines = ["v_pk_mul_f32 v[4:5], v[2:3], 0.5 op_sel_hi:[1,0]", "v_pk_add_f16 v6, v7, v7"]
    vgpr = {2: 0x00800000, 3: 0x3F800000, 7: 0x80010001}
    for rsrc1, expected in ((0, [0, 0x3F000000, 0x80000000]), (0xF << 16, [0x00400000, 0x3F000000, 0x80020002])):
        batch = machine.run([assemble(line) for line in lines], vgpr=vgpr, rsrc1=rsrc1)
        assert [batch.vgpr[i][0, 0] for i in (4, 5, 6)] == expected


def test_what_does_not_exist_is_refused():
    with pytest.raises(UnknownInstruction):
        machine.run([assemble("v_pk_max_i16 v2, v3, v4 clamp")], vgpr={3: 0, 4: 0})
