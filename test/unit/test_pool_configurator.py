"""The two hooks on a server's memory, called as SGLang calls them; ``test/e2e/test_budget.py`` has the real server."""

from __future__ import annotations

import logging
import types

import pytest
import torch
from flash_shapes import deployment, upstream_sizing

from sglang_dflash_rocm.srt.model_executor import pool_configurator


def test_a_storage_counts_once_and_not_when_it_is_somebody_elses():
    table = torch.zeros(10, 4)
    assert pool_configurator.tensor_bytes([table, table[:5], None, "x"]) == 160
    assert pool_configurator.tensor_bytes([table[:5]], beside=[table]) == 0


def test_the_table_never_stops_a_start(caplog):
    class DFlashLike:
        def _cache_full_embed_weight(self): ...

    with caplog.at_level(logging.WARNING):
        pool_configurator.log_memory_table(None, types.SimpleNamespace(draft_worker=DFlashLike()))
    assert "no memory table" in caplog.text
    caplog.clear()
    pool_configurator.log_memory_table(None, types.SimpleNamespace(draft_worker=None))
    assert not caplog.text


@pytest.fixture
def configurator(monkeypatch):
    """What a target's configurator holds when it sizes its pools, and what SGLang has published by then."""
    from sglang.srt import runtime_context

    published = {
        "get_parallel": {"attn_tp_size": 4, "attn_dp_size": 2},
        "get_schedule": {
            "page_size": 1,
            "swa_full_tokens_ratio": 0.8,
            "mem_fraction_static": 0.85,
            "max_total_tokens": None,
            "max_running_requests": 48,
        },
        "get_spec": {"speculative_num_draft_tokens": 8, "speculative_draft_window_size": None},
    }
    for name, values in published.items():
        monkeypatch.setattr(runtime_context, name, lambda values=values: types.SimpleNamespace(**values))
    model_config = types.SimpleNamespace(
        hf_text_config=types.SimpleNamespace(swa_num_key_value_heads=8, sliding_window=128),
        swa_attention_layer_ids=list(range(39)),
        is_hybrid_swa=True,
        num_hidden_layers=48,
        num_attention_heads=64,
        get_total_num_kv_heads=lambda: 4,
        head_dim=192,
        v_head_dim=128,
        swa_head_dim=192,
        swa_v_head_dim=128,
        vocab_size=152576,
        hidden_size=4096,
        context_len=262144,
    )
    return types.SimpleNamespace(
        model_config=model_config,
        model=torch.nn.Linear(1024, 1024, dtype=torch.bfloat16),
        model_dtype=torch.bfloat16,
        kv_cache_dtype=torch.bfloat16,
        dflash_draft_cell_size_per_token=5120,
        is_draft_worker=False,
        spec_algorithm=types.SimpleNamespace(is_dflash=lambda: True),
    )


def _explain(configurator, call) -> Exception:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        pool_configurator.explain_shortage(lambda _configurator: call(), configurator)
    return caught.value


def test_no_token_fits(configurator):
    """SGLang's own sizing: a budget below its SWA floor, then one of no token at all."""
    error = _explain(configurator, lambda: upstream_sizing(deployment(swa_ratio=0.8)).calculate_pool_sizes(5 << 20, 1))
    assert type(error) is ValueError and str(error).startswith("SWA pool (")
    assert "Raise --swa-full-tokens-ratio (at most 1) or --mem-fraction-static (now 0.85)" in str(error)

    def nothing():
        from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

        return MemoryPoolConfig(max_total_num_tokens=0, mem_fraction_static=0.85)

    error = _explain(configurator, nothing)
    assert type(error) is RuntimeError and str(error.__cause__) in str(error)
    for text in (
        "Not enough memory. Please try to increase --mem-fraction-static",
        "target KV, full layers 5.62 KiB, target KV, SWA layers 39.00 KiB, draft KV 5.00 KiB",
        "largest part: target KV, SWA layers; it gets smaller with --swa-full-tokens-ratio",
    ):
        assert text in str(error)


def test_the_weights_leave_nothing(configurator, monkeypatch):
    """SGLang's own profiling, of a GPU that had a million GiB before the model was loaded."""
    from sglang.srt.mem_cache import kv_cache_configurator as upstream

    prefill = types.SimpleNamespace(full_prefill_max_req=None, backend=None)
    graphs = types.SimpleNamespace(
        graph=types.SimpleNamespace(cuda_graph_config=types.SimpleNamespace(prefill=prefill))
    )
    world = types.SimpleNamespace(launch_world_size=1, world_group=types.SimpleNamespace(cpu_group=None))
    schedule = types.SimpleNamespace(mem_fraction_static=0.85, prefill_max_requests=None, max_mamba_cache_size=None)
    monkeypatch.setattr(upstream, "get_exec", lambda: graphs)
    monkeypatch.setattr(upstream, "get_parallel", lambda: world)
    monkeypatch.setattr(upstream, "get_schedule", lambda: schedule)
    monkeypatch.setattr(upstream, "get_disagg", lambda: types.SimpleNamespace(disaggregation_mode="null"))
    monkeypatch.setattr(upstream, "get_mm", lambda: types.SimpleNamespace(mm_feature_transport=None))
    monkeypatch.setattr(configurator.model_config, "is_multimodal", False, raising=False)
    configurator.__dict__.update(device="cpu", gpu_id=0, mambaish_config=None, post_capture_kv_active=False)
    profile = upstream.KVCacheConfigurator._profile_available_bytes
    error = _explain(configurator, lambda: profile(configurator, 1e6))
    assert type(error) is ValueError and "Loaded weights leave no GPU memory" in str(error)
    assert "target weights 2.00 MiB" in str(error) and "full embedding copy 1.16 GiB" in str(error)
    assert "Raise --mem-fraction-static (now 0.85)" in str(error)


def test_the_pools_of_the_swa_cap_leave_nothing(configurator):
    from sglang.srt.model_executor.pool_configurator import SWARequestCapPoolConfigurator

    sizing = object.__new__(SWARequestCapPoolConfigurator)
    sizing.__dict__.update(vars(upstream_sizing(deployment())), _swa_cap=100_000)
    error = _explain(configurator, lambda: sizing.calculate_pool_sizes(1 << 20, 1))
    assert type(error) is RuntimeError and "--max-running-requests (now 48)" in str(error)
    assert "--chunked-prefill-size" in str(error)


@pytest.mark.parametrize(("draft", "whose"), [(False, "target"), (True, "draft")])
def test_the_allocation_itself_fails(configurator, draft, whose):
    """A real allocation of torch that is larger than any machine."""
    configurator.is_draft_worker = draft
    error = _explain(configurator, lambda: torch.zeros(1 << 58, dtype=torch.int8))
    assert type(error) is RuntimeError and f"the {whose}'s pools do not fit" in str(error)
    assert "Lower --mem-fraction-static (now 0.85) or --max-total-tokens" in str(error)
    assert type(_explain(configurator, _device_out_of_memory)) is torch.OutOfMemoryError


def _device_out_of_memory():
    raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB")


def test_other_errors_and_other_algorithms_pass_unchanged(configurator):
    original = ValueError("CPU FP8 KV cache is only supported for MHA.")
    assert _explain(configurator, lambda: _raise(original)) is original
    original = RuntimeError("Not enough memory.")
    configurator.spec_algorithm.is_dflash = lambda: False
    assert _explain(configurator, lambda: _raise(original)) is original
    configurator.spec_algorithm = None
    assert _explain(configurator, lambda: _raise(original)) is original, "a failure of ours must not hide SGLang's"
    assert pool_configurator.explain_shortage(lambda configurator, **kw: kw, configurator, a=1) == {"a": 1}


def _raise(error):
    raise error
