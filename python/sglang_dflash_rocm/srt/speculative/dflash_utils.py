"""Sampling verify of DFLASH where SGLang has none: ``temperature > 0`` is verified greedily on ROCm otherwise.

SGLang's own ``compute_dflash_sampling_correct_drafts_and_bonus`` stays: it applies temperature, top-k and top-p and
draws the coins. It lacks only the tree kernel, which exists for CUDA and MUSA. A DFlash block is a chain, and SGLang
ships a Triton kernel for chains that does run on ROCm; here it gets the interface of the tree kernel.
"""

from __future__ import annotations

import torch

from sglang_dflash_rocm.kernels.sampling.reference import chain_verify

#: Value for ``dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE``.
AVAILABLE = True


def tree_speculative_sampling_target_only(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """VALUE for the missing tree kernel: verify chains, one candidate per level.

    Args:
        predicts: ``[bs * block]`` int32, written: the token after each accepted row.
        accept_index: ``[bs, block]`` int32, written: rows of ``predicts``, in order of acceptance.
        accept_token_num: ``[bs]`` int32, written: accepted drafts.
        candidates: ``[bs, block]`` int64, column 0 the last committed token.
        retrive_index: ``[bs, block]`` int64 rows of ``predicts``.
        retrive_next_token, retrive_next_sibling: the tree; a chain's is implied.
        uniform_samples: ``[bs, block]`` float32 coins, one per proposal.
        uniform_samples_for_final_sampling: ``[bs]`` float32.
        target_probs: ``[bs, block, vocab]`` float32.
        draft_probs: as ``target_probs``, all zero; used as scratch.
        threshold_single, threshold_acc: ``--speculative-accept-threshold-*``; below 1 they accept more than the target
            would, as on CUDA.
    """
    proposed = candidates[:, 1:].unsqueeze(2)
    coins = uniform_samples
    if threshold_acc < 1.0 or threshold_single < 1.0:
        chances = target_probs[:, :-1].gather(2, proposed).squeeze(2)
        coins = coins * threshold_acc
        # Accept whatever the coin says: every chance is above a negative one.
        coins[:, :-1].masked_fill_(chances >= threshold_single, -1.0)
    if not candidates.is_cuda:
        accepted, bonus = chain_verify(target_probs, candidates, coins, uniform_samples_for_final_sampling)
        _write_chain(predicts, accept_index, accept_token_num, retrive_index, accepted, bonus)
        return
    from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton

    # The proposal is all of the draft's probability.
    draft_probs[:, :-1].scatter_(2, proposed, 1.0)
    chain_speculative_sampling_triton(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        coins,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
        threshold_single,
        threshold_acc,
        deterministic,
    )


def _write_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    retrive_index: torch.Tensor,
    accepted: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    """The caller reads ``predicts`` at the last accepted row only."""
    accept_token_num.copy_(accepted)
    accept_index.copy_(retrive_index)
    last = retrive_index.gather(1, accepted.to(torch.int64).unsqueeze(1)).squeeze(1)
    predicts[last] = bonus.to(predicts.dtype)


def active_verify(samples: bool) -> str:
    """For the start-up log: which verify serves which requests, as SGLang sees it once the hooks are applied."""
    chain = "chain sampling (SGLang's Triton kernel)" if torch.cuda.is_available() else "chain sampling (torch)"
    return f"temperature 0: greedy; temperature > 0: {chain if samples else 'greedy, not sampled'}"
