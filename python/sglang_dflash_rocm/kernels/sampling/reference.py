"""Chain verification of one proposed token per position, in torch: what a verify kernel must do.

Leviathan et al. 2023 (arXiv:2211.17192) with a draft that is a point mass on its proposal, as a greedy DFlash block is:
accept with the target's probability of the proposal, else sample from the target without the proposal.
"""

from __future__ import annotations

import torch


def chain_verify(
    target_probs: torch.Tensor, candidates: torch.Tensor, coins: torch.Tensor, final_coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts and the token sampled after them.

    Args:
        target_probs: ``[bs, block, vocab]`` float32; row ``i`` is the target's distribution after candidate ``i``.
        candidates: ``[bs, block]`` int64; column 0 is the last committed token, the rest are proposals.
        coins: ``[bs, block]`` float32 in ``[0, 1)``; coin ``i`` decides on proposal ``i + 1``. Below 0 accepts always.
        final_coins: ``[bs]`` float32 in ``[0, 1)`` for the token sampled at the end.

    Returns:
        ``(accepted [bs] int32, bonus [bs] int64)``, ``accepted`` in ``0 .. block - 1``.
    """
    bs, block, _vocab = target_probs.shape
    proposed = candidates[:, 1:]
    chances = target_probs[:, :-1].gather(2, proposed.unsqueeze(2)).squeeze(2)
    passed = coins[:, : block - 1] < chances
    accepted = passed.to(torch.int64).cumprod(1).sum(1)
    rows = torch.arange(bs, device=target_probs.device)
    last = target_probs[rows, accepted].clone()
    # The rejected proposal may not be drawn again; where all were accepted there is none.
    rejected = proposed.gather(1, accepted.clamp(max=block - 2).unsqueeze(1)) if block > 1 else candidates
    mask = (accepted < block - 1).unsqueeze(1)
    last.scatter_(1, rejected, torch.where(mask, torch.zeros((), dtype=last.dtype), last.gather(1, rejected)))
    sums = last.cumsum(1)
    bonus = (sums <= (final_coins * sums[:, -1]).unsqueeze(1)).sum(1)
    # Rounding may leave the coin at the very end; the last token with a probability is meant then.
    top = (last > 0).to(torch.int64).cumsum(1).argmax(1)
    return accepted.to(torch.int32), torch.minimum(bonus, top)
