"""Floating-point building blocks: one rounding where the hardware rounds once, NaN and signed-zero rules, flushing.

Arrays of f16 values are carried as float32 between a read and a write: every f16 is a float32, and for one add,
multiply, divide or square root the second rounding (to f16) gives what a single one would. Everything here is
elementwise and broadcasts.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

_SMALLEST_NORMAL = {np.dtype(np.float16): 2.0**-14, np.dtype(np.float32): 2.0**-126, np.dtype(np.float64): 2.0**-1022}
_BITS = {np.dtype(np.float16): np.uint16, np.dtype(np.float32): np.uint32, np.dtype(np.float64): np.uint64}
_QUIET = {np.uint16: 0x0200, np.uint32: 0x00400000, np.uint64: 0x0008000000000000}
# A lookup is several times faster than numpy's conversion.
_F16_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
_LOW_29, _HALF_ULP = np.uint64((1 << 29) - 1), np.uint64(1 << 28)


def select(mask: np.ndarray, chosen: np.ndarray, other: np.ndarray) -> np.ndarray:
    """np.where for arrays of one unsigned dtype; several times faster when the mask is irregular."""
    full = np.negative(mask.astype(other.dtype))
    full = full & (chosen ^ other)
    return np.bitwise_xor(full, other, out=full)


def as_bits(value: np.ndarray) -> np.ndarray:
    """A float array as unsigned integers of the same width (a view)."""
    return value.view(_BITS[value.dtype])


def flush(value: np.ndarray, smallest_normal: float | None = None) -> np.ndarray:
    """Denormals to zero of the same sign. smallest_normal: when the values are of a narrower type than the array."""
    limit = _SMALLEST_NORMAL[value.dtype] if smallest_normal is None else smallest_normal
    return np.where(np.abs(value) < limit, np.copysign(value.dtype.type(0), value), value)


def from_f16(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of f16 to float32."""
    return _F16_VALUES[bits]


def to_f16(value: np.ndarray) -> np.ndarray:
    """float32 or float64 to uint16 bits of f16, to nearest even."""
    return value.astype(np.float16).view(np.uint16)


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rounded sum, and exactly what the rounding dropped (Knuth)."""
    total = a + b
    from_b = total - a
    return total, (a - (total - from_b)) + (b - from_b)


def _round_to_odd(total: np.ndarray, dropped: np.ndarray) -> np.ndarray:
    """`total` + `dropped` rounded to the neighbour with an odd last bit, so that a second rounding cannot go wrong."""
    bits = total.view(np.int64)
    inexact = (dropped != 0) & np.isfinite(total) & np.isfinite(dropped) & (bits & 1 == 0)
    step = np.where((dropped > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact, step, 0)).view(np.float64)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32 with one rounding.

    The product is exact in float64 and the sum is rounded to float64; the rounding to float32 can only go wrong where
    that result looks like a tie, or has fewer bits as a float32 denormal. Only those elements are done again.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    bits = total.view(np.uint64)
    doubtful = (bits & _LOW_29) == _HALF_ULP
    small = np.abs(total) < 2.0**-126
    if small.any():
        doubtful |= small & (total != 0)
    result = total.astype(np.float32)
    if doubtful.any():
        wide = np.broadcast_to(c, total.shape)[doubtful].astype(np.float64)
        result[doubtful] = _round_to_odd(*_two_sum(product[doubtful], wide)).astype(np.float32)
    return result


def fma16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of f16 values held as float32, as float64: the conversion to f16 is then the only rounding that counts.

    The product has 22 bits and spans 2^-48..2^32, so the float64 sum is exact unless one term is far below the other's
    last f16 bit; then it cannot be near a tie.
    """
    return np.multiply(a, b, dtype=np.float64) + c


def _split(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two halves of at most 26 bits whose sum is `value` (Veltkamp)."""
    scaled = value * 134217729.0
    high = scaled - (scaled - value)
    return high, value - high


def _fma_exact(a: float, b: float, c: float) -> float:
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float64 with one rounding (Boldo and Melquiond, "Emulation of FMA with round to odd").

    Elements near overflow or underflow are done one by one in exact arithmetic.
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    product = a * b
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    dropped = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    upper, lower = _two_sum(c, dropped)
    head, tail = _two_sum(product, upper)
    result = head + _round_to_odd(*_two_sum(tail, lower))
    sizes = np.abs(product), np.abs(a), np.abs(b), np.abs(c), np.abs(result)
    largest = np.maximum.reduce(sizes)
    risky = ~(largest < 2.0**990) | (sizes[0] < 2.0**-900) | (sizes[4] < 2.0**-900)
    for place in zip(*np.nonzero(risky), strict=True):
        result[place] = _fma_exact(float(a[place]), float(b[place]), float(c[place]))
    return result


def _pick(a: np.ndarray, b: np.ndarray, smaller: bool, ieee: bool) -> np.ndarray:
    # f16 keeps its bits for the NaN rule and compares as float32, where comparing is fast.
    x, y = (a.astype(np.float32), b.astype(np.float32)) if a.dtype == np.float16 else (a, b)
    bits_a, bits_b = as_bits(a), as_bits(b)
    if a.dtype == np.float16:
        result = select(x < y if smaller else x > y, bits_a, bits_b)
    else:
        result = as_bits((np.minimum if smaller else np.maximum)(x, y))
    equal = x == y
    if equal.any():
        # Only zeros differ in bits: the minimum is negative if either is, the maximum if both are.
        result = select(equal, bits_a | bits_b if smaller else bits_a & bits_b, result)
    nan_a, nan_b = np.isnan(x), np.isnan(y)
    if nan_a.any() or nan_b.any():
        quiet = result.dtype.type(_QUIET[result.dtype.type])
        result = select(nan_a, bits_b, result)
        result = select(nan_b, bits_a, result)
        if ieee:
            result = select(nan_b & (bits_b & quiet == 0), bits_b | quiet, result)
            result = select(nan_a & (bits_a & quiet == 0), bits_a | quiet, result)
    return result.view(a.dtype)


def minimum(a: np.ndarray, b: np.ndarray, ieee: bool) -> np.ndarray:
    """The smaller; -0 is below +0. A number beats a NaN, but with `ieee` a signalling NaN comes out, made quiet."""
    return _pick(a, b, True, ieee)


def maximum(a: np.ndarray, b: np.ndarray, ieee: bool) -> np.ndarray:
    """The larger, with the rules of `minimum`."""
    return _pick(a, b, False, ieee)


def median(a: np.ndarray, b: np.ndarray, c: np.ndarray, ieee: bool) -> np.ndarray:
    """The middle one; with a NaN among them the minimum of the three."""
    if a.dtype != np.float16:
        middle = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
        if not ((middle == 0) | np.isnan(middle)).any():
            return middle
    low_ab, high_ab = minimum(a, b, ieee), maximum(a, b, ieee)
    largest = maximum(high_ab, c, ieee)
    middle = np.where(largest == a, maximum(b, c, ieee), np.where(largest == b, maximum(a, c, ieee), high_ab))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    if nan.any():
        middle = np.where(nan, minimum(low_ab, c, ieee), middle)
    return middle


def to_f16_toward_zero(value: np.ndarray) -> np.ndarray:
    """float32 to f16 bits (uint16), rounded toward zero; what is too large becomes the largest finite number."""
    bits = value.view(np.uint32)
    size = bits & 0x7FFFFFFF
    result = (np.minimum(size, np.uint32(0x477FE000)) - np.uint32(0x38000000)) >> 13
    small = size < 0x38800000
    if small.any():
        result = select(
            small, (np.abs(np.where(small, value, np.float32(0))) * np.float32(2.0**24)).astype(np.uint32), result
        )
    special = size >= 0x7F800000
    if special.any():
        result = select(special, np.where(size > 0x7F800000, np.uint32(0x7E00), np.uint32(0x7C00)), result)
    return (result | bits >> 16 & 0x8000).astype(np.uint16)


def sine_of_turns(turns: np.ndarray, quarter: float = 0.0) -> np.ndarray:
    """sin(2 pi (turns + quarter)) in float64; exact at multiples of a quarter turn."""
    wide = turns.astype(np.float64)
    part = wide - np.rint(wide) + quarter
    # The nearest half turn, then a sine of at most a quarter turn: no error from a rounded multiple of pi.
    halves = np.rint(part * 2)
    sine = np.sin((part - halves / 2) * (2 * np.pi))
    return np.where(halves % 2 == 0, sine, -sine)


def clamp_to_one(value: np.ndarray, nan_to_zero: bool) -> np.ndarray:
    """The CLAMP modifier of float instructions: into [0, 1]; with DX10_CLAMP a NaN becomes 0. -0 becomes +0."""
    clamped = np.clip(value, value.dtype.type(0), value.dtype.type(1)) + value.dtype.type(0)
    return np.where(np.isnan(value), value.dtype.type(0), clamped) if nan_to_zero else clamped
