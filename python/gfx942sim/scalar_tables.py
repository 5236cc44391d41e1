"""What the scalar ALU computes, as data: mnemonic -> function on uint32 or uint64 arrays of one value per wave.

Semantics: AMD Instinct MI300 ISA guide, chapters SOP1, SOP2 and SOPC. Operand widths are those of the instruction
tables, so a function sees uint64 exactly where the guide says .u64, and returns the width of its destination.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Compute = Callable[..., np.ndarray]

# Bitwise functions: the same on the two words of a 64-bit value as on the whole.
BITWISE: dict[str, Compute] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
# s_<name>_saveexec_b64: function of the source and of EXEC.
SAVEEXEC: dict[str, Compute] = BITWISE | {"andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}
# s_<name>_wrexec_b64: like saveexec, but the destination gets the new EXEC.
WREXEC: dict[str, Compute] = {"andn1": SAVEEXEC["andn1"], "andn2": SAVEEXEC["andn2"]}

COMPARE: dict[str, Compute] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}

_LOW = np.uint64(0xFFFFFFFF)
_MINUS_ONE = np.uint32(0xFFFFFFFF)


def signed(value: np.ndarray) -> np.ndarray:
    """The same bits as int32 or int64."""
    return np.ascontiguousarray(value).view(np.int64 if value.dtype == np.uint64 else np.int32)


def wide(value: np.ndarray) -> np.ndarray:
    """uint32 as its signed value in int64."""
    return signed(value).astype(np.int64)


def _bits(value: np.ndarray) -> np.ndarray:
    """[W] -> uint8 [W, 32 or 64], one element per bit, bit 0 first."""
    octets = np.ascontiguousarray(value)[:, None].view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little")


def _from_bits(bits: np.ndarray, dtype) -> np.ndarray:
    return np.packbits(np.ascontiguousarray(bits), axis=-1, bitorder="little").view(dtype)[:, 0]


def _reverse(value: np.ndarray) -> np.ndarray:
    return _from_bits(_bits(value)[:, ::-1], value.dtype)


def _count_ones(value: np.ndarray) -> np.ndarray:
    return np.bitwise_count(value).astype(np.uint32)


def _lowest_one(value: np.ndarray) -> np.ndarray:
    """Index of the lowest set bit, or -1."""
    below = ~value & (value - value.dtype.type(1))
    return np.where(value == 0, _MINUS_ONE, np.bitwise_count(below).astype(np.uint32))


def _leading_zeros(value: np.ndarray) -> np.ndarray:
    """Zeros above the highest set bit, or -1 if there is none."""
    width = value.dtype.itemsize * 8
    filled = value
    for step in (1, 2, 4, 8, 16, 32):
        if step < width:
            filled = filled | filled >> value.dtype.type(step)
    return np.where(value == 0, _MINUS_ONE, np.uint32(width) - np.bitwise_count(filled).astype(np.uint32))


def _sign_run(value: np.ndarray) -> np.ndarray:
    """How many bits from the top are equal to the sign, or -1 if all are."""
    width = value.dtype.itemsize * 8
    return _leading_zeros(value ^ (signed(value) >> (width - 1)).view(value.dtype))


def _quad_any(value: np.ndarray) -> np.ndarray:
    """bool [W, 8 or 16]: whether any bit of each group of four is set."""
    return _bits(value).reshape(len(value), -1, 4).any(-1)


def _quad_mask(value: np.ndarray) -> np.ndarray:
    quads = _quad_any(value)
    bits = np.zeros((len(value), value.dtype.itemsize * 8), np.uint8)
    bits[:, : quads.shape[1]] = quads
    return _from_bits(bits, value.dtype)


def _absolute(value: np.ndarray) -> np.ndarray:
    """|value| in 32 bits: the most negative number stays what it is."""
    return np.abs(wide(value)).astype(np.uint32)


def _sign_extend(value: np.ndarray, bits: int) -> np.ndarray:
    up = 32 - bits
    return (signed(value << np.uint32(up)) >> up).view(np.uint32)


# mnemonic -> (function of the source, SCC = result is not zero)
UNARY: dict[str, tuple[Compute, bool]] = {
    "s_brev_b32": (_reverse, False),
    "s_brev_b64": (_reverse, False),
    "s_bcnt0_i32_b32": (lambda a: _count_ones(~a), True),
    "s_bcnt0_i32_b64": (lambda a: _count_ones(~a), True),
    "s_bcnt1_i32_b32": (_count_ones, True),
    "s_bcnt1_i32_b64": (_count_ones, True),
    "s_ff0_i32_b32": (lambda a: _lowest_one(~a), False),
    "s_ff0_i32_b64": (lambda a: _lowest_one(~a), False),
    "s_ff1_i32_b32": (_lowest_one, False),
    "s_ff1_i32_b64": (_lowest_one, False),
    "s_flbit_i32_b32": (_leading_zeros, False),
    "s_flbit_i32_b64": (_leading_zeros, False),
    "s_flbit_i32": (_sign_run, False),
    "s_flbit_i32_i64": (_sign_run, False),
    "s_sext_i32_i8": (lambda a: _sign_extend(a, 8), False),
    "s_sext_i32_i16": (lambda a: _sign_extend(a, 16), False),
    "s_abs_i32": (_absolute, True),
    "s_wqm_b32": (lambda a: _from_bits(_quad_any(a).repeat(4, axis=1), np.uint32), True),
    "s_wqm_b64": (lambda a: _from_bits(_quad_any(a).repeat(4, axis=1), np.uint64), True),
    "s_quadmask_b32": (_quad_mask, True),
    "s_quadmask_b64": (_quad_mask, True),
    "s_bitreplicate_b64_b32": (lambda a: _from_bits(_bits(a).repeat(2, axis=1), np.uint64), False),
}


def _shift(value: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """The low 5 (or, for 64-bit values, 6) bits of a shift count, in the dtype of `value`."""
    return (amount & np.uint32(value.dtype.itemsize * 8 - 1)).astype(value.dtype)


def _arithmetic_shift(value: np.ndarray, amount: np.ndarray) -> np.ndarray:
    count = _shift(value, amount)
    return (signed(value) >> signed(count)).view(value.dtype)


def _mask32(count: np.ndarray, offset: np.ndarray) -> np.ndarray:
    five = np.uint32(31)
    return ((np.uint32(1) << (count & five)) - np.uint32(1)) << (offset & five)


def _mask64(count: np.ndarray, offset: np.ndarray) -> np.ndarray:
    one, six = np.uint64(1), np.uint32(63)
    return ((one << (count & six).astype(np.uint64)) - one) << (offset & six).astype(np.uint64)


def _field(value: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(offset, size) of a bit field: bits 4..0 (5..0) and 22..16 of `where`, the size at most the width. int64."""
    width = value.dtype.itemsize * 8
    offset = (where & np.uint32(width - 1)).astype(np.int64)
    return offset, np.minimum((where >> np.uint32(16)) & np.uint32(0x7F), np.uint32(width)).astype(np.int64)


def _extract_unsigned(value: np.ndarray, where: np.ndarray) -> np.ndarray:
    offset, size = _field(value, where)
    shifted = value.astype(np.uint64) >> offset.astype(np.uint64)
    mask = np.where(size == 64, ~np.uint64(0), (np.uint64(1) << (size & 63).astype(np.uint64)) - np.uint64(1))
    return (shifted & mask).astype(value.dtype)


def _extract_signed(value: np.ndarray, where: np.ndarray) -> np.ndarray:
    offset, size = _field(value, where)
    shifted = signed(value).astype(np.int64) >> offset
    up = (64 - size) & 63
    return np.where(size == 0, 0, (shifted << up) >> up).astype(value.dtype)


# mnemonic -> (function of both sources, SCC = result is not zero)
BINARY: dict[str, tuple[Compute, bool]] = {
    "s_lshl_b32": (lambda a, b: a << _shift(a, b), True),
    "s_lshl_b64": (lambda a, b: a << _shift(a, b), True),
    "s_lshr_b32": (lambda a, b: a >> _shift(a, b), True),
    "s_lshr_b64": (lambda a, b: a >> _shift(a, b), True),
    "s_ashr_i32": (_arithmetic_shift, True),
    "s_ashr_i64": (_arithmetic_shift, True),
    "s_bfm_b32": (_mask32, False),
    "s_bfm_b64": (_mask64, False),
    "s_mul_i32": (lambda a, b: a * b, False),
    "s_mul_hi_u32": (lambda a, b: a.astype(np.uint64) * b >> np.uint64(32), False),
    "s_mul_hi_i32": (lambda a, b: wide(a) * wide(b) >> 32, False),
    "s_bfe_u32": (_extract_unsigned, True),
    "s_bfe_u64": (_extract_unsigned, True),
    "s_bfe_i32": (_extract_signed, True),
    "s_bfe_i64": (_extract_signed, True),
    # The difference wraps before its sign is looked at.
    "s_absdiff_i32": (lambda a, b: _absolute(a - b), True),
    "s_pack_ll_b32_b16": (lambda a, b: a & np.uint32(0xFFFF) | b << np.uint32(16), False),
    "s_pack_lh_b32_b16": (lambda a, b: a & np.uint32(0xFFFF) | b & np.uint32(0xFFFF0000), False),
    "s_pack_hh_b32_b16": (lambda a, b: a >> np.uint32(16) | b & np.uint32(0xFFFF0000), False),
}


def _add(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = a + b
    return total, total < a


def _add_with_carry(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = a.astype(np.uint64) + b + scc
    return total & _LOW, total >> np.uint64(32)


def _subtract_with_borrow(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return a - b - scc, b.astype(np.uint64) + scc > a


def add_signed(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum, and whether it overflowed as a signed number: both signs differ from the result's."""
    total = a + b
    return total, ((a ^ total) & (b ^ total)) >> np.uint32(31)


def _subtract_signed(a: np.ndarray, b: np.ndarray, scc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    difference = a - b
    return difference, ((a ^ b) & (a ^ difference)) >> np.uint32(31)


def _choose(first: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.where(first, a, b), first


def _shift_and_add(bits: int) -> Compute:
    def compute(a, b, scc):
        total = (a.astype(np.uint64) << np.uint64(bits)) + b
        return total & _LOW, total > _LOW

    return compute


# mnemonic -> function of both sources and SCC that gives (result, new SCC)
WITH_SCC: dict[str, Compute] = {
    "s_add_u32": _add,
    "s_addc_u32": _add_with_carry,
    "s_sub_u32": lambda a, b, scc: (a - b, b > a),
    "s_subb_u32": _subtract_with_borrow,
    "s_add_i32": add_signed,
    "s_sub_i32": _subtract_signed,
    "s_min_i32": lambda a, b, scc: _choose(signed(a) < signed(b), a, b),
    "s_min_u32": lambda a, b, scc: _choose(a < b, a, b),
    "s_max_i32": lambda a, b, scc: _choose(signed(a) >= signed(b), a, b),
    "s_max_u32": lambda a, b, scc: _choose(a >= b, a, b),
    **{f"s_lshl{bits}_add_u32": _shift_and_add(bits) for bits in (1, 2, 3, 4)},
}
