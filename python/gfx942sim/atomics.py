"""Atomic operations of LDS, global and buffer instructions.

Lanes that hit one address come one after another, in ascending order of wave and lane. A float addition rounds to
nearest even and keeps denormals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .access import Place
from .errors import SimulationError


class Operation(NamedTuple):
    """One atomic operation.

    dtype: how memory and data are seen. apply: (old, data) or (old, data, second) -> new, on arrays of that dtype.
    operands: how many. in_place: a ufunc that does the same, if there is one.
    """

    dtype: type
    apply: Callable[..., np.ndarray]
    operands: int = 1
    in_place: np.ufunc | None = None

    @property
    def size(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def words(self) -> int:
        return self.size // 4


def _increment(old: np.ndarray, data: np.ndarray) -> np.ndarray:
    return np.where(old >= data, 0, old + 1).astype(old.dtype)


def _decrement(old: np.ndarray, data: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > data), data, old - 1).astype(old.dtype)


def _smaller(old: np.ndarray, data: np.ndarray) -> np.ndarray:
    return np.where(data < old, data, old)


def _larger(old: np.ndarray, data: np.ndarray) -> np.ndarray:
    return np.where(data > old, data, old)


def _add_f16_pairs(old: np.ndarray, data: np.ndarray) -> np.ndarray:
    return (old.view(np.float16) + data.view(np.float16)).view(np.uint32)


def _add_bf16_pairs(old: np.ndarray, data: np.ndarray) -> np.ndarray:
    def wide(pairs: np.ndarray) -> np.ndarray:
        return (pairs.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)

    # A float32 has more than twice the digits of a bfloat16, so rounding twice is rounding once. A NaN has no digits in
    # its low half, as both operands have none, so that rounding keeps it.
    bits = (wide(old) + wide(data)).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16).view(np.uint32)


def _integers(bits: int) -> dict[str, Operation]:
    unsigned, signed = (np.uint32, np.int32) if bits == 32 else (np.uint64, np.int64)
    return {
        "add": Operation(unsigned, np.add, in_place=np.add),
        "sub": Operation(unsigned, np.subtract, in_place=np.subtract),
        "rsub": Operation(unsigned, lambda old, data: data - old),
        "inc": Operation(unsigned, _increment),
        "dec": Operation(unsigned, _decrement),
        "smin": Operation(signed, np.minimum, in_place=np.minimum),
        "smax": Operation(signed, np.maximum, in_place=np.maximum),
        "umin": Operation(unsigned, np.minimum, in_place=np.minimum),
        "umax": Operation(unsigned, np.maximum, in_place=np.maximum),
        "and": Operation(unsigned, np.bitwise_and, in_place=np.bitwise_and),
        "or": Operation(unsigned, np.bitwise_or, in_place=np.bitwise_or),
        "xor": Operation(unsigned, np.bitwise_xor, in_place=np.bitwise_xor),
        "mskor": Operation(unsigned, lambda old, mask, bits: old & ~mask | bits, 2),
        "swap": Operation(unsigned, lambda old, data: data),
        # LDS: the compared value comes first; FLAT and MUBUF: the new value comes first.
        "cmpst": Operation(unsigned, lambda old, compared, new: np.where(old == compared, new, old), 2),
        "cmpswap": Operation(unsigned, lambda old, new, compared: np.where(old == compared, new, old), 2),
        "wrap": Operation(unsigned, lambda old, data, top: np.where(old >= data, old - data, old + top), 2),
    }


def _floats(dtype: type) -> dict[str, Operation]:
    return {
        "add": Operation(dtype, np.add, in_place=np.add),
        "min": Operation(dtype, _smaller),
        "max": Operation(dtype, _larger),
        "cmpst": Operation(dtype, lambda old, compared, new: np.where(old == compared, new, old), 2),
    }


_INT32, _INT64, _F32, _F64 = _integers(32), _integers(64), _floats(np.float32), _floats(np.float64)
_PAIRS = {"pk_add_f16": Operation(np.uint32, _add_f16_pairs), "pk_add_bf16": Operation(np.uint32, _add_bf16_pairs)}

# The name after `_atomic_` of FLAT, GLOBAL and MUBUF instructions.
_VMEM_INTEGERS = (
    ("swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax") + ("and", "or", "xor", "inc", "dec")
)  # fmt: skip
VMEM: dict[str, Operation] = {
    **{name: _INT32[name] for name in _VMEM_INTEGERS},
    **{f"{name}_x2": _INT64[name] for name in _VMEM_INTEGERS},
    **_PAIRS,
    "add_f32": _F32["add"],
    "add_f64": _F64["add"],
    "min_f64": _F64["min"],
    "max_f64": _F64["max"],
}

# (operation, type) of LDS instructions: ds_<operation>[_rtn]_<type>.
_LDS_NAMES = {
    **{(name, "u"): name for name in ("add", "sub", "rsub", "inc", "dec")},
    **{(name, "b"): name for name in ("and", "or", "xor", "mskor", "cmpst")},
    ("min", "i"): "smin",
    ("max", "i"): "smax",
    ("min", "u"): "umin",
    ("max", "u"): "umax",
    ("wrxchg", "b"): "swap",
}
_LDS_OPERATIONS: dict[tuple[str, str], Operation] = {
    **{(name, f"{kind}32"): _INT32[key] for (name, kind), key in _LDS_NAMES.items()},
    **{(name, f"{kind}64"): _INT64[key] for (name, kind), key in _LDS_NAMES.items()},
    **{(name, "f32"): operation for name, operation in _F32.items()},
    **{(name, "f64"): operation for name, operation in _F64.items()},
    ("wrap", "b32"): _INT32["wrap"],
    ("pk_add", "f16"): _PAIRS["pk_add_f16"],
    ("pk_add", "bf16"): _PAIRS["pk_add_bf16"],
}
# Mnemonic -> (operation, whether it returns the old value).
LDS: dict[str, tuple[Operation, bool]] = {
    **{f"ds_{name}_{kind}": (operation, False) for (name, kind), operation in _LDS_OPERATIONS.items()},
    **{f"ds_{name}_rtn_{kind}": (operation, True) for (name, kind), operation in _LDS_OPERATIONS.items()},
}


def join_words(words: list[np.ndarray], dtype: type) -> np.ndarray:
    """One or two uint32 [n] arrays (low word first) as one array of `dtype` [n]."""
    return np.stack(words, -1).view(dtype)[..., 0]


def require_aligned(place: Place, size: int) -> None:
    """Raise SimulationError unless all addresses are multiples of `size`: the hardware reports a memory fault."""
    if place.low_bits & (size - 1):
        raise SimulationError(f"{size}-byte atomic at an address that is not a multiple of {size}")


def run(place: Place, operation: Operation, registers: list[list[np.ndarray]], wants_old: bool) -> list[np.ndarray]:
    """Do one atomic instruction.

    Args:
        registers: for each operand its words, uint32 [waves, 64], low word first.
        wants_old: whether the old values are needed.

    Returns:
        The old values as words, uint32 [waves, 64]; lanes that take no part hold 0. Empty unless wanted.

    Raises:
        SimulationError: an address is not a multiple of the size.
    """
    require_aligned(place, operation.size)
    at, shape = place.at.reshape(-1), place.at.shape
    words = [[word.reshape(-1) for word in operand] for operand in registers]
    chosen = None
    if place.lanes is not None:
        chosen = np.flatnonzero(place.lanes)
        at, words = at.take(chosen), [[word.take(chosen) for word in operand] for operand in words]
    data = [join_words(operand, operation.dtype) for operand in words]
    memory = place.view(operation.dtype)
    old = _update(memory, at >> (operation.size.bit_length() - 1), operation, data, wants_old)
    if old is None:
        return []
    parts = np.ascontiguousarray(old).view(np.uint32).reshape(-1, operation.words)
    if chosen is None:
        return [parts[:, i].reshape(shape) for i in range(operation.words)]
    spread = np.zeros((operation.words, place.at.size), np.uint32)
    spread[:, chosen] = parts.T
    return list(spread.reshape(operation.words, *shape))


def _update(
    memory: np.ndarray, index: np.ndarray, operation: Operation, data: list[np.ndarray], wants_old: bool
) -> np.ndarray | None:
    """Apply the operation at memory[index], in order. index: int64 [n]; data: [n] each. Returns the old values."""
    if operation.in_place is not None and not wants_old:
        operation.in_place.at(memory, index, data[0])
        return None
    places, which = (index, None) if (index[1:] > index[:-1]).all() else np.unique(index, return_inverse=True)
    if len(places) == len(index):
        old = memory.take(index)
        memory[index] = operation.apply(old, *data)
        return old
    current, old = memory.take(places), np.empty(len(index), operation.dtype)
    for turn in _turns(which):
        slot = which[turn]
        old[turn] = current[slot]
        current[slot] = operation.apply(old[turn], *(operand[turn] for operand in data))
    memory[places] = current
    return old


def _turns(which: np.ndarray) -> list[np.ndarray]:
    """Split 0..n-1 into steps: the k-th step has the k-th element of every group of equal values."""
    order = np.argsort(which, kind="stable")
    grouped = which[order]
    first = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    rank = np.arange(len(order)) - np.repeat(first, np.diff(np.r_[first, len(order)]))
    by_rank = np.argsort(rank, kind="stable")
    return np.split(order[by_rank], np.flatnonzero(np.diff(rank[by_rank])) + 1)
