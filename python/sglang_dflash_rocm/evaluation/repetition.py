"""Loops in an answer: the same tokens again and again, which raises accept length and speed and is worth nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MAX_PERIOD = 64
"""Longest block looked for, in tokens. A longer one ends as a truncated answer, which is counted elsewhere."""
MIN_REPEATED = 20
"""Tokens that must repeat what stands before them."""


class Loop(msgspec.Struct, frozen=True):
    """A block of `period` tokens, first seen at token `start`, that the `repeated` tokens after it go on repeating."""

    start: int
    period: int
    repeated: int


def find_loop(tokens: Sequence[int]) -> Loop | None:
    """The longest loop, or None.

    A loop is a block of 1 to `MAX_PERIOD` tokens that stands at least three times in a row, where what follows its
    first occurrence is `MIN_REPEATED` tokens or more. A sentence said twice is none, nor is a short row of dashes.
    """
    longest: Loop | None = None
    for period in range(1, min(MAX_PERIOD, len(tokens) // 3) + 1):
        needed = max(MIN_REPEATED, 2 * period)
        run = 0
        for position in range(period, len(tokens)):
            run = run + 1 if tokens[position] == tokens[position - period] else 0
            if run >= needed and (longest is None or run > longest.repeated):
                longest = Loop(start=position - run - period + 1, period=period, repeated=run)
    return longest
