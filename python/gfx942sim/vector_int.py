"""Integer, bit and move instructions: the tables, and above them the functions that are too long for a lambda."""

from __future__ import annotations

import numpy as np

from .floats import select
from .operation import Operation, reverse, table
from .state import LANE

_BELOW_LOW = ((1 << np.minimum(LANE, 32)) - 1).astype(np.uint32)
_BELOW_HIGH = ((1 << np.maximum(LANE - 32, 0)) - 1).astype(np.uint32)
_REVERSED_BYTES = np.array([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], np.uint8)


def _unsigned24(value):
    return value & 0xFFFFFF


def _signed24(value):
    return ((value & 0xFFFFFF) ^ 0x800000) - 0x800000


def _wide(value):
    return value.astype(np.int64 if value.dtype.kind == "i" else np.uint64)


def _high_word(product, dtype):
    return (product >> 32).astype(dtype)


def _add_carry(a, b, carry=None):
    total = a.astype(np.uint64) + b
    if carry is not None:
        total += carry
    return total.astype(np.uint32), total > 0xFFFFFFFF


def _subtract_borrow(a, b, borrow=None):
    taken = b if borrow is None else b.astype(np.uint64) + borrow
    return (a - taken).astype(np.uint32), taken > a


def _extract_unsigned(value, offset, size):
    return value >> (offset & 31) & ((np.uint32(1) << (size & 31)) - 1)


def _extract_signed(value, offset, size):
    unused = 32 - (size & 31)
    field = (value >> (offset & 31)) << (unused & 31) >> (unused & 31)
    return field * (unused < 32)


def _reverse_bits(value):
    swapped = np.ascontiguousarray(value).view(np.uint8).reshape(*value.shape, 4)[..., ::-1]
    return np.ascontiguousarray(_REVERSED_BYTES[swapped]).view(np.uint32)[..., 0]


def _bit_length(value):
    """int32: 0 for 0. frexp of a float64 is exact for 32-bit numbers."""
    return np.frexp(value.astype(np.float64))[1]


def _leading_zeros(value):
    length = _bit_length(value)
    return np.where(length == 0, -1, 32 - length).astype(np.int32)


def _leading_signs(value):
    return _leading_zeros((value ^ (value >> 31)).view(np.uint32))


def _trailing_zeros(value):
    return (_bit_length(value & (~value + np.uint32(1))) - 1).astype(np.int32)


def _funnel(high, low, shift):
    return ((high.astype(np.uint64) << 32 | low) >> shift.astype(np.uint64)).astype(np.uint32)


def _permute(a, b, selector):
    """v_perm_b32. Bytes 0..3 are those of b, 4..7 those of a."""
    if selector.size == 1 or (selector == selector.flat[0]).all():
        chosen = int(selector.flat[0])
        parts = [_permute_byte(a, b, chosen >> shift & 0xFF) << shift for shift in (0, 8, 16, 24)]
        return parts[0] | parts[1] | parts[2] | parts[3]
    pair = a.astype(np.uint64) << 32 | b
    signs = [(pair >> bit & 1).astype(np.uint32) * 255 for bit in (15, 31, 47, 63)]
    result = np.zeros(np.broadcast(pair, selector).shape, np.uint32)
    for shift in (0, 8, 16, 24):
        code = selector >> shift & 0xFF
        byte = (pair >> (np.minimum(code, 7) * 8).astype(np.uint64) & 0xFF).astype(np.uint32)
        for special, value in zip(range(8, 12), signs, strict=True):
            byte = np.where(code == special, value, byte)
        byte = np.where(code == 12, 0, np.where(code > 12, 255, byte)).astype(np.uint32)
        result |= byte << shift
    return result


def _permute_byte(a, b, code: int):
    if code >= 12:
        return np.full((1, 1), 0 if code == 12 else 255, np.uint32)
    if code >= 8:
        word = (b, b, a, a)[code - 8]
        return (word >> (15 if code % 2 == 0 else 31) & 1) * np.uint32(255)
    return (a if code >= 4 else b) >> 8 * (code & 3) & 255


def _difference(a, b):
    return np.maximum(a, b) - np.minimum(a, b)


def _fields(value, bits: int):
    return [value >> shift & ((1 << bits) - 1) for shift in range(0, 32, bits)]


def _sad(bits: int, masked: bool = False):
    def sum_of_differences(a, b, total):
        for x, y in zip(_fields(a, bits), _fields(b, bits), strict=True):
            part = _difference(x, y)
            total = total + (part * (y != 0) if masked else part)
        return total

    return sum_of_differences


def _sad_high(a, b, total):
    return (_sad(8)(a, b, a & 0) << 16) + total


def _median(a, b, c):
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _average(a, b, c):
    """v_lerp_u8: per byte (a + b + low bit of c) >> 1."""
    parts = zip(_fields(a, 8), _fields(b, 8), _fields(c, 8), range(0, 32, 8), strict=True)
    return sum(((x + y + (z & 1)) >> 1) << shift for x, y, z, shift in parts)


def _multiply_add_unsigned(a, b, c):
    total = a.astype(np.uint64) * b + c
    return total, total < c


def _multiply_add_signed(a, b, c):
    product = a.astype(np.int64) * b
    total = product + c
    overflow = (product ^ total) & (c ^ total)
    # The 65th bit of the exact sum is its sign.
    return total, (total ^ overflow) < 0


def _saturated_bytes(value):
    low, high = (np.clip((value << up) >> 16, 0, 255) for up in (16, 0))
    return (low | high << 8).astype(np.uint16)


def unsigned_field(value, shift: int, bits: int):
    """Bits [shift, shift + bits) of uint32 as int64."""
    return (value >> shift & ((1 << bits) - 1)).astype(np.int64)


def signed_field(value, shift: int, bits: int):
    """Bits [shift, shift + bits) of uint32 as a signed int64."""
    return (unsigned_field(value, shift, bits) ^ (1 << (bits - 1))) - (1 << (bits - 1))


def dot_products(a, b, bits: int, field):
    """The dot product of packed integers of `bits` bits, exact in int64. field: signed_field or unsigned_field."""
    return sum(field(a, shift, bits) * field(b, shift, bits) for shift in range(0, 32, bits))


def _accumulating_dot(bits: int):
    return lambda a, b, total: (dot_products(a, b, bits, signed_field) + total).astype(np.int32)


def _shift_right(value, amount):
    return value >> amount.astype(value.dtype)


_ADD_SHIFT_32 = {
    "v_lshlrev_b32": lambda a, b: b << (a & 31),
    "v_lshrrev_b32": lambda a, b: b >> (a & 31),
    "v_bfm_b32": lambda a, b: ((np.uint32(1) << (a & 31)) - 1) << (b & 31),
    "v_mul_hi_u32_u24": lambda a, b: _high_word(_wide(_unsigned24(a)) * _unsigned24(b), np.uint32),
    "v_mul_lo_u32": np.multiply,
    "v_mul_hi_u32": lambda a, b: _high_word(_wide(a) * b, np.uint32),
    "v_and_b32": np.bitwise_and,
    "v_or_b32": np.bitwise_or,
    "v_xor_b32": np.bitwise_xor,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_bcnt_u32_b32": lambda a, b: np.bitwise_count(a) + b,
    "v_mbcnt_lo_u32_b32": lambda a, b: np.bitwise_count(a & _BELOW_LOW) + b,
    "v_mbcnt_hi_u32_b32": lambda a, b: np.bitwise_count(a & _BELOW_HIGH) + b,
}

_THREE_32 = {
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & 31),
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32": _extract_unsigned,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_perm_b32": _permute,
    "v_alignbit_b32": lambda a, b, c: _funnel(a, b, c & 31),
    "v_alignbyte_b32": lambda a, b, c: _funnel(a, b, (c & 3) * 8),
    "v_min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_med3_u32": _median,
    "v_lerp_u8": _average,
}

_SHORT_SATURATING = {"v_add_u16": np.add, "v_sub_u16": np.subtract, "v_subrev_u16": reverse(np.subtract)}

OPERATIONS: dict[str, Operation] = {
    **table("b32: b32", {"v_mov_b32": lambda a: a}),
    **table("b64: b64", {"v_mov_b64": lambda a: a}),
    **table("b32: b32 b32 mask", {"v_cndmask_b32": lambda a, b, lanes: select(lanes, b, a)}),
    **table("u32: u32", {"v_not_b32": np.invert, "v_bfrev_b32": _reverse_bits}),
    **table("i32: u32", {"v_ffbh_u32": _leading_zeros, "v_ffbl_b32": _trailing_zeros}),
    **table("i32: i32", {"v_ffbh_i32": _leading_signs}),
    **table("u16: i32", {"v_sat_pk_u8_i16": _saturated_bytes}),
    **table("u32: u32 u32", _ADD_SHIFT_32),
    **table(
        "u32: u32 u32",
        {"v_add_u32": np.add, "v_sub_u32": np.subtract, "v_subrev_u32": reverse(np.subtract)}
        | {"v_mul_u32_u24": lambda a, b: _unsigned24(a) * _unsigned24(b)},
        saturates=True,
    ),
    **table(
        "i32: i32 i32",
        {"v_ashrrev_i32": lambda a, b: b >> (a & 31), "v_min_i32": np.minimum, "v_max_i32": np.maximum}
        | {"v_mul_hi_i32": lambda a, b: _high_word(_wide(a) * b, np.int32)}
        | {"v_mul_hi_i32_i24": lambda a, b: _high_word(_wide(_signed24(a)) * _signed24(b), np.int32)},
    ),
    **table(
        "i32: i32 i32",
        {"v_add_i32": np.add, "v_sub_i32": np.subtract, "v_mul_i32_i24": lambda a, b: _signed24(a) * _signed24(b)},
        saturates=True,
    ),
    **table("u32: u32 u32 u32", _THREE_32),
    **table(
        "u32: u32 u32 u32",
        {"v_mad_u32_u24": lambda a, b, c: _unsigned24(a) * _unsigned24(b) + c, "v_sad_u8": _sad(8)}
        | {"v_sad_hi_u8": _sad_high, "v_sad_u16": _sad(16), "v_msad_u8": _sad(8, masked=True)}
        | {"v_sad_u32": lambda a, b, c: _difference(a, b) + c},
        saturates=True,
    ),
    **table("i32: i32 u32 u32", {"v_bfe_i32": lambda a, b, c: _extract_signed(a, *(x.view(np.int32) for x in (b, c)))}),
    **table(
        "i32: i32 i32 i32",
        {"v_min3_i32": lambda a, b, c: np.minimum(np.minimum(a, b), c), "v_med3_i32": _median}
        | {"v_max3_i32": lambda a, b, c: np.maximum(np.maximum(a, b), c)},
    ),
    **table(
        "i32: i32 i32 i32",
        {"v_mad_i32_i24": lambda a, b, c: _signed24(a) * _signed24(b) + c},
        saturates=True,
    ),
    **table("u32: u16 u16 u32", {"v_mad_u32_u16": lambda a, b, c: a.astype(c.dtype) * b + c}, saturates=True),
    **table("i32: i16 i16 i32", {"v_mad_i32_i16": lambda a, b, c: a.astype(c.dtype) * b + c}, saturates=True),
    # 16 bits
    **table("u16: u16 u16", _SHORT_SATURATING, saturates=True),
    **table(
        "u16: u16 u16",
        {"v_mul_lo_u16": np.multiply, "v_min_u16": np.minimum, "v_max_u16": np.maximum}
        | {"v_lshlrev_b16": lambda a, b: b << (a & 15), "v_lshrrev_b16": lambda a, b: b >> (a & 15)},
    ),
    **table(
        "i16: i16 i16",
        {"v_ashrrev_i16": lambda a, b: b >> (a & 15), "v_min_i16": np.minimum, "v_max_i16": np.maximum},
    ),
    **table("i16: i16 i16", {"v_add_i16": np.add, "v_sub_i16": np.subtract}, saturates=True, preserves_high=True),
    **table("u16: u16 u16 u16", {"v_mad_u16": lambda a, b, c: a * b + c}, saturates=True, preserves_high=True),
    **table("i16: i16 i16 i16", {"v_mad_i16": lambda a, b, c: a * b + c}, saturates=True, preserves_high=True),
    **table("u16: u16 u16 u16", {"v_mad_legacy_u16": lambda a, b, c: a * b + c}, saturates=True),
    **table("i16: i16 i16 i16", {"v_mad_legacy_i16": lambda a, b, c: a * b + c}, saturates=True),
    **{
        name: Operation(function, kind, (kind,) * 3, preserves_high=True)
        for kind in ("i16", "u16")
        for name, function in {
            f"v_min3_{kind}": lambda a, b, c: np.minimum(np.minimum(a, b), c),
            f"v_max3_{kind}": lambda a, b, c: np.maximum(np.maximum(a, b), c),
            f"v_med3_{kind}": _median,
        }.items()
    },
    # 64 bits
    **table("u64: u32 u64", {"v_lshlrev_b64": lambda a, b: b << (a & 63), "v_lshrrev_b64": lambda a, b: b >> (a & 63)}),
    **table("i64: u32 i64", {"v_ashrrev_i64": lambda a, b: _shift_right(b, a & 63)}),
    **table("u64: u64 u32 u64", {"v_lshl_add_u64": lambda a, b, c: (a << (b & 7)) + c}),
    # Carries
    **table(
        "u32+mask: u32 u32",
        {"v_add_co_u32": _add_carry, "v_sub_co_u32": _subtract_borrow, "v_subrev_co_u32": reverse(_subtract_borrow)},
    ),
    **table(
        "u32+mask: u32 u32 mask",
        {"v_addc_co_u32": _add_carry, "v_subb_co_u32": _subtract_borrow}
        | {"v_subbrev_co_u32": reverse(_subtract_borrow)},
    ),
    **table("u64+mask: u32 u32 u64", {"v_mad_u64_u32": _multiply_add_unsigned}),
    **table("i64+mask: i32 i32 i64", {"v_mad_i64_i32": _multiply_add_signed}),
    # Dot products that accumulate into the destination
    **table(
        "i32: u32 u32 D:i32",
        {f"v_dot{32 // bits}c_i32_i{bits}": _accumulating_dot(bits) for bits in (16, 8, 4)},
    ),
}
