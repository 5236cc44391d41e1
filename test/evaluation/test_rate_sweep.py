"""The rate search: right on curves that behave, bounded and honest on those that do not."""

from __future__ import annotations

import math
import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash_rocm.evaluation.sweep import LEAST_REQUESTS, Search, find_rate, requests_for

LOWEST, HIGHEST, TARGET = 0.125, 64.0, 1000.0


def search(**changes) -> Search:
    wanted = {"target_ms": TARGET, "start": 1.0, "lowest": LOWEST, "highest": HIGHEST, "tolerance": 0.05, "repeats": 3}
    return Search(**{**wanted, **changes})


@given(
    threshold=st.floats(LOWEST * 1.001, HIGHEST * 0.999),
    steepness=st.floats(0.05, 8),
    start=st.floats(LOWEST, HIGHEST),
    tolerance=st.floats(0.005, 0.5),
)
@settings(deadline=None, max_examples=60)
def test_on_a_rising_curve_the_threshold_is_bracketed_within_the_tolerance(threshold, steepness, start, tolerance):
    found = find_rate(
        search(start=start, tolerance=tolerance), lambda rate, repeat: TARGET * (rate / threshold) ** steepness
    )
    assert found.stopped == "converged" and not found.flagged
    assert found.rate <= threshold * (1 + 1e-9) and found.failing >= threshold * (1 - 1e-9)
    assert found.failing / found.rate - 1 <= tolerance


@given(
    threshold=st.floats(LOWEST, HIGHEST),
    noise=st.floats(0, 0.9),
    seed=st.integers(0, 1000),
    tolerance=st.floats(0.01, 0.5),
    repeats=st.integers(1, 5),
)
@settings(deadline=None, max_examples=60)
def test_noise_neither_runs_on_nor_yields_a_rate_above_a_missing_one(threshold, noise, seed, tolerance, repeats):
    calls, dice = count(1), random.Random(seed)
    wanted = search(tolerance=tolerance, repeats=repeats, most_measurements=10_000)

    def measure(rate, repeat):
        next(calls)
        return TARGET * (rate / threshold) * dice.uniform(1 - noise, 1 + noise)

    found = find_rate(wanted, measure)
    # Neighbours are a factor sqrt(1 + tolerance) apart, or the bracket would have been narrow enough.
    rates = math.log(HIGHEST / LOWEST) / math.log(math.sqrt(1 + tolerance)) + 2
    assert next(calls) - 1 <= repeats * rates
    assert all(len(values) <= repeats for values in found.points.values())
    if found.rate is not None and found.failing is not None:
        assert found.rate < found.failing


def test_the_ends_of_the_range_are_answers_and_say_so():
    below = find_rate(search(), lambda rate, repeat: TARGET * 3)
    assert (below.rate, below.failing, below.stopped) == (None, LOWEST, "lowest rate misses the target")
    above = find_rate(search(), lambda rate, repeat: TARGET / 3)
    assert (above.rate, above.failing, above.stopped) == (HIGHEST, None, "highest rate keeps the target")
    assert sorted(above.points) == [1, 2, 4, 8, 16, 32, 64]


def test_values_far_from_the_target_are_measured_once_and_near_ones_by_the_median():
    values = {1.0: iter([TARGET * 1.1, TARGET * 0.8, TARGET * 0.7])}
    found = find_rate(search(), lambda rate, repeat: next(values[rate]) if rate in values else TARGET * rate)
    assert len(found.points[1.0]) == 3, "one value within 15 % of the target decided"
    assert found.points[2.0] == [TARGET * 2]
    assert found.rate >= 1.0, "the first value of three decided, not the median"


def test_a_lower_rate_that_misses_by_more_is_measured_again_and_then_believed_or_flagged():
    """8 misses with 3000 ms, 4 with 5000 ms: one of them is wrong. Here it is the first try at 4."""
    tries = {4.0: iter([5000.0, 800.0, 800.0])}

    def measure(rate, repeat):
        return next(tries[rate]) if rate in tries else 375.0 * rate

    found = find_rate(search(start=8.0), measure)
    assert len(found.points[4.0]) == len(found.points[8.0]) == 3
    assert found.flagged == () and found.rate >= 4.0

    stubborn = find_rate(search(start=8.0), lambda rate, repeat: 5000.0 if rate == 4.0 else 375.0 * rate)
    assert (4.0, 8.0) in stubborn.flagged
    assert stubborn.rate < 4.0, "a rate above one that always misses is no answer"


def test_the_number_of_measurements_is_limited():
    found = find_rate(search(most_measurements=4), lambda rate, repeat: 10.0 * rate)
    assert found.stopped == "too many measurements"
    assert sum(map(len, found.points.values())) == 4 and found.rate == 8.0


@pytest.mark.parametrize("rate, duration, expected", [(2.0, 60, 120), (0.3, 10, LEAST_REQUESTS), (1.01, 100, 101)])
def test_every_rate_is_measured_for_the_same_time(rate, duration, expected):
    assert requests_for(rate, duration) == expected
