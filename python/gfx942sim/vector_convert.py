"""Conversions between numbers, and packing."""

from __future__ import annotations

import functools

import numpy as np

from . import fp8
from .floats import to_f16_toward_zero
from .operation import Operation, table


def to_integer(value: np.ndarray, dtype: type) -> np.ndarray:
    """Toward zero, saturating; NaN gives 0."""
    limits = np.iinfo(dtype)
    wide = np.trunc(value.astype(np.float64))
    clipped = np.clip(wide, limits.min, limits.max)
    nan = np.isnan(wide)
    if nan.any():
        clipped = np.where(nan, 0, clipped)
    return clipped.astype(np.int64).astype(dtype)


def _normalised(value: np.ndarray, dtype: type) -> np.ndarray:
    """[-1, 1] or [0, 1] to the whole positive range of the integer, to the nearest; NaN gives 0."""
    top = np.iinfo(dtype).max
    lowest = -1.0 if np.iinfo(dtype).min else 0.0
    scaled = np.rint(np.clip(value.astype(np.float64), lowest, 1.0) * top)
    return np.where(np.isnan(scaled), 0, scaled).astype(np.int64).astype(dtype)


def pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16-bit arrays as uint32."""
    return low.view(np.uint16) | high.view(np.uint16).astype(np.uint32) << 16


def _saturated(value: np.ndarray, dtype: type) -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.clip(value, limits.min, limits.max).astype(dtype)


def _byte_to_float(index: int):
    return lambda value: (value >> 8 * index & 0xFF).astype(np.float32)


@functools.cache
def _fp8_codes(name: str) -> np.ndarray:
    """Bytes by sign, exponent and 8 bits of the fraction of a float32, and whether any of the rest is set."""
    heads = np.arange(1 << 18, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        return fp8.encode((heads >> 1 << 15 | heads & 1).view(np.float32), getattr(fp8, name)).astype(np.uint16)


def _encode_fp8(value: np.ndarray, name: str) -> np.ndarray:
    bits = value.view(np.uint32)
    return _fp8_codes(name)[bits >> 15 << 1 | (bits & 0x7FFF != 0)]


def _pack_fp8(name: str):
    return lambda a, b: _encode_fp8(a, name) | _encode_fp8(b, name) << 8


def _from_fp8(number_table: np.ndarray):
    return lambda value: number_table[value & 0xFF]


def _pair_from_fp8(number_table: np.ndarray):
    def convert(value: np.ndarray) -> np.ndarray:
        low, high = (number_table[value >> shift & 0xFF].view(np.uint32) for shift in (0, 8))
        return low | high.astype(np.uint64) << 32

    return convert


def _insert_byte(value: np.ndarray, position: np.ndarray, base: np.ndarray) -> np.ndarray:
    shift = (position & 3) * 8
    return base & ~(np.uint32(0xFF) << shift) | to_integer(value, np.uint8).astype(np.uint32) << shift


def _exponent(value: np.ndarray) -> np.ndarray:
    """What frexp says; 0 for infinities and NaN."""
    return np.where(np.isfinite(value), np.frexp(value)[1], 0)


def _mantissa(value: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(value), np.frexp(value)[0], value)


def _scale(value: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """value * 2^exponent in float64: one rounding, which the narrower formats leave to their own conversion."""
    return np.ldexp(value.astype(np.float64), np.clip(exponent, -5000, 5000).astype(np.int32))


def _scale_f32(value: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    # +-400 reaches past both ends of float32 and stays exact in float64.
    return np.ldexp(value.astype(np.float64), np.clip(exponent, -400, 400)).astype(np.float32)


OPERATIONS: dict[str, Operation] = {
    **table("f32: i32", {"v_cvt_f32_i32": lambda a: a.astype(np.float32)}),
    **table("f32: u32", {"v_cvt_f32_u32": lambda a: a.astype(np.float32)}),
    **table("f32: u32", {f"v_cvt_f32_ubyte{i}": _byte_to_float(i) for i in range(4)}),
    **table("f32: u32", {"v_cvt_off_f32_i4": lambda a: (((a & 15) ^ 8).astype(np.float32) - 8) / 16}),
    **table("f64: i32", {"v_cvt_f64_i32": lambda a: a.astype(np.float64)}),
    **table("f64: u32", {"v_cvt_f64_u32": lambda a: a.astype(np.float64)}),
    **table("u32: f32", {"v_cvt_u32_f32": lambda a: to_integer(a, np.uint32)}),
    **table("i32: f32", {"v_cvt_i32_f32": lambda a: to_integer(a, np.int32)}),
    **table("i32: f32", {"v_cvt_rpi_i32_f32": lambda a: to_integer(np.floor(a + np.float32(0.5)), np.int32)}),
    **table("i32: f32", {"v_cvt_flr_i32_f32": lambda a: to_integer(np.floor(a), np.int32)}),
    **table("u32: f64", {"v_cvt_u32_f64": lambda a: to_integer(a, np.uint32)}),
    **table("i32: f64", {"v_cvt_i32_f64": lambda a: to_integer(a, np.int32)}),
    **table("f16: f32", {"v_cvt_f16_f32": lambda a: a}),
    **table("f32: f16", {"v_cvt_f32_f16": lambda a: a}),
    **table("f32: f64", {"v_cvt_f32_f64": lambda a: a.astype(np.float32)}),
    **table("f64: f32", {"v_cvt_f64_f32": lambda a: a.astype(np.float64)}),
    **table("f16: u16", {"v_cvt_f16_u16": lambda a: a.astype(np.float32)}),
    **table("f16: i16", {"v_cvt_f16_i16": lambda a: a.astype(np.float32)}),
    **table("u16: f16", {"v_cvt_u16_f16": lambda a: to_integer(a, np.uint16)}),
    **table("i16: f16", {"v_cvt_i16_f16": lambda a: to_integer(a, np.int16)}),
    **table("i16: f16", {"v_cvt_norm_i16_f16": lambda a: _normalised(a, np.int16)}),
    **table("u16: f16", {"v_cvt_norm_u16_f16": lambda a: _normalised(a, np.uint16)}),
    **table("f32: u32", {"v_cvt_f32_fp8": _from_fp8(fp8.FP8), "v_cvt_f32_bf8": _from_fp8(fp8.BF8)}),
    **table("b64: u32", {"v_cvt_pk_f32_fp8": _pair_from_fp8(fp8.FP8), "v_cvt_pk_f32_bf8": _pair_from_fp8(fp8.BF8)}),
    # op_sel picks the half of the destination; the other one stays.
    "v_cvt_pk_fp8_f32": Operation(_pack_fp8("FP8"), "b16", ("f32", "f32"), preserves_high=True, largest=240.0),
    "v_cvt_pk_bf8_f32": Operation(_pack_fp8("BF8"), "b16", ("f32", "f32"), preserves_high=True, largest=57344.0),
    **table(
        "u32: f32 f32",
        {"v_cvt_pkrtz_f16_f32": lambda a, b: pack(to_f16_toward_zero(a), to_f16_toward_zero(b))}
        | {"v_cvt_pknorm_i16_f32": lambda a, b: pack(_normalised(a, np.int16), _normalised(b, np.int16))}
        | {"v_cvt_pknorm_u16_f32": lambda a, b: pack(_normalised(a, np.uint16), _normalised(b, np.uint16))},
    ),
    **table(
        "u32: f16 f16",
        {"v_cvt_pknorm_i16_f16": lambda a, b: pack(_normalised(a, np.int16), _normalised(b, np.int16))}
        | {"v_cvt_pknorm_u16_f16": lambda a, b: pack(_normalised(a, np.uint16), _normalised(b, np.uint16))},
    ),
    **table(
        "u32: u32 u32", {"v_cvt_pk_u16_u32": lambda a, b: pack(_saturated(a, np.uint16), _saturated(b, np.uint16))}
    ),
    **table("u32: i32 i32", {"v_cvt_pk_i16_i32": lambda a, b: pack(_saturated(a, np.int16), _saturated(b, np.int16))}),
    **table("u32: b16 b16", {"v_pack_b32_f16": pack}),
    **table("u32: f32 u32 u32", {"v_cvt_pk_u8_f32": _insert_byte}),
    **table("u32: f32 u32 D:u32", {"v_cvt_pkaccum_u8_f32": _insert_byte}),
    **table("i32: f32", {"v_frexp_exp_i32_f32": lambda a: _exponent(a).astype(np.int32)}),
    **table("i32: f64", {"v_frexp_exp_i32_f64": lambda a: _exponent(a).astype(np.int32)}),
    **table("i16: f16", {"v_frexp_exp_i16_f16": lambda a: _exponent(a).astype(np.int16)}),
    **table("f32: f32", {"v_frexp_mant_f32": _mantissa}),
    **table("f64: f64", {"v_frexp_mant_f64": _mantissa}),
    **table("f16: f16", {"v_frexp_mant_f16": _mantissa}),
    **table("f32: f32 i32", {"v_ldexp_f32": _scale_f32}),
    **table("f64: f64 i32", {"v_ldexp_f64": _scale}),
    **table("f16: f16 i16", {"v_ldexp_f16": lambda a, b: _scale(a, np.clip(b, -100, 100))}),
}
