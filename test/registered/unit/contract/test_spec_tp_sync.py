"""Ranks of one attention TP group hold the same tokens, whatever the last bits of their logits are."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.testing.live import schedulers

register_cpu_ci(est_time=45, suite="base-a-test-cpu")
register_amd_ci(est_time=45, suite="stage-a-test-1-gpu-small-amd")

BLOCK, VOCAB = 8, 512
SITES = ("DFLASH_TARGET", "DFLASH_ACCEPT_GREEDY", "DFLASH_ACCEPT_SAMPLE", "DFLASH_SELECTOR")


def _with_sync(sites: str):
    """A ``SpecTpSync`` of the given setting, on the group that the worker's own uses."""
    from sglang.srt.environ import envs
    from sglang.srt.speculative.spec_tp_sync import SpecTpSync

    with envs.SGLANG_SPEC_TP_SYNC.override(sites):
        return SpecTpSync(schedulers.draft_worker()._tp_sync._tp_group)


def _synced(rank: int, sites: str) -> dict:
    import torch.distributed as dist
    from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

    sync = _with_sync(sites)
    values = {}
    for site in SITES:
        tokens = torch.tensor([rank, 100 + rank])
        values[site] = sync.sync(SpecTpSyncSite[site], tokens).tolist()
    own = schedulers.draft_worker()._tp_sync
    group = dist.get_process_group_ranks(own._tp_group.device_group)
    return {"values": values, "group": group, "own": sorted(site.name for site in own._sites)}


def check_rank_zeros_tokens(answers: list[dict]) -> None:
    """At every site both ranks of a group hold what its rank 0 had, and not what another group had."""
    for rank, answer in enumerate(answers):
        first = rank - rank % 2
        assert answer["group"] == [first, first + 1]
        for site, values in answer["values"].items():
            assert values == [first, 100 + first], f"rank {rank} at {site}: {values}"


def test_every_site_gives_the_groups_first_ranks_tokens(dp2):
    """C10. Upstream: speculative/spec_tp_sync.py, dflash_worker_v2.py:416 (the group), 2209-2229, 2360 (the sites).
    Ranks that accept different tokens build different batches and wait for each other for ever."""
    answers = dp2.call(_synced, "all")
    check_rank_zeros_tokens(answers)
    assert all(set(SITES) <= set(answer["own"]) for answer in answers), "the default leaves a site out"


@pytest.mark.parametrize("sites", ["off", "all,-dflash-accept-greedy", "dflash-target"])
def test_a_site_left_out_is_noticed(dp2, sites):
    with pytest.raises(AssertionError, match="rank 1 at"):
        check_rank_zeros_tokens(dp2.call(_synced, sites))


def test_an_unknown_site_is_refused():
    from sglang.srt.speculative.spec_tp_sync import parse_spec_tp_sync

    with pytest.raises(ValueError, match="unknown token"):
        parse_spec_tp_sync("all,dflash-acept")


def _accept(rank: int, sites: str) -> tuple[list, list, list]:
    """Greedy accept where the ranks of a group disagree by one ulp about a tie, on the third row of the block."""
    worker = schedulers.draft_worker()
    logits = torch.zeros(BLOCK, VOCAB)
    target = torch.arange(10, 10 + BLOCK)
    logits[torch.arange(BLOCK), target] = 5.0
    rival, up = 7, torch.nextafter(torch.tensor(5.0), torch.tensor(6.0))
    logits[2, rival] = up if rank % 2 else 5.0 - 1e-3
    candidates = torch.cat([torch.tensor([3]), target[:-1]]).view(1, BLOCK)
    with mock.patch.object(worker, "_tp_sync", _with_sync(sites)):
        accept_len, commit, bonus, out, _ = worker._accept_block(
            candidates=candidates,
            next_token_logits=logits,
            sampling_info=None,
            draft_input=None,
            prefix_lens=torch.tensor([4]),
            bs=1,
        )
    length = int(accept_len[0])
    return length, int(bonus[0]), out.view(-1)[: length + 1].tolist(), int(commit[0])


def check_same_accept(answers: list[tuple]) -> None:
    """All ranks accept the same: here all have the same logits but for the ulp."""
    assert all(answer == answers[0] for answer in answers), f"accepted (length, bonus, tokens, commit): {answers}"


def test_one_ulp_does_not_part_the_ranks(dp2):
    """C10. Upstream: dflash_worker_v2.py:2187 _accept_block, the site DFLASH_ACCEPT_GREEDY. HIP's GEMMs give ranks
    other last bits."""
    answers = dp2.call(_accept, "all")
    check_same_accept(answers)
    assert answers[0] == (7, 17, list(range(10, 18)), 8)
    with pytest.raises(AssertionError):
        check_same_accept(dp2.call(_accept, "off"))


@contextlib.contextmanager
def own_start_forgotten(lm_head):
    """Fault: a rank takes the index within its shard for a token id."""
    right = lm_head.shard_indices
    names = ("num_org_elements", "num_org_elements_padded", "num_added_elements", "added_vocab_start_index")
    wrong = SimpleNamespace(org_vocab_start_index=0, **{name: getattr(right, name) for name in names})
    lm_head.shard_indices = wrong
    try:
        yield
    finally:
        lm_head.shard_indices = right


@contextlib.contextmanager
def last_shard_wins(lm_head):
    """Fault: among equal maxima the last rank's is taken."""
    argmax = torch.argmax

    def last(x, dim=-1, out=None):
        picked = x.shape[dim] - 1 - argmax(x.flip(dim), dim=dim)
        return picked if out is None else out.copy_(picked)

    with mock.patch.object(torch, "argmax", last):
        yield


def _greedy(rank: int, best: list[list[int]], fault=None) -> list[int]:
    """The draft's greedy choice from a head over the draft's TP group in which row ``i`` has equal maxima at
    ``best[i]``."""
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
    from sglang.srt.speculative.spec_utils import draft_tp_context

    worker = schedulers.draft_worker()
    full = torch.full((32, len(best)), -1.0)
    for row, ids in enumerate(best):
        full[ids, row] = 5.0
    head = ParallelLMHead(32, len(best), params_dtype=torch.float32, padding_size=8, use_attn_tp_group=True)
    shard = head.shard_indices
    with torch.no_grad():
        mine = full[shard.org_vocab_start_index : shard.org_vocab_end_index]
        head.weight.zero_()
        head.weight[: len(mine)] = mine
    with draft_tp_context(worker.draft_parallel_layout), fault(head) if fault else contextlib.nullcontext():
        return worker._greedy_sample_from_vocab_parallel_head(hidden_states=torch.eye(len(best)), lm_head=head).tolist()


BEST = [[5], [17], [3, 20], [16, 15], [31, 30, 1], [18, 22], [0, 16]]


def check_greedy(answers: list[list[int]], best: list[list[int]]) -> None:
    """Global ids, the lowest of equal maxima, the same on all ranks."""
    want = [min(ids) for ids in best]
    for rank, tokens in enumerate(answers):
        assert tokens == want, f"rank {rank}: {tokens}, must be {want}"


def test_ties_across_shards_give_the_lowest_id(dp2):
    """C10, C24. Upstream: dflash_worker_v2.py:1599 _greedy_sample_from_vocab_parallel_head. The draft must choose as
    the target's argmax over the whole row does, or ties cost acceptance; a local index is a wrong token."""
    check_greedy(dp2.call(_greedy, BEST), BEST)


@pytest.mark.parametrize("fault", [last_shard_wins, own_start_forgotten])
def test_a_wrong_choice_among_shards_is_noticed(dp2, fault):
    answers = dp2.call(_greedy, BEST, fault)
    with pytest.raises(AssertionError, match="must be"):
        check_greedy(answers, BEST)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
