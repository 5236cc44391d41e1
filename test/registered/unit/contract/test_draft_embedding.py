"""The draft's full copy of the embedding: complete on every rank, and made after the mask token's row was merged."""

from __future__ import annotations

import sys

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.testing.live import schedulers

register_cpu_ci(est_time=50, suite="base-a-test-cpu")
register_amd_ci(est_time=50, suite="stage-a-test-1-gpu-small-amd")

SHAPES = {"plain": (64, 64), "unaligned": (67, 67), "one rank empty": (9, 9), "added vocabulary": (75, 67)}


def _table(rows: int, width: int = 3) -> torch.Tensor:
    return torch.arange(float(rows * width)).view(rows, width) + 1


def _gather(rank: int, rows: int, org_rows: int, attn_tp: bool, dtype: str | None):
    """Build a vocab-parallel table, fill this rank's shard from the full one, gather it back."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.speculative.dflash_dp import gather_draft_embedding

    embedding = VocabParallelEmbedding(
        rows, 3, params_dtype=torch.float32, org_num_embeddings=org_rows, padding_size=8, use_attn_tp_group=attn_tp
    )
    full, shard = _table(rows), embedding.shard_indices
    with torch.no_grad():
        embedding.weight.fill_(float("nan"))
        embedding.weight[: shard.num_org_elements] = full[shard.org_vocab_start_index : shard.org_vocab_end_index]
        added = shard.num_org_elements_padded
        embedding.weight[added : added + shard.num_added_elements] = full[
            shard.added_vocab_start_index : shard.added_vocab_end_index
        ]
    if dtype:
        embedding.output_dtype = getattr(torch, dtype)
    gathered = gather_draft_embedding(embedding)
    return embedding.tp_size, shard.num_org_elements, gathered


def check_complete(gathered: torch.Tensor, rows: int) -> None:
    """Row ``i`` is row ``i`` of the full table: no padding, no shard out of place."""
    assert gathered.shape == (rows, 3)
    assert torch.equal(gathered.float(), _table(rows)), "rows are missing or out of place"


@pytest.mark.parametrize(("attn_tp", "dtype"), [(False, None), (False, "bfloat16"), (True, None)])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_has_the_whole_table(dp2, shape, attn_tp, dtype):
    """Upstream: speculative/dflash_dp.py:11. A lookup in a table sharded over the whole TP group reduces over all four
    ranks, while an idle peer looks up nothing; MiMo's own table is sharded over the attention TP group."""
    rows, org_rows = SHAPES[shape]
    answers = dp2.call(_gather, rows, org_rows, attn_tp, dtype)
    assert {size for size, _, _ in answers} == {2 if attn_tp else 4}
    assert shape != "one rank empty" or attn_tp or 0 in {mine for _, mine, _ in answers}
    for _, _, gathered in answers:
        if dtype:
            assert gathered.dtype == torch.bfloat16
            gathered = gathered.float()
        check_complete(gathered, rows)


def test_padding_taken_for_rows_is_noticed():
    """Fault injection: concatenating the padded shards is right for no unaligned table."""
    padded = torch.cat([torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in _table(67).split(17)])
    with pytest.raises(AssertionError):
        check_complete(padded[:67], 67)


def test_modules_that_are_no_vocab_parallel_embedding_are_left_to_their_own_lookup():
    from sglang.srt.speculative.dflash_dp import gather_draft_embedding

    assert gather_draft_embedding(torch.nn.Embedding(4, 2)) is None


def _startup(rank: int) -> dict:
    worker = schedulers.draft_worker()
    target = worker.target_worker.model_runner.model.get_input_embeddings()
    path = f"{worker.server_args.speculative_draft_model_path}/mask_embedding.pt"
    mask, shard = worker._mask_token_id, target.shard_indices
    owner = shard.org_vocab_start_index <= mask < shard.org_vocab_end_index
    return {
        "full": worker._full_embed_gpu.clone(),
        "mask": mask,
        "saved": torch.load(path, weights_only=True)["embedding"],
        "owner": target.weight[mask - shard.org_vocab_start_index].detach().clone() if owner else None,
        "checkpoint": _checkpoint(worker.server_args.model_path),
        "tp_size": target.tp_size,
    }


def _checkpoint(path: str) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(f"{path}/model.safetensors")["model.embed_tokens.weight"]


def check_merged(full: torch.Tensor, checkpoint: torch.Tensor, mask: int, saved: torch.Tensor) -> None:
    """The copy is the checkpoint's table with the trained mask row in it."""
    assert not torch.equal(saved, checkpoint[mask]), "the trained row is the old one: the test shows nothing"
    want = checkpoint.clone()
    want[mask] = saved
    assert torch.equal(full[mask], saved), "the copy was made before the mask row was merged"
    assert torch.equal(full, want)


def test_the_copy_holds_the_trained_mask_row(dp2):
    """C23. Upstream: dflash_worker_v2.py:1318 _maybe_merge_trained_mask_embedding, then 1380 _cache_full_embed_weight.
    The released mask row is about zero; drafting from it costs nearly all acceptance and no token is wrong."""
    states = dp2.call(_startup)
    for state in states:
        check_merged(state["full"], state["checkpoint"], state["mask"], state["saved"])
    owners = [state for state in states if state["owner"] is not None]
    assert len(owners) == 4 // states[0]["tp_size"], "the mask row lives in one shard of every copy of the table"
    assert all(torch.equal(state["owner"], state["saved"]) for state in owners)


def _copy_before_merge(rank: int) -> torch.Tensor:
    """The two steps in the wrong order, then in the right one again."""
    worker = schedulers.draft_worker()
    table = worker.target_worker.model_runner.model.get_input_embeddings()
    shard, mask = table.shard_indices, worker._mask_token_id
    if shard.org_vocab_start_index <= mask < shard.org_vocab_end_index:
        with torch.no_grad():
            table.weight[mask - shard.org_vocab_start_index] = _checkpoint(worker.server_args.model_path)[mask]
    worker._cache_full_embed_weight()
    worker._maybe_merge_trained_mask_embedding()
    wrong = worker._full_embed_gpu
    worker._cache_full_embed_weight()
    return wrong


def test_a_copy_made_too_early_is_noticed(dp2):
    state = dp2.call(_startup)[0]
    for wrong in dp2.call(_copy_before_merge):
        with pytest.raises(AssertionError, match="before the mask row was merged"):
            check_merged(wrong, state["checkpoint"], state["mask"], state["saved"])
    test_the_copy_holds_the_trained_mask_row(dp2)


def _wrong_mask_id(rank: int) -> str:
    worker = schedulers.draft_worker()
    right = worker._mask_token_id
    worker._mask_token_id = right - 1
    try:
        worker._maybe_merge_trained_mask_embedding()
    except ValueError as error:
        return str(error)
    finally:
        worker._mask_token_id = right
    return ""


def test_a_row_trained_for_another_mask_token_is_refused(dp2):
    assert all("must match" in message for message in dp2.call(_wrong_mask_id))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
