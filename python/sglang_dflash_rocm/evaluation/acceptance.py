"""Accept length of every DP rank, from what SGLang says of each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from .repetition import Loop, find_loop

_STEPS_THAT_SHOW_SIMULATION = 50


class RequestFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request, from `choices[0]` of a chat answer with `return_meta_info` and `return_token_ids`.

    verify_steps: verify forwards. accepted_drafts: drafts that they kept, bonus tokens left out. accepted_histogram:
    verify steps by number of kept drafts. All three are empty without speculation and for an answer of one token, which
    prefill gives. dp_rank is None where SGLang has no DP ranks.
    """

    dp_rank: int | None
    completion_tokens: int
    verify_steps: int = 0
    accepted_drafts: int = 0
    accepted_histogram: tuple[int, ...] = ()
    loop: Loop | None = None

    @property
    def has_accept_data(self) -> bool:
        """Whether its acceptance is known; an answer of one token has none to know."""
        return self.verify_steps > 0 or self.completion_tokens <= 1


def request_figures(choice: Mapping) -> RequestFigures:
    """Figures of a chat choice.

    Raises:
        KeyError: the server left out `meta_info` or `response_token_ids`; the message names which.
    """
    meta, tokens = choice.get("meta_info"), choice.get("response_token_ids")
    for name, value in (("meta_info", meta), ("response_token_ids", tokens)):
        if value is None:
            raise KeyError(f"the server's answer has no choices[0].{name}")
    return RequestFigures(
        dp_rank=meta.get("dp_rank"),
        completion_tokens=meta["completion_tokens"],
        verify_steps=meta.get("spec_verify_ct") or 0,
        accepted_drafts=meta.get("spec_num_correct_drafts") or 0,
        accepted_histogram=tuple(meta.get("spec_correct_drafts_histogram") or ()),
        loop=find_loop(tokens),
    )


class RankAcceptance(msgspec.Struct, frozen=True, kw_only=True):
    """One DP rank. accept_length: tokens per verify step, bonus token included; None without a verify step. As in
    SGLang's totals a step counts in full, also where the answer ends inside it, and prefill's token does not count.

    server_accept_length: the same from the server's own totals, which move only every `decode_log_interval` decode
    steps and count all its traffic since the last flush; None where the server gives none.
    """

    dp_rank: int
    requests: int
    without_accept_data: int
    verify_steps: int
    accepted_tokens: int
    accept_length: float | None
    server_accept_length: float | None = None


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Over all DP ranks. mean_worker_accept_length: mean of the ranks that answered, each with the same weight;
    min_worker_accept_length: their minimum; accept_length: sum of accepted tokens over sum of verify steps."""

    ranks: tuple[RankAcceptance, ...]
    mean_worker_accept_length: float | None
    min_worker_accept_length: float | None
    accept_length: float | None
    accepted_histogram: tuple[int, ...]
    requests_of_no_rank: int = 0


def summarise(
    requests: Sequence[RequestFigures], dp_ranks: int, server_lengths: Mapping[int, float | None] | None = None
) -> Acceptance:
    """Accept lengths by rank and over all. ``server_lengths``: the server's own figure by DP rank."""
    only = 0 if dp_ranks == 1 else None
    placed = [(only if r.dp_rank is None else r.dp_rank, r) for r in requests]
    ranks = tuple(
        _rank(rank, [r for of, r in placed if of == rank], (server_lengths or {}).get(rank)) for rank in range(dp_ranks)
    )
    lengths = [rank.accept_length for rank in ranks if rank.accept_length is not None]
    steps = sum(rank.verify_steps for rank in ranks)
    return Acceptance(
        ranks=ranks,
        mean_worker_accept_length=sum(lengths) / len(lengths) if lengths else None,
        min_worker_accept_length=min(lengths, default=None),
        accept_length=sum(rank.accepted_tokens for rank in ranks) / steps if steps else None,
        accepted_histogram=_add(r.accepted_histogram for r in requests),
        requests_of_no_rank=len(requests) - sum(rank.requests for rank in ranks),
    )


def looks_simulated(histogram: Sequence[int]) -> str:
    """Why a histogram of accepted drafts cannot be a model's, or "".

    `SGLANG_SIMULATE_ACC_METHOD=match-expected` draws only the two whole numbers around the wanted length. Real
    acceptance spreads over the block. `multinomial` spreads too and is not seen here.
    """
    used = [accepted for accepted, steps in enumerate(histogram) if steps]
    if sum(histogram) < _STEPS_THAT_SHOW_SIMULATION or used[-1] - used[0] > 1 or used[-1] == 0:
        return ""
    return f"all {sum(histogram)} verify steps kept {' or '.join(map(str, used))} drafts"


def _rank(rank: int, requests: Sequence[RequestFigures], server_length: float | None) -> RankAcceptance:
    steps = sum(r.verify_steps for r in requests)
    accepted = steps + sum(r.accepted_drafts for r in requests)
    return RankAcceptance(
        dp_rank=rank,
        requests=len(requests),
        without_accept_data=sum(not r.has_accept_data for r in requests),
        verify_steps=steps,
        accepted_tokens=accepted,
        accept_length=accepted / steps if steps else None,
        server_accept_length=server_length,
    )


def _add(histograms: Iterable[Sequence[int]]) -> tuple[int, ...]:
    total: list[int] = []
    for histogram in histograms:
        total += [0] * (len(histogram) - len(total))
        for accepted, steps in enumerate(histogram):
            total[accepted] += steps
    return tuple(total)
