"""Accept length by rank, loops, and the verdicts over them: figures in, reasons out."""

from __future__ import annotations

import random

import msgspec
import pytest

from sglang_dflash_rocm.evaluation.acceptance import RequestFigures, looks_simulated, request_figures, summarise
from sglang_dflash_rocm.evaluation.gates import Figures, Thresholds, judge
from sglang_dflash_rocm.evaluation.repetition import MAX_PERIOD, Loop, find_loop

WANTED = Thresholds(min_accuracy=0.97, min_accept_length=4.0)
SPREAD = (10, 0, 20, 40, 10)


def request(rank: int | None, steps: int, kept: int, tokens: int = 100, histogram=SPREAD) -> RequestFigures:
    return RequestFigures(
        dp_rank=rank, completion_tokens=tokens, verify_steps=steps, accepted_drafts=kept, accepted_histogram=histogram
    )


def figures(requests=None, dp_ranks: int = 2, **changes) -> Figures:
    requests = [request(0, 10, 50), request(1, 10, 40)] if requests is None else requests
    good = Figures(
        asked=1319,
        scored=1319,
        correct=1287,
        evalscope_score=round(1287 / 1319, 4),
        without_figures=(),
        truncated=(),
        looped=(),
        acceptance=summarise(requests, dp_ranks),
    )
    return msgspec.structs.replace(good, **changes)


def failed(case: Figures, wanted: Thresholds = WANTED) -> dict[str, str]:
    return {gate.name: gate.reason for gate in judge(case, wanted) if not gate.passed}


def test_a_good_run_passes_every_gate():
    assert failed(figures()) == {}
    assert len(judge(figures(), WANTED)) == 6


def test_a_busy_and_an_idle_rank_weigh_the_same_in_the_mean_and_not_in_the_sum():
    got = summarise([request(0, 10, 10), request(0, 80, 80), request(1, 10, 50)], 2)
    assert [rank.accept_length for rank in got.ranks] == [2.0, 6.0]
    assert (got.mean_worker_accept_length, got.min_worker_accept_length) == (4.0, 2.0)
    assert got.accept_length == pytest.approx((90 + 90 + 10 + 50) / 100)
    assert [rank.requests for rank in got.ranks] == [2, 1]


def test_the_accept_gate_looks_at_the_mean_of_the_workers():
    """Over all it would be 5.6; the mean of the two ranks is 3.9."""
    uneven = figures([request(0, 90, 490), request(1, 10, 4)])
    assert uneven.acceptance.accept_length > 5 and uneven.acceptance.min_worker_accept_length == 1.4
    assert "3.92 < 4 (minimum 1.40" in failed(uneven)["mean accept length of the DP ranks"]


def test_a_rank_without_accept_data_is_named():
    silent = figures([request(0, 10, 50), request(1, 0, 0, histogram=())])
    assert failed(silent) == {"accept data of every DP rank": "DP rank 1 gave no accept data for 1 of its 1 requests"}


def test_a_rank_without_requests_is_said_and_does_not_fail():
    quiet = figures([request(0, 10, 50)])
    assert failed(quiet) == {}
    assert "no requests on rank 1" in judge(quiet, WANTED)[2].reason


def test_an_answer_of_one_token_has_no_acceptance_to_miss():
    assert failed(figures([request(0, 10, 50), request(1, 10, 50), request(1, 0, 0, tokens=1, histogram=())])) == {}


@pytest.mark.parametrize("rank", [2, None])
def test_requests_of_a_rank_that_is_not_there_are_not_left_out_in_silence(rank):
    """As when `dp_size`, 1 under DP attention, is taken for the number of DP ranks."""
    assert "1 requests name none of the 2 DP ranks" in str(failed(figures([request(0, 10, 50), request(rank, 10, 50)])))
    assert failed(figures([request(None, 10, 50)], dp_ranks=1)) == {}


def test_answers_that_are_the_servers_refusal_fail():
    refused = failed(figures(without_figures=(3, 5)), Thresholds(min_accuracy=0, min_accept_length=0))
    assert refused == {"all questions scored": "1319 of 1319 questions scored, but the server refused sample 3, 5"}


def test_without_a_wanted_accept_length_its_gates_are_not_there():
    nothing = figures([request(0, 0, 0), request(1, 0, 0)])
    assert failed(nothing, Thresholds(min_accuracy=0.97, min_accept_length=0)) == {}
    assert "no verify step" in failed(nothing)["mean accept length of the DP ranks"]


def test_a_dropped_sample_fails_although_all_that_were_scored_are_right():
    """evalscope with `ignore_errors` reports 5 of 5, score 1.0."""
    dropped = figures(asked=6, scored=5, correct=5, evalscope_score=1.0)
    assert failed(dropped)["all questions scored"] == "5 of 6 questions scored"
    assert failed(dropped)["accuracy"].startswith("0.8333 < 0.97")


def test_a_report_that_disagrees_with_its_reviews_fails():
    assert "reviews give 0.9757 and evalscope's report 0.9900" in str(failed(figures(evalscope_score=0.99)))


def test_accuracy_is_not_rounded_up_to_the_threshold():
    """1279 of 1319 is 0.96967, which a rounded 0.97 would pass."""
    assert set(failed(figures(correct=1279, evalscope_score=0.9697))) == {"accuracy"}
    assert failed(figures(correct=1280, evalscope_score=0.9704)) == {}


def test_one_looped_answer_fails():
    assert failed(figures(looped=(7,)))["no loops"].endswith("in sample 7")


def test_truncated_answers_do_not_decide():
    assert failed(figures(truncated=tuple(range(100)))) == {}


@pytest.mark.parametrize(
    ("histogram", "simulated"),
    [
        ((0, 0, 0, 0, 44, 56), True),  # SGLANG_SIMULATE_ACC_LEN=5.56, match-expected
        ((0, 0, 0, 200), True),
        ((0, 0, 0, 0, 4, 6), False),  # too few steps to tell
        ((200,), False),  # a draft that is never right, which the accept length shows
        ((30, 20), True),
        ((60, 30, 1), False),
        ((), False),
    ],
)
def test_acceptance_on_two_neighbours_alone_is_simulated(histogram, simulated):
    assert bool(looks_simulated(histogram)) is simulated


def test_simulated_acceptance_fails_the_run():
    fixed = [request(rank, 50, 228, histogram=(0, 0, 0, 0, 22, 28)) for rank in (0, 1)]
    assert failed(figures(fixed)) == {"acceptance is not simulated": "all 100 verify steps kept 4 or 5 drafts"}


def test_figures_are_read_from_a_chat_choice():
    meta = {"dp_rank": 1, "completion_tokens": 30, "spec_verify_ct": 5, "spec_num_correct_drafts": 25}
    choice = {"meta_info": {**meta, "spec_correct_drafts_histogram": [0, 0, 1, 4]}, "response_token_ids": [7] * 30}
    got = request_figures(choice)
    assert (got.dp_rank, got.verify_steps, got.accepted_drafts, got.accepted_histogram) == (1, 5, 25, (0, 0, 1, 4))
    assert got.loop == Loop(start=0, period=1, repeated=29)
    for name in choice:
        with pytest.raises(KeyError, match=name):
            request_figures({key: value for key, value in choice.items() if key != name})


def noise(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(1000, 100000), n)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 10, 19, 20, 21, 40, MAX_PERIOD])
def test_a_loop_is_found_wherever_it_stands_and_one_token_less_is_none(period):
    needed = max(20, 2 * period)
    block = noise(period)
    looped = (block * (needed // period + 2))[: period + needed]
    for before, after in ((0, 0), (50, 0), (0, 50), (33, 70)):
        tokens = noise(before, 1) + looped + noise(after, 2)
        assert find_loop(tokens) == Loop(start=before, period=period, repeated=needed)
    assert find_loop(noise(33, 1) + looped[:-1] + noise(70, 2)) is None


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [5],
        noise(4000),
        [9] * 20,  # a row of dashes: one, and 19 that repeat it
        noise(60) * 2,  # a solution written out twice
        [1, 2, 3, 1, 2, 4] * 1 + [1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2, 10],  # a numbered list
    ],
)
def test_what_is_no_loop(tokens):
    assert find_loop(tokens) is None


def test_a_block_beyond_the_longest_period_is_not_looked_for():
    assert find_loop(noise(MAX_PERIOD + 1) * 5) is None


def test_the_longest_of_two_loops_is_given():
    assert find_loop([1, 2] * 15 + noise(5) + [3] * 40) == Loop(start=35, period=1, repeated=39)
