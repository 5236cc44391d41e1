"""Chain sampling verify: the target's distribution, whatever the draft proposes. SGLang's own function, on CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from sglang.srt.speculative import dflash_utils as upstream

from sglang_dflash_rocm.kernels.sampling.reference import chain_verify
from sglang_dflash_rocm.srt.speculative import dflash_utils as ours

VOCAB, BLOCK, TRIALS = 6, 4, 40_000


@pytest.fixture(autouse=True)
def hooked(monkeypatch):
    """What the two value hooks do; without them SGLang raises (see the first test)."""
    monkeypatch.setattr(upstream, "_DFLASH_SAMPLING_VERIFY_AVAILABLE", ours.AVAILABLE)
    monkeypatch.setattr(upstream, "tree_speculative_sampling_target_only", ours.tree_speculative_sampling_target_only)


def verify(candidates: torch.Tensor, logits: torch.Tensor, thresholds: float = 1.0, **sampling):
    """SGLang's ``compute_dflash_sampling_correct_drafts_and_bonus`` for ``[bs, block]`` candidates."""
    bs = len(candidates)
    values = {"temperatures": torch.ones(bs, 1), "top_ks": torch.full((bs,), VOCAB), "top_ps": torch.ones(bs)}
    values |= sampling
    values["need_top_k_sampling"] = bool((values["top_ks"] < VOCAB).any())
    values["need_top_p_sampling"] = bool((values["top_ps"] < 1).any())
    return upstream.compute_dflash_sampling_correct_drafts_and_bonus(
        candidates=candidates,
        next_token_logits=logits.reshape(bs * BLOCK, VOCAB),
        sampling_info=SimpleNamespace(**values),
        threshold_single=thresholds,
        threshold_acc=thresholds,
    )


def tokens_of(candidates: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor) -> list[tuple[int, ...]]:
    return [
        (*row[1 : n + 1].tolist(), int(last)) for row, n, last in zip(candidates, accepted.tolist(), bonus, strict=True)
    ]


@pytest.fixture
def target():
    torch.manual_seed(5)
    return torch.randn(BLOCK, VOCAB) * 1.5


@pytest.mark.parametrize("draft", ["likely", "unlikely"])
@pytest.mark.parametrize("limits", [{}, {"top_ks": 3}, {"top_ps": 0.7}])
def test_each_position_has_the_targets_distribution(target, draft, limits):
    """Position ``i``, looked at in the trials whose first ``i`` tokens are the proposals, must follow row ``i``."""
    order = target.argsort(-1, descending=draft == "likely")
    proposals = order[:, 0] if draft == "likely" else order[:, VOCAB - 3]
    candidates = torch.cat([torch.zeros(1, dtype=torch.long), proposals[:-1]]).repeat(TRIALS, 1)
    sampling = {name: torch.full((TRIALS,), value) for name, value in limits.items()}
    accepted, bonus = verify(candidates, target.repeat(TRIALS, 1, 1), **sampling)
    answers = tokens_of(candidates, accepted, bonus)
    info = SimpleNamespace(
        temperatures=torch.ones(1, 1),
        top_ks=torch.tensor([limits.get("top_ks", VOCAB)]),
        top_ps=torch.tensor([limits.get("top_ps", 1.0)]),
        need_top_k_sampling="top_ks" in limits,
        need_top_p_sampling="top_ps" in limits,
    )
    probs = upstream.build_speculative_verify_target_probs(
        next_token_logits=target, sampling_info=info, draft_token_num=BLOCK, bs=1
    )[0]
    looked_at = 0
    for position in range(BLOCK):
        prefix = tuple(candidates[0, 1 : position + 1].tolist())
        here = [tokens[position] for tokens in answers if len(tokens) > position and tokens[:position] == prefix]
        if len(here) < 500:
            break
        looked_at += 1
        counts = torch.bincount(torch.tensor(here), minlength=VOCAB).float()
        possible = probs[position] > 0
        assert not counts[~possible].any()
        expected = probs[position][possible].double()
        expected = expected / expected.sum() * len(here)
        if len(expected) > 1:
            assert chisquare(counts[possible].double(), expected).pvalue > 1e-4, f"position {position}"
    assert looked_at >= (2 if draft == "likely" else 1)


def test_a_greedy_verify_would_fail_the_same_test(target):
    """The fault that this mends: argmax in place of a sample."""
    probs = target[0].softmax(-1).double()
    counts = torch.zeros(VOCAB).double()
    counts[target[0].argmax()] = TRIALS
    assert chisquare(counts, probs / probs.sum() * TRIALS).pvalue < 1e-9


def test_greedy_rows_of_a_mixed_batch_stay_greedy(target):
    """SGLang turns ``temperature 0`` into ``top_k 1``; no coin may change that, the extreme ones included."""
    bs = 64
    logits = torch.randn(bs, BLOCK, VOCAB)
    best = logits.argmax(-1)
    candidates = torch.cat([torch.zeros(bs, 1, dtype=torch.long), best[:, :-1]], 1)
    candidates[::3, 2] = (candidates[::3, 2] + 1) % VOCAB
    top_ks = torch.full((bs,), VOCAB)
    top_ks[: bs // 2] = 1
    accepted, bonus = verify(candidates, logits, top_ks=top_ks)
    for row in range(bs // 2):
        expected = 1 if row % 3 == 0 else BLOCK - 1
        assert accepted[row] == expected and bonus[row] == best[row, expected]


@pytest.mark.parametrize("coin", [0.0, 1.0 - 2**-24])
def test_extreme_coins_never_pick_an_impossible_token(coin):
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]]).repeat(1, 1, 1)
    for proposal in range(VOCAB):
        candidates = torch.tensor([[9 % VOCAB, proposal]])
        accepted, bonus = chain_verify(probs, candidates, torch.full((1, 2), coin), torch.full((1,), coin))
        assert probs[0, accepted[0], bonus[0]] > 0
        assert not accepted[0] or probs[0, 0, proposal] > 0


def test_the_same_seed_gives_the_same_tokens(target):
    candidates = torch.randint(VOCAB, (32, BLOCK))
    runs = []
    for _ in range(2):
        torch.manual_seed(11)
        runs.append([part.clone() for part in verify(candidates, target.repeat(32, 1, 1))])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_thresholds_accept_more_as_on_cuda(target):
    candidates = torch.randint(VOCAB, (2000, BLOCK))
    strict = verify(candidates, target.repeat(2000, 1, 1))[0].clone()
    loose, _ = verify(candidates, target.repeat(2000, 1, 1), thresholds=0.2)
    assert loose.float().mean() > strict.float().mean()


def test_without_the_hooks_sglang_has_no_sampling_verify(target, monkeypatch):
    monkeypatch.setattr(upstream, "_DFLASH_SAMPLING_VERIFY_AVAILABLE", False)
    with pytest.raises(RuntimeError, match="unavailable"):
        verify(torch.zeros(1, BLOCK, dtype=torch.long), target)
