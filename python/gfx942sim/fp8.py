"""The 8-bit floats of gfx942: e4m3fnuz ("fp8") and e5m2fnuz ("bf8").

FNUZ: no infinities, no negative zero, one NaN (0x80), and an exponent bias one higher than the OCP formats, so the same
byte is half the number. Source: AMD Instinct MI300 ISA guide, "Data formats"; torch's float8_e4m3fnuz/e5m2fnuz.
"""

from __future__ import annotations

import numpy as np

NAN = 0x80


def _table(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    byte = np.arange(256)
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = 1 << (exponent_bits - 1)
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    values = np.where(byte >> 7, -size, size)
    values[NAN] = np.nan
    return values.astype(np.float32)


# Index: the byte. float32 [256].
FP8 = _table(4, 3)
BF8 = _table(5, 2)


def encode(value: np.ndarray, table: np.ndarray) -> np.ndarray:
    """float32 to the format of `table` (FP8 or BF8), round to nearest even; returns uint32 bytes.

    Values that round past the largest number, infinities and NaN give 0x80, as v_cvt_pk_fp8_f32 does while
    MODE.FP16_OVFL is 0; what rounds to zero gives +0.
    """
    finite = table[:128].astype(np.float64)  # ascending: positive numbers in the order of their bytes
    size = np.abs(np.asarray(value, np.float32).astype(np.float64))
    # The halfway points between neighbours; at a tie the even byte wins.
    half = (finite[1:] + finite[:-1]) / 2
    above = np.searchsorted(half, size, side="left")
    tie = (above < 127) & (size == half[np.minimum(above, 126)])
    byte = np.where(tie & (above % 2 == 1), above + 1, above)
    limit = finite[127] + (finite[127] - finite[126]) / 2
    # The largest byte is odd, so a tie with the number that would follow rounds away from it.
    overflow = np.isnan(size) | (size >= limit)
    byte = np.where((byte > 0) & np.signbit(value), byte | 0x80, byte)
    return np.where(overflow, NAN, byte).astype(np.uint32)
