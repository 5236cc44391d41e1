"""Vector compares: VOPC, its VOP3 and SDWA forms, and the v_cmpx variants, which also set EXEC."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from .code_object import Descriptor
from .decode import Instruction
from .errors import UnknownInstruction
from .modifiers import Encoding
from .state import EXEC, VCC, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

_NAME = re.compile(r"v_cmp(x?)_(\w+)_([fiu]\d\d)")

_INTEGER = {
    "f": lambda a, b: np.zeros((1, 1), bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "t": lambda a, b: np.ones((1, 1), bool),
}

# The negated ones are true for a NaN; "lg" is false for it, as all the plain ones.
_FLOAT = {
    **{name: _INTEGER[name] for name in ("f", "lt", "eq", "le", "gt", "ge")},
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "tru": _INTEGER["t"],
}


def _float_class(bits: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """v_cmp_class: the bit of `wanted` that belongs to what kind of number the bits are."""
    width = 8 * bits.dtype.itemsize
    fraction_bits = {16: 10, 32: 23, 64: 52}[width]
    exponent = bits >> fraction_bits & ((1 << (width - 1 - fraction_bits)) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    negative = bits >> (width - 1) != 0
    all_ones = exponent == (1 << (width - 1 - fraction_bits)) - 1
    quiet = fraction >> (fraction_bits - 1) != 0
    kind = np.select(
        [all_ones & (fraction != 0) & ~quiet, all_ones & (fraction != 0), all_ones, exponent != 0, fraction != 0],
        [0, 1, np.where(negative, 2, 9), np.where(negative, 3, 8), np.where(negative, 4, 7)],
        np.where(negative, 5, 6),
    )
    return wanted >> kind.astype(np.uint32) & 1 != 0


def mnemonics() -> list[str]:
    """All that are implemented."""
    names = []
    for x in ("", "x"):
        names += [f"v_cmp{x}_{name}_f{bits}" for name in [*_FLOAT, "class"] for bits in (16, 32, 64)]
        names += [f"v_cmp{x}_{name}_{sign}{bits}" for name in _INTEGER for sign in "iu" for bits in (16, 32, 64)]
    return names


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """v_cmp and v_cmpx. Raises UnknownInstruction for a name or modifier that is not known."""
    match = _NAME.fullmatch(instruction.mnemonic)
    if match is None:
        raise UnknownInstruction(f"{instruction.mnemonic} is not implemented")
    sets_exec, name, kind = match.groups()
    encoding = Encoding(instruction, descriptor)
    if encoding.clamp or encoding.omod or encoding.high_result:
        raise UnknownInstruction("output modifiers on a compare")
    if name == "class" and kind[0] == "f":
        function, kinds = _float_class, (f"b{kind[1:]}", "u32")
    else:
        table = _FLOAT if kind[0] == "f" else _INTEGER
        if name not in table:
            raise UnknownInstruction(f"{instruction.mnemonic} is not implemented")
        function, kinds = table[name], (kind, kind)
    left, right = (encoding.reader(k, i) for i, k in enumerate(kinds))
    target = _target(encoding)

    def compare(batch: Batch, waves: Selection) -> None:
        batch.write_lane_mask(waves, target, function(left(batch, waves), right(batch, waves)))

    def compare_and_set(batch: Batch, waves: Selection) -> None:
        lanes = function(left(batch, waves), right(batch, waves))
        batch.write_lane_mask(waves, target, lanes)
        if target != EXEC:
            batch.write_lane_mask(waves, EXEC, lanes)

    return compare_and_set if sets_exec else compare


def _target(encoding: Encoding) -> int:
    instruction = encoding.instruction
    if encoding.vop3:
        return instruction.field("vdst")
    if encoding.sdwa and instruction.field("sd"):
        return instruction.field("sdst")
    return VCC
