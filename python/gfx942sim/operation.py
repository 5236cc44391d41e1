"""The entries of the vector instruction tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Operation(NamedTuple):
    """What one mnemonic computes.

    function: takes one array per source, typed as `modifiers` says, and returns the result's array. Broadcasts.
    result: a type; with "+mask" behind it the function also returns the lanes whose bit of the carry output is set.
    sources: types, in the order of the encoding's sources. "D:type" is the old destination, "K:type" the literal.
    saturates: the CLAMP bit saturates the integer result. The function then gets int64 and must compute exactly.
    largest: with MODE.FP16_OVFL, finite operands are clipped to this size before the conversion. 0: they are not.
    preserves_high: a 16-bit result leaves bits 16..31 of the register as they were.
    """

    function: Callable[..., Any]
    result: str
    sources: tuple[str, ...]
    saturates: bool = False
    preserves_high: bool = False
    largest: float = 0.0


def table(
    signature: str, functions: Mapping[str, Callable[..., Any]], saturates: bool = False, preserves_high: bool = False
) -> dict[str, Operation]:
    """Operations of one signature, written "result: source source"."""
    result, sources = signature.split(": ")
    return {
        name: Operation(function, result, tuple(sources.split()), saturates, preserves_high)
        for name, function in functions.items()
    }


def reverse(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The instruction with "rev" in its name."""
    return lambda a, b, *rest: function(b, a, *rest)
