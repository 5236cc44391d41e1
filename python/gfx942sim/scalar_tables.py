"""What the scalar instructions compute, as tables of functions on uint32 and uint64 arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

u32, u64, i32, i64 = np.uint32, np.uint64, np.int32, np.int64
Result = tuple[np.ndarray, np.ndarray | None]


def signed(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).view(i32)


LOGIC: dict[str, Callable] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}

COMPARES: dict[str, Callable] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def _shift(kind: type, signed_kind: type, bits: int) -> dict[str, Callable]:
    def by(amount: np.ndarray) -> np.ndarray:
        return (amount & u32(bits - 1)).astype(kind)

    return {
        "lshl": lambda a, b: a << by(b),
        "lshr": lambda a, b: a >> by(b),
        "ashr": lambda a, b: (np.ascontiguousarray(a).view(signed_kind) >> by(b).astype(signed_kind)).view(kind),
    }


# (name, is 64 bits wide) -> function of (value, amount)
SHIFTS = {(name, False): f for name, f in _shift(u32, i32, 32).items()}
SHIFTS |= {(name, True): f for name, f in _shift(u64, i64, 64).items()}


def bit_field_extract(value: np.ndarray, field: np.ndarray, is_signed: bool) -> np.ndarray:
    """s_bfe: offset in bits 5:0 (4:0 for 32 bits), size in bits 22:16 of `field`."""
    wide = value.dtype == u64
    bits, kind = (64, u64) if wide else (32, u32)
    offset = (field & u32(bits - 1)).astype(u64)
    size = np.minimum((field >> u32(16) & u32(127)).astype(i64), bits)
    shifted = value.astype(u64) >> offset
    # Python-sized masks: 1 << 64 does not fit.
    mask = np.where(size >= 64, u64(2**64 - 1), (u64(1) << np.minimum(size, 63).astype(u64)) - u64(1))
    result = shifted & mask
    if is_signed:
        sign = np.where(size > 0, result >> np.maximum(size - 1, 0).astype(u64) & u64(1), u64(0))
        result = np.where(sign == 1, result | ~mask, result)
    return result.astype(kind)


def _add(a, b, carry) -> Result:
    total = a.astype(u64) + b.astype(u64) + carry
    return total.astype(u32), total >> u64(32)


def _subtract(a, b, borrow) -> Result:
    total = a.astype(i64) - b.astype(i64) - borrow
    return total.astype(u32), total < 0


def _signed_sum(a, b, sign) -> Result:
    total = signed(a).astype(i64) + sign * signed(b).astype(i64)
    return total.astype(u32), (total > 2**31 - 1) | (total < -(2**31))


def _choose(condition) -> Callable:
    def function(a, b, _scc) -> Result:
        first = condition(a, b)
        return np.where(first, a, b), first

    return function


def _shifted_add(bits: int) -> Callable:
    def function(a, b, _scc) -> Result:
        total = (a.astype(u64) << u64(bits)) + b.astype(u64)
        return total.astype(u32), total >> u64(32) != 0

    return function


def _absolute_difference(a, b, _scc) -> Result:
    result = np.abs(signed(a).astype(i64) - signed(b).astype(i64)).astype(u32)
    return result, result != 0


# name -> function of (a, b, scc) giving the result and the new SCC, or None to leave SCC
ADDS: dict[str, Callable[..., Result]] = {
    "add_u32": lambda a, b, s: _add(a, b, u64(0)),
    "addc_u32": lambda a, b, s: _add(a, b, s.astype(u64)),
    "sub_u32": lambda a, b, s: _subtract(a, b, 0),
    "subb_u32": lambda a, b, s: _subtract(a, b, s.astype(i64)),
    "add_i32": lambda a, b, s: _signed_sum(a, b, 1),
    "sub_i32": lambda a, b, s: _signed_sum(a, b, -1),
    "min_i32": _choose(lambda a, b: signed(a) < signed(b)),
    "max_i32": _choose(lambda a, b: signed(a) > signed(b)),
    "min_u32": _choose(lambda a, b: a < b),
    "max_u32": _choose(lambda a, b: a > b),
    "mul_i32": lambda a, b, s: (a * b, None),
    "mul_hi_u32": lambda a, b, s: ((a.astype(u64) * b.astype(u64) >> u64(32)).astype(u32), None),
    "mul_hi_i32": lambda a, b, s: ((signed(a).astype(i64) * signed(b).astype(i64) >> 32).astype(u32), None),
    "lshl1_add_u32": _shifted_add(1),
    "lshl2_add_u32": _shifted_add(2),
    "lshl3_add_u32": _shifted_add(3),
    "lshl4_add_u32": _shifted_add(4),
    "absdiff_i32": _absolute_difference,
}


def _each(function: Callable[[int], int]) -> Callable:
    """For the rare ones: one Python int per wave."""
    return lambda value: np.array([function(int(x)) & 0xFFFFFFFF for x in value], u32)


def _first_one(x: int) -> int:
    return (x & -x).bit_length() - 1


def _first_zero(bits: int) -> Callable[[int], int]:
    return lambda x: _first_one(~x & (1 << bits) - 1)


def _leading(bits: int) -> Callable[[int], int]:
    return lambda x: bits - x.bit_length() if x else -1


def _leading_sign(bits: int) -> Callable[[int], int]:
    def function(x: int) -> int:
        flipped = x ^ (1 << bits) - 1 if x >> (bits - 1) else x
        return bits - flipped.bit_length() if flipped else -1

    return function


# name -> (function, source is 64 bits wide, sets SCC to "not zero"); the result is 32 bits
COUNTS: dict[str, tuple[Callable, bool, bool]] = {
    "bcnt0_i32_b32": (lambda x: u32(32) - np.bitwise_count(x).astype(u32), False, True),
    "bcnt0_i32_b64": (lambda x: u32(64) - np.bitwise_count(x).astype(u32), True, True),
    "bcnt1_i32_b32": (lambda x: np.bitwise_count(x).astype(u32), False, True),
    "bcnt1_i32_b64": (lambda x: np.bitwise_count(x).astype(u32), True, True),
    "ff0_i32_b32": (_each(_first_zero(32)), False, False),
    "ff0_i32_b64": (_each(_first_zero(64)), True, False),
    "ff1_i32_b32": (_each(_first_one), False, False),
    "ff1_i32_b64": (_each(_first_one), True, False),
    "flbit_i32_b32": (_each(_leading(32)), False, False),
    "flbit_i32_b64": (_each(_leading(64)), True, False),
    "flbit_i32": (_each(_leading_sign(32)), False, False),
    "flbit_i32_i64": (_each(_leading_sign(64)), True, False),
}


def _reverse(value: np.ndarray) -> np.ndarray:
    octets = np.ascontiguousarray(value).view(np.uint8).reshape(-1, value.dtype.itemsize)
    bits = np.unpackbits(octets, axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").reshape(-1).view(value.dtype)


def _absolute(value: np.ndarray) -> np.ndarray:
    return np.abs(signed(value).astype(i64)).astype(u32)


# name -> (function, sets SCC to "not zero"); source and result have the width of the name
BITS: dict[str, tuple[Callable, bool]] = {
    "brev_b32": (_reverse, False),
    "brev_b64": (_reverse, False),
    "sext_i32_i8": (lambda x: (signed(x) << 24 >> 24).view(u32), False),
    "sext_i32_i16": (lambda x: (signed(x) << 16 >> 16).view(u32), False),
    "abs_i32": (_absolute, True),
}
