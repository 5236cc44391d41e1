"""Read-modify-write on global memory and LDS: lanes of one instruction take turns, in ascending order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .access import Memory
from .errors import UnknownInstruction

u16, u32, u64, i32, i64 = np.uint16, np.uint32, np.uint64, np.int32, np.int64

# function(old, data, second) -> new; all arrays of the operation's unsigned type
Operation = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]


def _signed(value: np.ndarray) -> np.ndarray:
    return value.view(i64 if value.dtype == u64 else i32)


def _increment(old, data, _):
    return np.where(old >= data, old.dtype.type(0), old + old.dtype.type(1))


def _decrement(old, data, _):
    return np.where((old == 0) | (old > data), data, old - old.dtype.type(1))


INTEGER: dict[str, Operation] = {
    "add": lambda old, data, _: old + data,
    "sub": lambda old, data, _: old - data,
    "rsub": lambda old, data, _: data - old,
    "inc": _increment,
    "dec": _decrement,
    "smin": lambda old, data, _: np.where(_signed(data) < _signed(old), data, old),
    "smax": lambda old, data, _: np.where(_signed(data) > _signed(old), data, old),
    "umin": lambda old, data, _: np.minimum(old, data),
    "umax": lambda old, data, _: np.maximum(old, data),
    "and": lambda old, data, _: old & data,
    "or": lambda old, data, _: old | data,
    "xor": lambda old, data, _: old ^ data,
    "mskor": lambda old, data, second: (old & ~data) | second,
    "swap": lambda old, data, _: data,
    # LDS order of operands: data is what is compared with, second what is written.
    "cmpst": lambda old, data, second: np.where(old == data, second, old),
}


def _float(function: Callable, bits: type, kind: type) -> Operation:
    def operation(old, data, second):
        a, b = old.view(kind), data.view(kind)
        return np.ascontiguousarray(function(a, b), kind).view(bits)

    return operation


def _bf16_sum(old: np.ndarray, data: np.ndarray) -> np.ndarray:
    """uint16 bf16 numbers added in f32 and rounded to nearest even."""
    exact = (old.astype(u32) << u32(16)).view(np.float32) + (data.astype(u32) << u32(16)).view(np.float32)
    bits = exact.view(u32)
    rounded = (bits + u32(0x7FFF) + (bits >> u32(16) & u32(1))) >> u32(16)
    return np.where(np.isnan(exact), u32(0x7FC0), rounded).astype(u16)


def _packed(add: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Operation:
    def operation(old, data, _):
        return np.ascontiguousarray(
            add(np.ascontiguousarray(old).view(u16), np.ascontiguousarray(data).view(u16))
        ).view(u32)

    return operation


def _f16_sum(old: np.ndarray, data: np.ndarray) -> np.ndarray:
    return (old.view(np.float16) + data.view(np.float16)).view(u16)


_FLOATS: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "min": lambda old, data: np.where(data < old, data, old),
    "max": lambda old, data: np.where(data > old, data, old),
}
# name -> (operation, dwords per operand)
FLOAT: dict[str, tuple[Operation, int]] = {
    **{f"{name}_f32": (_float(f, u32, np.float32), 1) for name, f in _FLOATS.items()},
    **{f"{name}_f64": (_float(f, u64, np.float64), 2) for name, f in _FLOATS.items()},
    "pk_add_f16": (_packed(_f16_sum), 1),
    "pk_add_bf16": (_packed(_bf16_sum), 1),
}


def _compare_floats(bits: type, kind: type) -> Operation:
    return lambda old, data, second: np.where(old.view(kind) == data.view(kind), second, old)


FLOAT["cmpst_f32"] = (_compare_floats(u32, np.float32), 1)
FLOAT["cmpst_f64"] = (_compare_floats(u64, np.float64), 2)


def global_operation(name: str) -> tuple[Operation, int, bool]:
    """(operation, dwords, has two operands) of what follows `atomic_` in a buffer, global or flat mnemonic.

    A compare-and-swap there has the new value first and the one to compare with second.
    """
    if name in FLOAT:
        return (*FLOAT[name], False)
    base, words = (name.removesuffix("_x2"), 2) if name.endswith("_x2") else (name, 1)
    if base == "cmpswap":
        return (lambda old, data, second: np.where(old == second, data, old)), words, True
    if base in INTEGER and base not in ("rsub", "mskor", "cmpst"):
        return INTEGER[base], words, False
    raise UnknownInstruction(f"atomic {name} is not implemented")


def perform(
    memory: Memory,
    at: np.ndarray,
    active: np.ndarray,
    operation: Operation,
    data: np.ndarray,
    second: np.ndarray | None,
) -> np.ndarray:
    """Do the operation for each active lane, in ascending order of (wave, lane); returns what was there before.

    Args:
        at: byte offsets, aligned to the operand. data, second: uint32 or uint64, shape of `at`.
    """
    wide = data.dtype == u64
    cells, shift = (memory.pairs, 3) if wide else (memory.words, 2)
    low = int(np.bitwise_or.reduce(at[active])) if active.any() else 0
    if low & ((1 << shift) - 1):
        raise UnknownInstruction(f"atomic on an address that is not a multiple of {1 << shift}")
    before = np.zeros(at.shape, data.dtype)
    where = at[active] >> shift
    operand = data[active]
    other = None if second is None else second[active]
    returned = np.zeros(where.shape, data.dtype)
    for turn in _turns(where):
        old = cells[where[turn]]
        returned[turn] = old
        cells[where[turn]] = operation(old, operand[turn], None if other is None else other[turn])
    before[active] = returned
    return before


def _turns(where: np.ndarray) -> list[np.ndarray]:
    """Groups of positions without a repeated place: the first lane of each place, then the second, and so on."""
    if len(np.unique(where)) == len(where):
        return [np.arange(len(where))]
    order = np.argsort(where, kind="stable")
    ordered = where[order]
    starts = np.r_[True, ordered[1:] != ordered[:-1]]
    first = np.maximum.accumulate(np.where(starts, np.arange(len(where)), 0))
    turn = np.arange(len(where)) - first
    return [order[turn == t] for t in range(int(turn.max()) + 1)]
