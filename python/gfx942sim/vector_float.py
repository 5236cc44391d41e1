"""Floating-point instructions: f16, f32 and f64.

The transcendental ones are computed in float64 and rounded once, which is closer than the hardware's one ULP.
"""

from __future__ import annotations

import functools

import numpy as np

from . import floats
from .operation import Operation, reverse, table

_BELOW_ONE = {kind: np.nextafter(dtype(1), dtype(0)) for kind, dtype in (("f32", np.float32), ("f64", np.float64))}
_BELOW_ONE["f16"] = np.float32(1 - 2.0**-11)


def _rounded(function):
    """A float64 function for float32 operands, with one rounding at the end."""
    return lambda value: function(value.astype(np.float64)).astype(np.float32)


def _flushed(function):
    """v_exp_f32 and its like flush denormals of operand and result whatever MODE says."""
    wide = _rounded(function)
    return lambda value: floats.flush(wide(floats.flush(value)))


def _reciprocal(value):
    return 1 / value


def _reciprocal_root(value):
    return 1 / np.sqrt(value)


def _cosine(turns):
    return floats.sine_of_turns(turns, 0.25)


def _fraction(kind: str):
    """value - floor(value), below one even where that difference rounds up to it."""
    limit = _BELOW_ONE[kind]
    return lambda value: np.minimum(value - np.floor(value), limit)


def _multiply_legacy(a, b):
    return np.where((a == 0) | (b == 0), np.float32(0), a * b)


def _multiply_add_f16(a, b, c):
    """The product is rounded to f16 before the sum."""
    return (a * b).astype(np.float16).astype(np.float32) + c


def _three(function):
    return lambda a, b, c: function(function(a, b), c)


def _exponent_field(value):
    bits = value.view(np.uint32) >> 23 & 0xFF if value.dtype == np.float32 else value.view(np.uint64) >> 52 & 0x7FF
    return bits.astype(np.int32)


def _normal(exponent, overflow: int):
    """Neither zero, denormal, infinite nor NaN; the largest exponent field is 2 * (overflow - 2)."""
    return (exponent >= 1) & (exponent <= 2 * (overflow - 2))


def _denormal(value):
    return (value != 0) & (np.abs(value) < np.finfo(value.dtype).smallest_normal)


def _division_scale(far: int, tiny: int, step: int, bias: int):
    """v_div_scale: prepares a / b for the Newton steps; a is `numerator`, b `denominator`, and `value` is one of them.

    Args:
        far: exponent difference from which the quotient may overflow. tiny: exponent field up to which a numerator
            loses bits in the steps. step: the power of two that is applied. bias: of the format's exponent field.
    """

    def special(value, denominator, numerator):
        up, down = (np.ldexp(value, power) for power in (step, -step))
        inverse, quotient = 1 / denominator, numerator / denominator
        is_denominator, is_numerator = value == denominator, value == numerator
        small_inverse, small_quotient = _denormal(inverse), _denormal(quotient)
        numerator_exponent = _exponent_field(numerator)
        # The first condition that holds decides; each has its value and whether VCC is set.
        conditions = [
            (numerator == 0) | (denominator == 0),
            numerator_exponent - _exponent_field(denominator) >= far,
            _denormal(denominator),
            small_inverse & small_quotient,
            small_inverse,
            small_quotient,
            numerator_exponent <= tiny,
        ]
        values = [
            np.full_like(value, np.nan),
            np.where(is_denominator, up, value),
            up,
            # The guide scales up here as well, where the denominator is near the largest number and would overflow.
            np.where(is_denominator, down, value),
            down,
            np.where(is_numerator, up, value),
            up,
        ]
        rescaled = np.select(conditions, [0, 1, 0, 1, 0, 1, 0], 0)
        return np.select(conditions, values, value), rescaled != 0

    def scale(value, denominator, numerator):
        value, denominator, numerator = np.broadcast_arrays(value, denominator, numerator)
        top, bottom = _exponent_field(numerator), _exponent_field(denominator)
        difference = top - bottom
        # None of the conditions can hold for these, so the value stays.
        ordinary = (
            (bottom >= 1) & (bottom <= 2 * bias - 2) & (top > tiny) & (difference < far) & (difference > 1 - bias)
        )
        result, rescaled = value.copy(), np.zeros(value.shape, bool)
        if not ordinary.all():
            rest = ~ordinary
            result[rest], rescaled[rest] = special(value[rest], denominator[rest], numerator[rest])
        return result, rescaled

    return scale


def _division_fma(fma, step: int, bias: int):
    """v_div_fmas: an fma, and where VCC is set the power of two that v_div_scale took away.

    The guide gives one factor (2^32 or 2^64) for both directions, with which no quotient would come out right. The
    direction shows in the size of the addend, which is the scaled quotient.
    """

    def scaled_fma(a, b, c, lanes):
        result = fma(a, b, c)
        if not lanes.any():
            return result
        power = np.where(_exponent_field(c) > bias, step, -step)
        return np.where(lanes, np.ldexp(result, power), result)

    return scaled_fma


def _division_fixup(underflow: int | None, overflow: int | None):
    """v_div_fixup: special cases and sign of numerator / denominator, else the quotient's size.

    underflow, overflow: exponent differences below and from which the result is zero or infinite whatever the steps
    made of it (after an overflow, NaN). The guide's condition for the overflow can never hold, so this one is ours.
    """

    def special(quotient, denominator, numerator):
        negative = np.signbit(denominator) ^ np.signbit(numerator)
        zero, infinity, nan = (quotient.dtype.type(v) for v in (0, np.inf, np.nan))
        no_denominator, no_numerator = denominator == 0, numerator == 0
        endless_denominator, endless_numerator = np.isinf(denominator), np.isinf(numerator)
        size = np.abs(quotient)
        if underflow is not None:
            difference = _exponent_field(numerator) - _exponent_field(denominator)
            size = np.where(difference < underflow, zero, np.where(difference >= overflow, infinity, size))
        size = np.where(endless_denominator | no_numerator, zero, size)
        size = np.where(no_denominator | endless_numerator, infinity, size)
        result = np.where(negative, -size, size)
        invalid = (no_denominator & no_numerator) | (endless_denominator & endless_numerator)
        result = np.where(invalid, -nan, result)
        result = np.where(np.isnan(denominator), denominator, result)
        return np.where(np.isnan(numerator), numerator, result)

    def fix(quotient, denominator, numerator):
        if underflow is None:
            return special(quotient, denominator, numerator)
        quotient, denominator, numerator = np.broadcast_arrays(quotient, denominator, numerator)
        result = np.copysign(quotient, denominator * np.copysign(quotient.dtype.type(1), numerator))
        top, bottom = _exponent_field(numerator), _exponent_field(denominator)
        ordinary = (_normal(top, overflow) & _normal(bottom, overflow)) & (
            (top - bottom >= underflow) & (top - bottom < overflow)
        )
        if not ordinary.all():
            rest = ~ordinary
            result[rest] = special(quotient[rest], denominator[rest], numerator[rest])
        return result

    return fix


@functools.cache
def _two_over_pi(bits: int) -> int:
    """floor(2 / pi * 2^bits), by Machin's formula."""
    one = 1 << (bits + 64)

    def arctangent_of_inverse(n: int) -> int:
        total, power, k = 0, one // n, 1
        while power:
            total += power // k if k % 4 == 1 else -(power // k)
            power, k = power // (n * n), k + 2
        return total

    pi = 4 * (4 * arctangent_of_inverse(5) - arctangent_of_inverse(239))
    return (2 * one << bits) // pi


def _segment_of_two_over_pi(value, segment):
    """v_trig_preop_f64: 53 of the 1201 bits of 2 / pi that count for an angle of this size, at their place."""
    exponent, segment = np.broadcast_arrays(_exponent_field(value), segment.astype(np.int32) & 31)
    shift = segment * 53 + np.maximum(exponent - 1077, 0)
    shifts, place = np.unique(shift, return_inverse=True)
    all_bits = _two_over_pi(1201)
    parts = [float((all_bits << int(s)) >> (1201 - 53) & ((1 << 53) - 1)) for s in shifts]
    scale = -53 - shift + np.where(exponent >= 1968, 128, 0)
    return np.ldexp(np.array(parts)[place].reshape(shift.shape), scale)


def _dot2(a, b, total):
    """Products of f16 are exact in float32; each sum is rounded."""
    for shift in (0, 16):
        x, y = (floats.from_f16((value >> shift).astype(np.uint16)) for value in (a, b))
        total = total + x * y
    return total


def _packed_fma(a, b, c):
    halves = []
    for shift in (0, 16):
        parts = (floats.from_f16((value >> shift).astype(np.uint16)) for value in (a, b, c))
        halves.append(floats.to_f16(floats.fma16(*parts)).astype(np.uint32))
    return halves[0] | halves[1] << 16


def _common(kind: str) -> dict[str, Operation]:
    """What all three widths have under the same name."""
    fma = {"f16": floats.fma16, "f32": floats.fma32, "f64": floats.fma64}[kind]
    return {
        **table(
            f"{kind}: {kind}",
            {f"v_trunc_{kind}": np.trunc, f"v_ceil_{kind}": np.ceil, f"v_floor_{kind}": np.floor}
            | {f"v_rndne_{kind}": np.rint, f"v_fract_{kind}": _fraction(kind)},
        ),
        **table(f"{kind}: {kind} {kind}", {f"v_add_{kind}": np.add, f"v_mul_{kind}": np.multiply}),
        **table(f"{kind}: {kind} {kind} {kind}", {f"v_fma_{kind}": fma}, preserves_high=kind == "f16"),
    }


_FIXED: dict[str, Operation] = {
    **_common("f16"),
    **_common("f32"),
    **_common("f64"),
    **{
        name: Operation(function, kind, (kind, kind))
        for kind in ("f16", "f32")
        for name, function in {
            f"v_sub_{kind}": np.subtract,
            f"v_subrev_{kind}": reverse(np.subtract),
        }.items()
    },
    **table("f32: f32 f32", {"v_mul_legacy_f32": _multiply_legacy}),
    **table("f32: f32 f32 D:f32", {"v_fmac_f32": floats.fma32}),
    **table("f64: f64 f64 D:f64", {"v_fmac_f64": floats.fma64}),
    **table("f32: f32 K:f32 f32", {"v_fmamk_f32": floats.fma32}),
    **table("f32: f32 f32 K:f32", {"v_fmaak_f32": floats.fma32}),
    # f16 multiply-add
    **table("f16: f16 f16 f16", {"v_mad_f16": _multiply_add_f16}, preserves_high=True),
    **table("f16: f16 f16 f16", {"v_mad_legacy_f16": _multiply_add_f16, "v_fma_legacy_f16": floats.fma16}),
    **table("f16: f16 f16 D:f16", {"v_mac_f16": _multiply_add_f16}),
    **table("f16: f16 K:f16 f16", {"v_madmk_f16": _multiply_add_f16}),
    **table("f16: f16 f16 K:f16", {"v_madak_f16": _multiply_add_f16}),
    # Transcendental
    **table(
        "f32: f32",
        {"v_exp_f32": _flushed(np.exp2), "v_log_f32": _flushed(np.log2), "v_rcp_f32": _flushed(_reciprocal)}
        | {"v_exp_legacy_f32": _flushed(np.exp2), "v_log_legacy_f32": _flushed(np.log2)}
        | {"v_rcp_iflag_f32": _flushed(_reciprocal), "v_rsq_f32": _flushed(_reciprocal_root)}
        | {
            "v_sqrt_f32": _flushed(np.sqrt),
            "v_sin_f32": _rounded(floats.sine_of_turns),
            "v_cos_f32": _rounded(_cosine),
        },
    ),
    **table("f64: f64", {"v_rcp_f64": _reciprocal, "v_rsq_f64": _reciprocal_root, "v_sqrt_f64": np.sqrt}),
    **table(
        "f16: f16",
        {
            "v_exp_f16": lambda a: np.exp2(np.minimum(a, np.where(np.isinf(a), a, np.float32(100)))),
            "v_log_f16": np.log2,
            "v_rcp_f16": _reciprocal,
            "v_rsq_f16": _rounded(_reciprocal_root),
        }
        | {"v_sqrt_f16": np.sqrt, "v_sin_f16": floats.sine_of_turns, "v_cos_f16": _cosine},
    ),
    # Division
    **table("f32+mask: f32 f32 f32", {"v_div_scale_f32": _division_scale(96, 23, 64, 127)}),
    **table("f64+mask: f64 f64 f64", {"v_div_scale_f64": _division_scale(768, 53, 128, 1023)}),
    **table("f32: f32 f32 f32 VCC", {"v_div_fmas_f32": _division_fma(floats.fma32, 64, 127)}),
    **table("f64: f64 f64 f64 VCC", {"v_div_fmas_f64": _division_fma(floats.fma64, 128, 1023)}),
    **table("f64: f64 u32", {"v_trig_preop_f64": _segment_of_two_over_pi}),
    **table("f32: f32 f32 f32", {"v_div_fixup_f32": _division_fixup(-150, 129)}),
    **table("f64: f64 f64 f64", {"v_div_fixup_f64": _division_fixup(-1075, 1025)}),
    **table("f16: f16 f16 f16", {"v_div_fixup_f16": _division_fixup(None, None)}, preserves_high=True),
    **table("f16: f16 f16 f16", {"v_div_fixup_legacy_f16": _division_fixup(None, None)}),
    # Packed and dot products that accumulate into the destination
    **table("f32: u32 u32 D:f32", {"v_dot2c_f32_f16": _dot2}),
    **table("u32: u32 u32 D:u32", {"v_pk_fmac_f16": _packed_fma}),
}


@functools.cache
def operations(ieee: bool) -> dict[str, Operation]:
    """The table; minimum and maximum depend on the IEEE bit of MODE."""
    found = dict(_FIXED)
    low, high = functools.partial(floats.minimum, ieee=ieee), functools.partial(floats.maximum, ieee=ieee)
    middle = functools.partial(floats.median, ieee=ieee)
    for suffix, kind in (("f16", "half"), ("f32", "f32"), ("f64", "f64")):
        found |= table(f"{kind}: {kind} {kind}", {f"v_min_{suffix}": low, f"v_max_{suffix}": high})
        if suffix != "f64":
            found |= table(
                f"{kind}: {kind} {kind} {kind}",
                {f"v_min3_{suffix}": _three(low), f"v_max3_{suffix}": _three(high), f"v_med3_{suffix}": middle},
                preserves_high=suffix == "f16",
            )
    return found
