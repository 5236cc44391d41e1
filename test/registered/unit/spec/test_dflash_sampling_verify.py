"""Chain sampling verify through the interface of SGLang's tree kernel, against a loop in plain Python.

On a GPU this is SGLang's Triton chain kernel behind our adapter; without one, the torch path of the CPU platform.
"""

from __future__ import annotations

import re
import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.srt.speculative.dflash_utils import tree_speculative_sampling_target_only

register_cpu_ci(est_time=20, suite="base-a-test-cpu")
register_amd_ci(est_time=30, suite="stage-a-test-1-gpu-small-amd")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: MiMo-V2's vocabulary, where there is a GPU to hold it.
VOCABULARIES = [7, 512, *([152_576] if DEVICE == "cuda" else [])]


def verify(probs, candidates, coins, final, threshold=1.0):
    """(accepted, bonus, written tokens) as the DFLASH worker reads them; outputs start poisoned."""
    bs, block, _ = probs.shape
    predicts = torch.full((bs * block,), -7, dtype=torch.int32, device=DEVICE)
    index = torch.full((bs, block), -7, dtype=torch.int32, device=DEVICE)
    accepted = torch.full((bs,), -7, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(bs * block, device=DEVICE).view(bs, block)
    tree_speculative_sampling_target_only(
        predicts=predicts,
        accept_index=index,
        accept_token_num=accepted,
        candidates=candidates,
        retrive_index=rows,
        retrive_next_token=rows,
        retrive_next_sibling=rows,
        uniform_samples=coins,
        uniform_samples_for_final_sampling=final,
        target_probs=probs,
        draft_probs=torch.zeros_like(probs),
        threshold_single=threshold,
        threshold_acc=threshold,
    )
    last = index[torch.arange(bs, device=DEVICE), accepted.long()].long()
    return accepted.cpu(), predicts[last].cpu()


def by_hand(probs, candidates, coins, final, threshold=1.0) -> tuple[int, int, float]:
    """One request: accepted, bonus, and how close the final coin was to the border between two tokens."""
    accepted = 0
    while accepted < len(candidates) - 1:
        chance = float(probs[accepted, candidates[accepted + 1]])
        if not (float(coins[accepted]) * threshold < chance or chance >= threshold):
            break
        accepted += 1
    left = probs[accepted].double().clone()
    if accepted < len(candidates) - 1:
        left[candidates[accepted + 1]] = 0
    sums = left.cumsum(0)
    goal = float(final) * float(sums[-1])
    bonus = int((sums <= goal).sum())
    return accepted, bonus, float((sums - goal).abs().min() / sums[-1])


@pytest.mark.parametrize("threshold", [1.0, 0.3])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_accepts_and_samples_as_the_loop_does(vocab, threshold):
    torch.manual_seed(vocab)
    bs, block = 48, 8
    probs = (torch.randn(bs, block, vocab, device=DEVICE) * 3).softmax(-1)
    likely = torch.roll(probs.argmax(-1), 1, 1)
    candidates = torch.where(
        torch.rand(bs, block, device=DEVICE) < 0.8, likely, torch.randint(vocab, (bs, block), device=DEVICE)
    )
    coins, final = torch.rand(bs, block, device=DEVICE), torch.rand(bs, device=DEVICE)
    accepted, bonus = verify(probs, candidates, coins.clone(), final, threshold)
    assert len(set(accepted.tolist())) > 3
    for row, (p, c, u, f) in enumerate(zip(probs.cpu(), candidates.cpu(), coins.cpu(), final.cpu(), strict=True)):
        want, token, margin = by_hand(p, c, u, f, threshold)
        assert accepted[row] == want
        # float32 sums may put a coin on the border into the neighbouring token.
        assert bonus[row] == token or margin < 1e-5
        assert p[want, bonus[row]] > 0


@pytest.mark.parametrize("coin", [0.0, 1.0 - 2**-24])
def test_a_greedy_row_stays_greedy_whatever_the_coin(coin):
    bs, block, vocab = 16, 8, 512
    best = torch.randint(vocab, (bs, block), device=DEVICE)
    probs = torch.zeros(bs, block, vocab, device=DEVICE).scatter_(2, best.unsqueeze(2), 1.0)
    candidates = torch.roll(best, 1, 1)
    candidates[::2, 3] = (candidates[::2, 3] + 1) % vocab
    accepted, bonus = verify(
        probs, candidates, torch.full((bs, block), coin, device=DEVICE), torch.full((bs,), coin, device=DEVICE)
    )
    for row in range(bs):
        want = 2 if row % 2 == 0 else block - 1
        assert accepted[row] == want and bonus[row] == best[row, want]


def test_the_chain_kernel_compiles_for_gfx942_without_spills():
    """Code object only, as Triton's HIP backend makes it; MiMo-V2's vocabulary and block."""
    from sglang.kernels.ops.speculative.reject_sampling import speculative_sampling_classic_kernel as kernel
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"NUM_SLOTS": 8, "VOCAB_SIZE": 152_576, "BLOCK_V": 4096, "BLOCK_REDUCE": 32_768}
    constants["BLOCK_VERIFICATION"] = False
    types = dict.fromkeys(("Predicts", "AcceptIndex", "AcceptTokenNum"), "*i32")
    types |= dict.fromkeys(("Candidates", "RetriveIndex"), "*i64")
    signature = {}
    for name in kernel.arg_names:
        kind = "constexpr" if name in constants else "i32" if name.startswith("stride") else "*fp32"
        signature[name] = types.get(name, kind)
    target = GPUTarget("hip", "gfx942", 64)
    made = triton_compile(ASTSource(kernel, signature, constants), target=target, options={"num_warps": 4})
    spills = re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", made.asm["amdgcn"])
    assert spills and set(spills) == {"0"}, made.asm["amdgcn"][-2000:]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
