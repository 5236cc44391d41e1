"""Expectations by hand for the vector instructions whose pseudo-code does not say enough."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import machine
import pcode
from assembler import assemble
from gfx942sim import floats
from gfx942sim.fp8 import BF8, FP8

RNG = np.random.default_rng(3)
U32 = np.uint32
KEEP = 0xF << 16
SOME = 0xFF00_0FF0_1234_8001
ON = (SOME >> np.arange(64).astype(object) & 1).astype(bool)
BOTH_EXECS = pytest.mark.parametrize("exec_mask", [(1 << 64) - 1, SOME])


def raw(value) -> np.ndarray:
    value = np.asarray(value)
    return value.view({2: np.uint16, 4: np.uint32}[value.itemsize]).astype(U32)


def spread(values, dtype) -> np.ndarray:
    """Values as [2, 64] of a dtype, repeated to fill."""
    return np.resize(np.array(values), (2, 64)).astype(dtype)


def run32(line, *sources, **options):
    """Sources in v3, v4, v5 (any 32-bit arrays); v2 afterwards, and the batch."""
    batch = machine.run([assemble(line)], vgpr={2: 0, **{3 + i: raw(s) for i, s in enumerate(sources)}}, **options)
    return batch.vgpr[2], batch


def run64(line, *sources, **options):
    """float64 sources in v[4:5], v[6:7], v[8:9]; v[2:3] as float64, and the batch."""
    vgpr = {2: 0, 3: 0}
    for i, source in enumerate(sources):
        words = np.ascontiguousarray(source).view(U32).reshape(2, 64, 2)
        vgpr[4 + 2 * i], vgpr[5 + 2 * i] = words[..., 0], words[..., 1]
    batch = machine.run([assemble(line)], vgpr=vgpr, **options)
    return np.stack([batch.vgpr[2], batch.vgpr[3]], -1).view(np.float64)[..., 0], batch


SPECIAL = [0.0, -0.0, 1.0, -1.5, 2.5, 3.5, -0.5, 0.49999997, 8388609.0, -8388607.5, np.inf, -np.inf, np.nan, 1e-40]


# Lanes and register files


@BOTH_EXECS
def test_readfirstlane(exec_mask):
    value = RNG.integers(0, 1 << 32, (2, 64)).astype(U32)
    for mask in (exec_mask & ~1, exec_mask, 1 << 63, 0):
        batch = machine.run([assemble("v_readfirstlane_b32 s3, v4")], vgpr={4: value}, exec=mask)
        first = (mask & -mask).bit_length() - 1 if mask else 0
        assert np.array_equal(batch.sgpr[3], value[:, first])


def test_readlane_and_writelane_ignore_exec():
    value = RNG.integers(0, 1 << 32, (2, 64)).astype(U32)
    batch = machine.run([assemble("v_readlane_b32 s3, v4, s5")], vgpr={4: value}, sgpr={5: [63, 64 + 7]}, exec=1)
    assert batch.sgpr[3].tolist() == [value[0, 63], value[1, 7]]
    batch = machine.run(
        [assemble("v_writelane_b32 v4, s3, m0")], vgpr={4: value}, sgpr={3: [11, 12]}, m0=64 + 9, exec=0
    )
    expected = value.copy()
    expected[:, 9] = 11, 12
    assert np.array_equal(batch.vgpr[4], expected)


def test_readlane_into_exec_changes_the_lanes():
    code = [assemble("v_readlane_b32 exec_lo, v4, 0"), assemble("v_mov_b32 v5, 1")]
    batch = machine.run(code, vgpr={4: 0x0F, 5: 0})
    assert batch.vgpr[5][0].tolist() == [1] * 4 + [0] * 28 + [1] * 32


@BOTH_EXECS
def test_swap_and_accumulators(exec_mask):
    on = (exec_mask >> np.arange(64).astype(object) & 1).astype(bool)
    code = [
        "v_swap_b32 v2, v3",
        "v_accvgpr_write_b32 a4, v5",
        "v_accvgpr_write_b32 a6, 1.0",
        "v_accvgpr_mov_b32 a8, a4",
    ]
    code += ["v_accvgpr_read_b32 v9, a8"]
    old = {2: 20, 3: 30, 5: 50, 9: 90, 256 + 4: 40, 256 + 6: 60, 256 + 8: 80}
    batch = machine.run([assemble(line) for line in code], vgpr=old, exec=exec_mask)
    for register, value in {2: 30, 3: 20, 256 + 4: 50, 256 + 6: 0x3F800000, 256 + 8: 50, 9: 50}.items():
        assert np.array_equal(batch.vgpr[register][0], np.where(on, value, old[register])), register


# Floats


@pytest.mark.parametrize("op,function", [("v_rndne_f32", np.rint), ("v_fract_f32", None)])
def test_round_and_fraction_f32(op, function):
    x = spread([*SPECIAL, -1e-30, 4.75], np.float32)
    got = run32(f"{op} v2, v3", x)[0].view(np.float32)
    with np.errstate(all="ignore"):
        expected = function(x) if function else np.minimum(x - np.floor(x), np.float32(1 - 2.0**-24))
    assert np.array_equal(got, expected, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(expected)) or op == "v_fract_f32"


def test_round_and_fraction_f16_f64():
    """v_rndne_f16, v_fract_f16, v_rndne_f64, v_fract_f64."""
    x = spread([0.5, 1.5, -0.5, 2.5, -1e-7, 0.75, -2.25], np.float16)
    assert np.array_equal(run32("v_rndne_f16 v2, v3", x)[0], raw(np.rint(x)))
    below = np.float16(1 - 2.0**-11)
    assert np.array_equal(run32("v_fract_f16 v2, v3", x)[0], raw(np.minimum(x - np.floor(x), below)))
    y = spread([0.5, 1.5, -0.5, 2.5, -1e-30, 0.75, 2.0**52 + 1], np.float64)
    got = run64("v_rndne_f64 v[2:3], v[4:5]", y)[0]
    assert np.array_equal(got, np.rint(y)) and np.array_equal(np.signbit(got), np.signbit(y))
    expected = np.minimum(y - np.floor(y), 1 - 2.0**-53)
    assert np.array_equal(run64("v_fract_f64 v[2:3], v[4:5]", y)[0], expected)


def test_ldexp():
    """v_ldexp_f32, v_ldexp_f16, v_ldexp_f64: one rounding, also into denormals and from far outside."""
    x = RNG.normal(size=(2, 64)).astype(np.float32)
    power = np.resize(
        np.array([0, 1, -1, 127, -126, -140, -149, -160, 200, -400, 2**31 - 1, -(2**31)], np.int32), (2, 64)
    )
    exact = [
        [
            pcode.round_exact(Fraction(float(v)) * Fraction(2) ** max(min(int(p), 999), -999), 32)
            for v, p in zip(*rows, strict=True)
        ]
        for rows in zip(x, power, strict=True)
    ]
    assert np.array_equal(run32("v_ldexp_f32 v2, v3, v4", x, power)[0].view(np.float32), np.float32(exact))
    half, small = x.astype(np.float16), np.clip(power, -32768, 32767).astype(np.int16)
    exact = [
        [
            pcode.round_exact(Fraction(float(v)) * Fraction(2) ** max(min(int(p), 99), -99), 16)
            for v, p in zip(*rows, strict=True)
        ]
        for rows in zip(half, small, strict=True)
    ]
    assert np.array_equal(run32("v_ldexp_f16 v2, v3, v4", half, small)[0], raw(np.float16(exact)))
    wide, power = RNG.normal(size=(2, 64)), np.resize(np.array([0, 5, -1030, -1073, 1030, -3000], np.int64), (2, 64))
    batch_power = power.astype(np.int32).astype(np.int64).view(np.float64)
    with np.errstate(over="ignore"):
        expected = np.ldexp(wide, power.astype(np.int32))
    assert np.array_equal(run64("v_ldexp_f64 v[2:3], v[4:5], v6", wide, batch_power)[0], expected)


def test_frexp_of_zero_denormal_infinity():
    """v_frexp_exp_i32_f32, v_frexp_exp_i16_f16, v_frexp_exp_i32_f64."""
    values = [0.0, -0.0, 1.0, 1.5, 0.25, -8.0, np.inf, -np.inf, np.nan, 6e-8]
    wanted = [math.frexp(v)[1] if math.isfinite(v) else 0 for v in values]
    got = run32("v_frexp_exp_i32_f32 v2, v3", spread(values, np.float32))[0]
    assert got.view(np.int32)[0, : len(values)].tolist() == wanted
    got = run32("v_frexp_exp_i16_f16 v2, v3", spread(values, np.float16))[0]
    assert got.astype(np.int16)[0, : len(values)].tolist() == wanted
    batch = run64("v_frexp_exp_i32_f64 v2, v[4:5]", spread([*values, 1e-310], np.float64))[1]
    assert batch.vgpr[2].view(np.int32)[0, :11].tolist() == [*wanted, math.frexp(1e-310)[1]]
    assert (
        run32("v_frexp_exp_i32_f32 v2, v3", spread([1e-40], np.float32))[0].view(np.int32)[0, 0] == math.frexp(1e-40)[1]
    )


@pytest.mark.parametrize("name,function", [("sin", math.sin), ("cos", math.cos)])
def test_sine_and_cosine_take_turns(name, function):
    """v_sin_f32, v_cos_f32, v_sin_f16, v_cos_f16."""
    turns = np.resize(np.concatenate([np.arange(-8, 9) / 8, RNG.uniform(-200, 200, 40)]), (2, 64)).astype(np.float32)
    got = run32(f"v_{name}_f32 v2, v3", turns)[0].view(np.float32)
    wanted = np.vectorize(lambda t: function(2 * math.pi * math.fmod(t, 1)))(turns.astype(np.float64))
    assert np.abs(got - wanted).max() < 2e-7
    exact = {"sin": [0, 1, 0, -1], "cos": [1, 0, -1, 0]}[name]
    quarters = run32(f"v_{name}_f32 v2, v3", spread([0, 0.25, 0.5, 0.75], np.float32))[0].view(np.float32)
    assert quarters[0, :4].tolist() == exact
    half = turns.astype(np.float16)
    got = run32(f"v_{name}_f16 v2, v3", half)[0].astype(np.uint16).view(np.float16).astype(np.float64)
    wanted = np.vectorize(lambda t: function(2 * math.pi * math.fmod(t, 1)))(half.astype(np.float64))
    assert np.abs(got - wanted).max() < 6e-4


def test_trig_preop_gives_the_bits_of_two_over_pi():
    """v_trig_preop_f64."""
    two_over_pi = 2 / Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
    for angle, skipped in ((1.0, 0), (2.0**53, 0), (2.0**100, 46), (-(2.0**150), 96)):
        parts = []
        for segment in range(3):
            got = run64(f"v_trig_preop_f64 v[2:3], v[4:5], {segment}", np.full((2, 64), angle))[0]
            assert (got == got[0, 0]).all()
            parts.append(Fraction(float(got[0, 0])))
            # Each is a whole number of the last of its 53 bits.
            assert (parts[-1] * 2 ** (skipped + 53 * (segment + 1))).denominator == 1
        head = Fraction(math.floor(two_over_pi * 2**skipped), 2**skipped)
        assert 0 <= two_over_pi - head - sum(parts) < Fraction(1, 2 ** (skipped + 158))
    huge = run64("v_trig_preop_f64 v[2:3], v[4:5], 0", np.full((2, 64), 2.0**1000))[0][0, 0]
    shift = 1000 + 1023 - 1077
    assert 2.0 ** (127 - shift - 10) < huge < 2.0 ** (128 - shift)


def test_legacy_names():
    """v_exp_legacy_f32 and v_log_legacy_f32 compute what the plain ones do; v_mul_legacy_f32 has 0 * x = +0."""
    x = np.abs(RNG.normal(size=(2, 64))).astype(np.float32)
    for name in ("exp", "log"):
        assert np.array_equal(run32(f"v_{name}_legacy_f32 v2, v3", x)[0], run32(f"v_{name}_f32 v2, v3", x)[0])
    a, b = spread([0.0, -0.0, 2.0, np.inf], np.float32), spread([np.inf, np.nan, -0.0, -3.0], np.float32)
    assert run32("v_mul_legacy_f32 v2, v3, v4", a, b)[0][0, :4].tolist() == [0, 0, 0, 0xFF800000]


def test_transcendentals_flush_denormals():
    tiny = spread([1e-40, -1e-40], np.float32)
    assert run32("v_rcp_f32 v2, v3", tiny)[0][0, :2].tolist() == [0x7F800000, 0xFF800000]
    assert run32("v_log_f32 v2, v3", tiny)[0][0, 0] == 0xFF800000
    assert run32("v_rsq_f32 v2, v3", tiny)[0][0, 0] == 0x7F800000
    assert run32("v_sqrt_f32 v2, v3", tiny)[0][0, :2].tolist() == [0, 0x80000000]
    assert run32("v_exp_f32 v2, v3", spread([-127.0, -126.0], np.float32))[0][0, :2].tolist() == [0, 0x00800000]
    assert run32("v_rcp_f32 v2, v3", spread([2.0**127], np.float32))[0][0, 0] == 0


# Conversions


def test_fp8_both_ways():
    """v_cvt_f32_fp8, v_cvt_f32_bf8, v_cvt_pk_f32_fp8, v_cvt_pk_f32_bf8, v_cvt_pk_fp8_f32, v_cvt_pk_bf8_f32."""
    import torch

    codes = RNG.integers(0, 1 << 32, (2, 64)).astype(U32)
    values = np.concatenate([FP8[:128][RNG.integers(0, 127, 64)] * 1.03, RNG.normal(0, 100, 64)]).astype(np.float32)
    for name, table, dtype in (("fp8", FP8, torch.float8_e4m3fnuz), ("bf8", BF8, torch.float8_e5m2fnuz)):
        every = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
        assert np.array_equal(every, table, equal_nan=True)
        got = run32(f"v_cvt_f32_{name} v2, v3", codes)[0].view(np.float32)
        assert np.array_equal(got, every[codes & 255], equal_nan=True)
        batch = machine.run([assemble(f"v_cvt_pk_f32_{name} v[6:7], v3")], vgpr={3: codes}, exec=SOME)
        pair = batch.vgpr[6:8].view(np.float32)[:, :, ON]
        assert np.array_equal(pair[1], every[codes >> 8 & 255][:, ON], equal_nan=True)
        assert np.array_equal(pair[0], every[codes & 255][:, ON], equal_nan=True)
        x = spread(values, np.float32)
        packed = run32(f"v_cvt_pk_{name}_f32 v2, v3, v4", x, -x)[0]
        wanted = [torch.tensor(v).to(dtype).view(torch.uint8).numpy().astype(U32) for v in (x, -x)]
        assert np.array_equal(packed, wanted[0] | wanted[1] << 8)


def test_cvt_pkrtz_truncates():
    """v_cvt_pkrtz_f16_f32."""
    x = spread([*SPECIAL, 65519.0, 65520.0, 1e9, 1 + 2.0**-11, -1 - 2.0**-10.5, 6e-8, 2.0**-25], np.float32)
    got = run32("v_cvt_pkrtz_f16_f32 v2, v3, |v4|", x, x)[0]
    low, high = (part.astype(np.uint16).view(np.float16).astype(np.float32) for part in (got & 0xFFFF, got >> 16))
    finite = np.isfinite(x)
    assert np.array_equal(np.isnan(low), np.isnan(x)) and np.array_equal(low[~finite], x[~finite], equal_nan=True)
    assert (np.abs(low[finite]) <= np.abs(x[finite])).all() and np.array_equal(np.signbit(low), np.signbit(x))
    nearest_up = np.nextafter(np.abs(low[finite]).astype(np.float16), np.float16(np.inf)).astype(np.float32)
    assert (nearest_up > np.abs(x[finite])).all()
    assert np.array_equal(high, np.abs(low), equal_nan=True)


def test_cvt_off_f32_i4():
    """v_cvt_off_f32_i4: a signed 4-bit number of sixteenths."""
    got = run32("v_cvt_off_f32_i4 v2, v3", spread(np.arange(32), U32))[0].view(np.float32)[0, :16]
    assert got.tolist() == [i / 16 for i in [*range(8), *range(-8, 0)]]


# Division: the sequence that LLVM emits for a / b, so that scale, fmas and fixup are tested by what they are for


def divide32(numerator, denominator):
    lines = ["v_div_scale_f32 v10, s[6:7], v4, v4, v3", "v_div_scale_f32 v11, vcc, v3, v4, v3", "v_rcp_f32 v12, v10"]
    lines += ["v_fma_f32 v13, -v10, v12, 1.0", "v_fma_f32 v12, v13, v12, v12", "v_mul_f32 v13, v11, v12"]
    lines += ["v_fma_f32 v14, -v10, v13, v11", "v_fma_f32 v13, v14, v12, v13", "v_fma_f32 v14, -v10, v13, v11"]
    lines += ["v_div_fmas_f32 v14, v14, v12, v13", "v_div_fixup_f32 v2, v14, v4, v3"]
    batch = machine.run([assemble(line) for line in lines], vgpr={2: 0, 3: raw(numerator), 4: raw(denominator)})
    return batch.vgpr[2].view(np.float32)


def divide64(numerator, denominator):
    lines = ["v_div_scale_f64 v[10:11], s[6:7], v[6:7], v[6:7], v[4:5]", "v_rcp_f64 v[12:13], v[10:11]"]
    lines += ["v_fma_f64 v[14:15], -v[10:11], v[12:13], 1.0", "v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]"]
    lines += ["v_fma_f64 v[14:15], -v[10:11], v[12:13], 1.0", "v_fma_f64 v[12:13], v[12:13], v[14:15], v[12:13]"]
    lines += ["v_div_scale_f64 v[16:17], vcc, v[4:5], v[6:7], v[4:5]", "v_mul_f64 v[14:15], v[16:17], v[12:13]"]
    lines += ["v_fma_f64 v[10:11], -v[10:11], v[14:15], v[16:17]"]
    lines += [
        "v_div_fmas_f64 v[10:11], v[10:11], v[12:13], v[14:15]",
        "v_div_fixup_f64 v[2:3], v[10:11], v[6:7], v[4:5]",
    ]
    vgpr = {}
    for i, value in ((4, numerator), (6, denominator)):
        words = np.ascontiguousarray(value).view(U32).reshape(2, 64, 2)
        vgpr[i], vgpr[i + 1] = words[..., 0], words[..., 1]
    batch = machine.run([assemble(line) for line in lines], vgpr=vgpr)
    return np.stack([batch.vgpr[2], batch.vgpr[3]], -1).view(np.float64)[..., 0]


@pytest.mark.parametrize("divide,dtype,range_of_exponents", [(divide32, np.float32, 149), (divide64, np.float64, 1060)])
def test_division_is_correctly_rounded(divide, dtype, range_of_exponents):
    """v_div_scale_f32, v_div_fmas_f32, v_div_fixup_f32; v_div_scale_f64, v_div_fmas_f64, v_div_fixup_f64."""
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal]
    with np.errstate(all="ignore"):
        for _ in range(10):
            a, b = (
                np.ldexp(RNG.uniform(1, 2, (2, 64)), RNG.integers(-range_of_exponents, 127, (2, 64))).astype(dtype)
                for _ in range(2)
            )
            a[:, :9], b[:, :9] = RNG.permutation(np.array(special, dtype)), np.array(special, dtype)
            expected, got = a / b, divide(a, b)
            wrong = ~((got == expected) | (np.isnan(got) & np.isnan(expected)))
            # Denormal quotients are rounded twice by the sequence: off by at most the last bit.
            tiny = np.abs(expected) < np.finfo(dtype).smallest_normal
            assert not (wrong & ~tiny).any(), (a[wrong], b[wrong], got[wrong], expected[wrong])
            off = np.abs(got - expected)
            assert (off[wrong] <= np.finfo(dtype).smallest_subnormal).all(), (
                a[wrong],
                b[wrong],
                got[wrong],
                expected[wrong],
            )
            assert np.array_equal(np.signbit(got)[expected == 0], np.signbit(expected)[expected == 0])


# fma: one rounding


def exact_fma(a, b, c, width):
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return pcode.round_exact(exact, width) if exact else a * b + c


@pytest.mark.parametrize("width,function", [(32, floats.fma32), (64, floats.fma64), (16, floats.fma16)])
def test_fma_rounds_once(width, function):
    """Cases made to sit at a tie, near one, at the denormals' border and beyond the largest number."""
    dtype = {16: np.float16, 32: np.float32, 64: np.float64}[width]
    digits = {16: 10, 32: 23, 64: 52}[width]
    lowest = {16: -14, 32: -126, 64: -1022}[width]
    n = 4000
    a = (1 + RNG.integers(0, 1 << digits, n) / 2.0**digits) * RNG.choice([1, -1], n)
    b = (1 + RNG.integers(0, 1 << digits, n) / 2.0**digits) * 2.0 ** RNG.choice([0, -1, -digits - 1, digits // 2], n)
    b[::3] = 2.0 ** -RNG.integers(digits - 1, digits + 4, len(b[::3]))
    a[::2] = 1 + RNG.integers(-2, 3, len(a[::2])) * 2.0**-digits
    c = (1 + RNG.integers(0, 4, n) * 2.0**-digits) * RNG.choice([1, -1, 2.0**-digits, 2.0**-5], n)
    shift = np.where(np.arange(n) % 5 == 4, lowest - RNG.integers(0, digits, n), 0)
    a, c = np.ldexp(a, shift), np.ldexp(c, shift)
    a, b, c = (v.astype(dtype) for v in (a, b, c))
    if width == 32:
        # 24929 * 673 = 2^24 + 1 is halfway between two floats; the addend is lost in float64 but decides.
        a[:50], b[:50], c[:50] = 24929, np.float32(673) * RNG.choice([1, -1], 50), RNG.choice([1, -1], 50) * 2.0**-40
        # The same among denormals: half of 2^-149, less a little that float64 drops next to 2^-127.
        a[50:100], b[50:100] = (1 + 2.0**-23) * 2.0**-75, (1 - 2.0**-23) * 2.0**-75
        c[50:100] = (2**22 + 1) * 2.0**-149
    operands = (a, b, c) if width != 16 else tuple(v.astype(np.float32) for v in (a, b, c))
    with np.errstate(all="ignore"):
        got = function(*operands).astype(dtype)
    expected = np.array([exact_fma(*map(float, row), width) for row in zip(a, b, c, strict=True)]).astype(dtype)
    assert np.array_equal(got, expected, equal_nan=True)
    if width == 32:
        naive = (a.astype(np.float64) * b + c).astype(dtype)
        assert (naive != expected)[:50].any() and (naive != expected)[50:100].any(), "no case needed the second look"
