"""The FlyDSL attention backend over SGLang's real pools: modes, layouts and KV dtypes, graphs, idle and mixed batches.

On an MI300X these run the kernels and real graphs. Elsewhere float references stand in for the kernels, and a replay
runs the same calls again on the same static buffers (HARDWARE WE DO NOT HAVE).
"""

import contextlib
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci

from sglang_dflash_rocm.kernels.kv_cache.layout import FP8, as_bytes
from sglang_dflash_rocm.kernels.paged_attention.launch import UnsupportedContract
from sglang_dflash_rocm.srt.layers.attention import flydsl_backend
from sglang_dflash_rocm.testing.gfx942 import HARDWARE

# Helpers may not lie here: SGLang's runner takes every file of test/registered for a test.
sys.path.insert(0, str(Path(__file__).parents[2] / "attention_stage"))
from backend_stage import FULL, SLIDING, DraftStage, Stage

register_cpu_ci(est_time=40, suite="base-a-test-cpu")
register_amd_ci(est_time=90, suite="stage-b-test-1-gpu-small-amd")

POOLS = [
    pytest.param(dict(), id="nhd-bf16"),
    pytest.param(dict(dtype=FP8, scales=(0.5, 2.0)), id="nhd-fp8"),
    pytest.param(dict(layout="vectorized_5d"), id="5d-bf16"),
    pytest.param(dict(layout="vectorized_5d", dtype=FP8, page_size=16), id="5d-fp8-page16"),
]
LENS = [5, 64, 130, 200]


@pytest.fixture(params=POOLS)
def stage(request):
    made = Stage(**request.param)
    for number, length in enumerate(LENS, 1):
        made.prefill(number, length)
    return made


def test_decode(stage):
    stage.step("DECODE", [1, 2, 3, 4], LENS, [1] * 4)
    stage.step("DECODE", [4, 2], [201, 65], [1, 1])


@pytest.mark.parametrize("block", [1, 8, 16])
def test_verify(stage, block):
    """seq_lens excludes the block; the rows see each other causally. Then a decode over what was accepted."""
    stage.step("TARGET_VERIFY", [3, 1, 2], [130, 5, 64], [block] * 3)
    stage.step("DECODE", [1], [5 + block], [1])


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
@pytest.mark.parametrize("options", POOLS)
def test_extend_after_a_prefix_hit(options, mode):
    """C18, C35: ragged chunks behind cached prefixes, in a window; a mixed batch has requests that decode too."""
    stage = Stage(**(options | dict(scales=None)))  # scales of an extend: test_mimo_triton_extend.py
    for number, length in enumerate(LENS, 1):
        stage.prefill(number, length)
    stage.step(mode, [3, 4, 1], [130, 200, 5], [100, 7, 1])
    stage.step("DECODE", [3, 1], [230, 6], [1, 1])


@pytest.mark.parametrize("page_size", [16, 64])
def test_draft_block(page_size):
    stage = DraftStage(page_size=page_size)
    for number, length in enumerate(LENS, 1):
        stage.prefill(number, length)
    stage.step("TARGET_VERIFY", [2, 4, 1], [64, 200, 5], [8] * 3)


def test_an_idle_rank_launches_nothing(stage):
    """C04: no request, in every mode that an idle rank may be asked for."""
    with mock.patch.object(flydsl_backend, "store_kv") as store:
        for mode in ("IDLE", "DECODE", "TARGET_VERIFY"):
            batch = stage.batch(mode, [], [], [])
            stage.backend.init_forward_metadata(batch)
            layer = stage.layers[SLIDING]
            q, k, v = stage.inputs(layer, batch)
            if mode != "IDLE":  # SGLang answers an idle forward itself
                assert stage.forward(layer, batch, q, k, v).shape == (0, 16 * 128)
    assert not any(call.args[0].numel() for call in store.call_args_list)


def test_a_block_touches_no_page_of_another_request(stage):
    """C17: a verify behind a prompt that fills its pages writes to the request's own slots only."""
    before = [as_bytes(b).clone() for layer in (FULL, SLIDING) for b in stage.buffers(layer)]
    stage.step("TARGET_VERIFY", [2], [64], [8])
    after = [as_bytes(b) for layer in (FULL, SLIDING) for b in stage.buffers(layer)]
    mine = stage.slots[2, 64:72]
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        slots = mine if index < 2 else stage.to_swa[mine]
        pages = set((slots // stage.page_size).tolist())
        per_page = (old if old.ndim == 5 else old.unflatten(0, (-1, stage.page_size)), new)
        changed = per_page[0].view(-1, *per_page[0].shape[1:]).reshape(len(per_page[0]), -1)
        now = new.reshape(len(per_page[0]), -1)
        differs = (as_int(changed) != as_int(now)).any(1).nonzero().flatten().tolist()
        assert set(differs) == pages, (index, differs, pages)


def as_int(tensor):
    """Bits: NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()])


# ---- graphs


class Captured:
    """One layer's verify forward on static buffers of four requests, captured; a replay reads what they hold then."""

    def __init__(self, stage, layer, block=8, size=4):
        self.stage, self.layer, self.block, self.size = stage, layer, block, size
        self.batch = stage.batch("TARGET_VERIFY", [0] * size, [1] * size, [block] * size)
        self.batch.out_cache_loc.zero_()
        self.inputs = stage.inputs(layer, self.batch)
        stage.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.run()  # compiles, as SGLang's warm-up forward does
        if HARDWARE:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self.run()

    def run(self):
        self.stage.backend.init_forward_metadata_in_graph(self.batch)
        return self.stage.forward(self.layer, self.batch, *self.inputs)

    def fill(self, requests, lens):
        """New contents for the first rows; the others are padded, as SGLang pads: slot 0, request 0, length 1."""
        n, block = len(requests), self.block
        real = self.stage.batch("TARGET_VERIFY", requests, lens, [block] * n)
        fill = self.stage.backend.get_cuda_graph_seq_len_fill_value()
        for name, rows, padding in (("req_pool_indices", n, 0), ("seq_lens", n, fill), ("out_cache_loc", n * block, 0)):
            static = getattr(self.batch, name)
            static.fill_(padding)
            static[:rows] = getattr(real, name)
        for static, new in zip(self.inputs, self.stage.inputs(self.layer, self.batch), strict=True):
            static.copy_(new)

    def replay(self, metadata=True):
        if metadata:
            self.stage.backend.init_forward_metadata_out_graph(self.batch)
        if not HARDWARE:
            return self.run()
        self.graph.replay()
        return self.out


@pytest.mark.parametrize("layer_id", [FULL, SLIDING])
def test_a_replay_reads_the_tables_of_its_own_batch(stage, layer_id):
    layer = stage.layers[layer_id]
    captured = Captured(stage, layer)
    tables = stage.backend.tables
    held = [t.data_ptr() for t in (tables.full, tables.sliding, tables.seq_lens)]
    for requests, lens in (([4, 1], [200, 5]), ([3, 2, 1], [130, 64, 13])):
        captured.fill(requests, lens)
        out = captured.replay()
        q, k, v = captured.inputs
        rows, used = [8] * len(requests), 8 * len(requests)
        stage.remember(layer, requests, rows, k[:used], v[:used])
        expected = stage.expected(layer, q[:used], requests, rows)
        stage.compare(out[:used], *expected, "replay")
        assert not out[used:].any(), "padded rows see no key, and page 0 is NaN"
    assert held == [t.data_ptr() for t in (tables.full, tables.sliding, tables.seq_lens)]


def test_stale_tables_would_show():
    """The comparison above fails when the metadata of a replay is not renewed."""
    stage = Stage()
    for number, length in enumerate(LENS, 1):
        stage.prefill(number, length)
    captured = Captured(stage, stage.layers[FULL])
    captured.fill([4, 1], [200, 5])
    captured.replay()
    captured.fill([3, 2], [130, 64])
    out = captured.replay(metadata=False)
    q, k, v = captured.inputs
    stage.remember(stage.layers[FULL], [3, 2], [8, 8], k[:16], v[:16])
    with pytest.raises(AssertionError, match="values differ"):
        stage.compare(out[:16], *stage.expected(stage.layers[FULL], q[:16], [3, 2], [8, 8]), "replay")


@pytest.mark.parametrize("mode, rows, padding", [("DECODE", 1, 2), ("TARGET_VERIFY", 8, 4)])
def test_rows_padded_without_requests(stage, mode, rows, padding):
    """C07: query rows behind the last request's are padding: 0, and nothing is read or written for them."""
    batch = stage.batch(mode, [4, 2], [200, 64], [rows] * 2)
    stage.backend.init_forward_metadata(batch)
    for layer in stage.layers:
        used = 2 * rows
        q, k, v = (torch.cat([t, t[:padding] * float("nan")]) for t in stage.inputs(layer, batch))
        out = stage.forward(layer, batch, q, k, v)
        assert not out[used:].any()
        stage.remember(layer, [4, 2], [rows] * 2, k[:used], v[:used])
        stage.compare(out[:used], *stage.expected(layer, q[:used], [4, 2], [rows] * 2), mode)


def test_fewer_rows_than_requests_is_an_error():
    stage = Stage()
    batch = stage.batch("TARGET_VERIFY", [1, 2], [5, 6], [8, 8])
    stage.backend.init_forward_metadata(batch)
    q, _, _ = stage.inputs(stage.layers[FULL], batch)
    with pytest.raises(ValueError, match="12 query rows for 2 requests of 8 rows each"):
        stage.forward(stage.layers[FULL], batch, q[:12], None, None)


def test_metadata_never_waits_for_the_device(stage):
    """C03: what reads a tensor's values on the host is a sync on a GPU, and ranks that sync unlike others deadlock."""
    batches = [
        stage.batch("DECODE", [3, 1], [130, 5], [1, 1]),
        stage.batch("TARGET_VERIFY", [2, 4], [64, 200], [8, 8]),
        stage.batch("DECODE", [], [], []),
    ]
    with contextlib.ExitStack() as stack:
        for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__"):
            fault = AssertionError(f"Tensor.{name} in metadata")
            stack.enter_context(mock.patch.object(torch.Tensor, name, side_effect=fault))
        for batch in batches:
            stage.backend.init_forward_metadata(batch)


# ---- faults that the comparisons above must find


def wrong(stage, mode, length, rows):
    with pytest.raises(AssertionError, match="values differ"):
        stage.step(mode, [4], [length], [rows])


def test_fault_the_window_is_wider_by_one():
    stage = Stage()
    stage.prefill(4, 200)
    wider = lambda size, _: None if size < 0 else size + 1  # noqa: E731
    with mock.patch.object(flydsl_backend, "window_keys", wider):
        wrong(stage, "DECODE", 200, 1)


def test_fault_sliding_layers_read_the_full_pools_pages():
    stage = Stage()
    stage.prefill(4, 100)
    stage.backend.tables.sliding = stage.backend.tables.full
    with mock.patch.object(stage.backend.tables, "translate", lambda slots: slots):
        wrong(stage, "TARGET_VERIFY", 100, 8)


def test_fault_the_block_is_not_counted():
    stage = Stage()
    stage.prefill(4, 100)
    paged = stage.backend._paged
    with mock.patch.object(
        stage.backend, "_paged", lambda q, layer, sinks, rows, extra: paged(q, layer, sinks, rows, 7)
    ):
        wrong(stage, "TARGET_VERIFY", 100, 8)


# ---- what is refused


def test_a_draft_tree_is_refused():
    """C35: a mask that no kernel of ours takes must not be dropped."""
    stage = Stage()
    batch = stage.batch("TARGET_VERIFY", [1], [5], [8])
    batch.spec_info.topk = 2
    with pytest.raises(UnsupportedContract, match=r"a draft tree \(topk 2\) .*; allowed: a chain, topk 1"):
        stage.backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(logit_cap=30.0), "layer 0 of MiMoV2ForCausalLM: logits soft cap 30.0; allowed: 0"),
        (dict(qk_head_dim=96), "qk_dim 96; allowed: 128, 192; use --attention-backend triton"),
    ],
)
def test_layers_are_refused_at_construction(change, reason):
    stage = Stage()
    for name, value in change.items():
        setattr(stage.layers[FULL], name, value)
    with pytest.raises(UnsupportedContract, match=reason):
        stage._backend()


def test_a_pool_that_no_kernel_reads_is_refused():
    stage = Stage()
    stage.pool.full_kv_pool.kv_cache_layout = "hnd"
    with pytest.raises(UnsupportedContract, match="layout hnd and nhd; allowed: nhd, vectorized_5d"):
        stage._backend()


def test_ocp_fp8_is_refused():
    """C36: gfx942 has the fnuz format; the same bytes are other numbers."""
    with pytest.raises(UnsupportedContract, match="KV cache of torch.float8_e4m3fn; allowed: .*float8_e4m3fnuz"):
        Stage(dtype=torch.float8_e4m3fn)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
