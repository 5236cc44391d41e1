"""What decides whether an accuracy run passes: figures in, verdicts out. No files, no server."""

from __future__ import annotations

import msgspec

from .acceptance import Acceptance, RankAcceptance, looks_simulated

_ROUNDING = 5e-5  # evalscope's report has four decimals


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """min_accuracy: share of the questions asked, 0 to 1. min_accept_length: tokens per verify step, bonus token
    included, for the mean over DP ranks; 0 asks for no speculation at all."""

    min_accuracy: float
    min_accept_length: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a run gave. correct may be fractional, as evalscope's scores are. evalscope_score: as its report rounds it.

    without_figures, truncated and looped are sample indices of the data set: answers without SGLang's figures (a prompt
    too long for the server: evalscope scores the text of the refusal), answers cut at the token limit, answers with a
    loop (`repetition.find_loop`).
    """

    asked: int
    scored: int
    correct: float
    evalscope_score: float
    without_figures: tuple[int, ...]
    truncated: tuple[int, ...]
    looped: tuple[int, ...]
    acceptance: Acceptance

    @property
    def accuracy(self) -> float:
        """Share of the questions asked; one without a score counts as wrong."""
        return self.correct / self.asked


class Gate(msgspec.Struct, frozen=True):
    """One verdict and the figures that it rests on."""

    name: str
    passed: bool
    reason: str


def judge(figures: Figures, wanted: Thresholds) -> tuple[Gate, ...]:
    """All gates, in the order in which they are shown. The run passes if each of them does."""
    return (
        _complete(figures),
        _accuracy(figures, wanted.min_accuracy),
        *([_accept_data(figures), _accept_length(figures, wanted)] if wanted.min_accept_length else []),
        _real_acceptance(figures.acceptance),
        _no_loops(figures),
    )


def _complete(figures: Figures) -> Gate:
    said = f"{figures.scored} of {figures.asked} questions scored"
    if figures.scored != figures.asked:
        return Gate("all questions scored", False, said)
    if figures.without_figures:
        return Gate("all questions scored", False, f"{said}, but the server refused {_some(figures.without_figures)}")
    ours = figures.correct / figures.scored
    agrees = abs(ours - figures.evalscope_score) <= _ROUNDING + 1e-9
    if not agrees:
        said += f", but its reviews give {ours:.4f} and evalscope's report {figures.evalscope_score:.4f}"
    return Gate("all questions scored", agrees, said)


def _accuracy(figures: Figures, least: float) -> Gate:
    passed = figures.accuracy >= least
    sign = ">=" if passed else "<"
    correct = f"{figures.correct:g} of {figures.asked}"
    return Gate("accuracy", passed, f"{figures.accuracy:.4f} {sign} {least:g} ({correct} correct)")


def _accept_data(figures: Figures) -> Gate:
    missing = [_missing(rank) for rank in figures.acceptance.ranks if rank.without_accept_data]
    if lost := figures.acceptance.requests_of_no_rank:
        missing.append(f"{lost} requests name none of the {len(figures.acceptance.ranks)} DP ranks")
    if missing:
        return Gate("accept data of every DP rank", False, "; ".join(missing))
    idle = [str(rank.dp_rank) for rank in figures.acceptance.ranks if not rank.requests]
    said = ", ".join(f"rank {r.dp_rank}: {r.verify_steps} verify steps" for r in figures.acceptance.ranks if r.requests)
    return Gate(
        "accept data of every DP rank", True, said + (f"; no requests on rank {', '.join(idle)}" if idle else "")
    )


def _missing(rank: RankAcceptance) -> str:
    return f"DP rank {rank.dp_rank} gave no accept data for {rank.without_accept_data} of its {rank.requests} requests"


def _accept_length(figures: Figures, wanted: Thresholds) -> Gate:
    mean, name = figures.acceptance.mean_worker_accept_length, "mean accept length of the DP ranks"
    if mean is None:
        return Gate(name, False, f"no verify step, {wanted.min_accept_length:g} wanted")
    passed = mean >= wanted.min_accept_length
    least, overall = figures.acceptance.min_worker_accept_length, figures.acceptance.accept_length
    sign = ">=" if passed else "<"
    return Gate(
        name, passed, f"{mean:.2f} {sign} {wanted.min_accept_length:g} (minimum {least:.2f}, over all {overall:.2f})"
    )


def _real_acceptance(acceptance: Acceptance) -> Gate:
    why = looks_simulated(acceptance.accepted_histogram)
    counts = " ".join(map(str, acceptance.accepted_histogram))
    return Gate("acceptance is not simulated", not why, why or f"verify steps by kept drafts: {counts or 'none'}")


def _no_loops(figures: Figures) -> Gate:
    if figures.looped:
        return Gate("no loops", False, f"the same tokens again and again in {_some(figures.looped)}")
    return Gate("no loops", True, f"none in {figures.scored} answers")


def _some(indices: tuple[int, ...], shown: int = 10) -> str:
    more = f" and {len(indices) - shown} more" if len(indices) > shown else ""
    return f"sample {', '.join(map(str, indices[:shown]))}{more}"
