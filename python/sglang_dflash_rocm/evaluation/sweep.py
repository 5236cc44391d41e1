"""The highest request rate that keeps a target, found with few and noisy measurements. Pure: measuring is a callback.

What is searched is not a property of the server alone. Below its capacity, time to first token settles and does not
depend on how long one measures; above it the queue grows as long as requests arrive, so that the figure grows with the
length of the run. Every rate is therefore measured for the same time (``requests_for``: rate times duration), and the
answer is "the target is kept for that long".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Stopped = Literal[
    "converged", "highest rate keeps the target", "lowest rate misses the target", "too many measurements"
]

#: Requests of the shortest measurement: percentiles of fewer say nothing.
LEAST_REQUESTS = 16
#: A value this close to the target, relative, could fall on either side: measure again.
NEAR = 0.15


@dataclass(frozen=True)
class Search:
    """What is looked for. Rates in requests per second, target in ms; ``tolerance`` is the relative width of the
    bracket at which the search ends, ``repeats`` the number of measurements of a doubtful rate."""

    target_ms: float
    start: float
    lowest: float
    highest: float
    tolerance: float
    repeats: int
    most_measurements: int = 100


@dataclass(frozen=True)
class Found:
    """``rate``: highest that keeps the target with every measured lower rate, None if none does. ``failing``: lowest
    that misses it. ``flagged``: (lower, higher) rates where the lower one misses the target by more than the higher one
    does, by the medians of all repeats too."""

    rate: float | None
    failing: float | None
    stopped: Stopped
    points: dict[float, list[float]]
    flagged: tuple[tuple[float, float], ...]


def requests_for(rate: float, duration_s: float) -> int:
    """Requests of a measurement that lasts ``duration_s`` at ``rate``."""
    return max(LEAST_REQUESTS, math.ceil(rate * duration_s))


def find_rate(search: Search, measure: Callable[[float, int], float]) -> Found:
    """Double or halve until one rate keeps the target and one misses it, then bisect (geometrically).

    ``measure(rate, repeat)`` gives a time to first token in ms. At most ``most_measurements`` calls.
    """
    state = _State(search, measure)
    step: float | Stopped = search.start
    try:
        while not isinstance(step, str):
            state.judge(step)
            step = state.next_step()
    except _Enough:
        step = "too many measurements"
    return Found(state.keeping(), state.failing(), step, state.points, state.crossings())


class _Enough(Exception):
    """The measurements are used up."""


@dataclass
class _State:
    search: Search
    measure: Callable[[float, int], float]
    points: dict[float, list[float]] = field(default_factory=dict)

    def judge(self, rate: float) -> None:
        """Measure a new rate; again where one value does not decide, and where it contradicts a lower rate."""
        self._sample(rate)
        if abs(self.points[rate][0] / self.search.target_ms - 1) <= NEAR:
            self._repeat(rate)
        for pair in self.crossings():
            for contradicting in pair:
                self._repeat(contradicting)

    def value(self, rate: float) -> float:
        return median(self.points[rate])

    def keeps(self, rate: float) -> bool:
        return self.value(rate) <= self.search.target_ms

    def failing(self) -> float | None:
        """The lowest rate that misses the target: what a higher one did above it is luck."""
        return min((rate for rate in self.points if not self.keeps(rate)), default=None)

    def keeping(self) -> float | None:
        failing = self.failing()
        return max((rate for rate in self.points if failing is None or rate < failing), default=None)

    def crossings(self) -> tuple[tuple[float, float], ...]:
        """Pairs of a missing rate and a higher one that did better."""
        missing = [rate for rate in sorted(self.points) if not self.keeps(rate)]
        return tuple(
            (low, high)
            for low in missing
            for high in sorted(self.points)
            if high > low and self.value(high) < self.value(low)
        )

    def next_step(self) -> float | Stopped:
        """A rate that was not measured yet, or why the search ends."""
        search, keeping, failing = self.search, self.keeping(), self.failing()
        if failing is None:
            return "highest rate keeps the target" if keeping >= search.highest else min(keeping * 2, search.highest)
        if keeping is None:
            return "lowest rate misses the target" if failing <= search.lowest else max(failing / 2, search.lowest)
        return "converged" if failing / keeping - 1 <= search.tolerance else math.sqrt(keeping * failing)

    def _repeat(self, rate: float) -> None:
        while len(self.points[rate]) < self.search.repeats:
            self._sample(rate)

    def _sample(self, rate: float) -> None:
        if sum(map(len, self.points.values())) >= self.search.most_measurements:
            raise _Enough
        value = self.measure(rate, len(self.points.get(rate, ())))
        self.points.setdefault(rate, []).append(value)
