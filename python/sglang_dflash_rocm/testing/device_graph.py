"""The parts of the flydsl backend that run on any GPU, in a real graph: page tables, slot translation, KV writes.

FlyDSL's kernels need gfx942, so attention is plain torch here, from the same tables and pools, without the host.
"""

from __future__ import annotations

import torch

from sglang_dflash_rocm.kernels.kv_cache.layout import gather_reference, shapes
from sglang_dflash_rocm.kernels.kv_cache.write import store_kv
from sglang_dflash_rocm.kernels.paged_attention.reference import attend
from sglang_dflash_rocm.srt.layers.attention.flydsl_pa import PageTables

REQUESTS, CONTEXT, PAGE, BLOCK, HEADS, Q_HEADS, QK, V = 6, 512, 64, 8, 2, 16, 192, 128


class GraphedVerify:
    """A sliding layer's verify on static buffers of four requests, captured once.

    Args:
        device: a CUDA or HIP device. layout: of the KV pool. window: keys that a query sees.
    """

    SIZE = 4

    def __init__(self, device: torch.device, layout: str, window: int = 128) -> None:
        torch.manual_seed(0)
        self.device, self.layout, self.window = device, layout, window
        pages = REQUESTS * CONTEXT // PAGE
        dealt = (torch.randperm(pages) + 1).view(REQUESTS, -1)
        slots = (dealt[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
        self.slots = torch.cat([torch.zeros(1, CONTEXT, dtype=torch.int64), slots]).to(device)
        swa_pages = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(pages) + 1])
        every = torch.arange((pages + 1) * PAGE)
        self.to_swa = (swa_pages[every // PAGE] * PAGE + every % PAGE).to(device)
        k_shape, v_shape = shapes(layout, (pages + 1) * PAGE, HEADS, QK, V, PAGE, torch.bfloat16)
        nan = float("nan")
        self.k, self.v = (torch.full(shape, nan, dtype=torch.bfloat16, device=device) for shape in (k_shape, v_shape))
        self.tables = PageTables(self.slots.int(), PAGE, lambda s: self.to_swa[s.long()])
        tokens = self.SIZE * BLOCK
        self.rows = torch.zeros(self.SIZE, dtype=torch.int64, device=device)
        self.seq_lens = torch.ones(self.SIZE, dtype=torch.int64, device=device)
        self.out_slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        make = dict(dtype=torch.bfloat16, device=device)
        self.q = torch.zeros(tokens, Q_HEADS, QK, **make)
        self.new_k, self.new_v = torch.zeros(tokens, HEADS, QK, **make), torch.zeros(tokens, HEADS, V, **make)
        self.history: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.tables.fill(self.rows, self.seq_lens)
        self.forward()  # Triton compiles
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.forward()

    def forward(self) -> torch.Tensor:
        """What is captured: translate the slots, store keys and values, attend."""
        slots = self.to_swa[self.out_slots]
        store_kv(self.new_k, self.new_v, self.k, self.v, slots, layout=self.layout, page_size=PAGE)
        return self.attend(self.tables.sliding[: self.SIZE], self.tables.seq_lens[: self.SIZE] + BLOCK)

    def attend(self, table: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        at = torch.arange(CONTEXT, device=self.device)
        slots = table.long().repeat_interleave(PAGE, 1) * PAGE + at % PAGE
        k, v = gather_reference(self.k, self.v, slots.flatten(), PAGE)
        k, v = (t.float().unflatten(0, slots.shape) for t in (k, v))
        q = self.q.float().unflatten(0, (self.SIZE, BLOCK)).unflatten(2, (HEADS, -1))
        position = kv_lens[:, None] - BLOCK + torch.arange(BLOCK, device=self.device)
        seen = (at <= position[..., None]) & (at > position[..., None] - self.window) & (kv_lens[:, None, None] > 0)
        scores = torch.einsum("nrhgd,nkhd->nhgrk", q, k) * QK**-0.5
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0.0)
        v = torch.where(seen.any(1)[..., None, None], v, 0.0)
        return torch.einsum("nhgrk,nkhd->nrhgd", weights, v).flatten(2, 3).flatten(0, 1)

    def step(self, requests: list[int], lens: list[int]) -> None:
        """Fill the static buffers for these requests (from 1), replay, and compare with a reference on the host.

        Raises:
            AssertionError: a value is wrong, or a padded row is not 0.
        """
        n, used = len(requests), len(requests) * BLOCK
        self.rows.zero_()
        self.seq_lens.fill_(1)
        self.out_slots.zero_()
        for static in (self.q, self.new_k, self.new_v):
            static.copy_(torch.randn(static.shape))
        self.rows[:n] = torch.tensor(requests)
        self.seq_lens[:n] = torch.tensor(lens)
        for i, (request, length) in enumerate(zip(requests, lens, strict=True)):
            self._prefill(request, length)
            self.out_slots[i * BLOCK : (i + 1) * BLOCK] = self.slots[request, length : length + BLOCK]
        self.tables.fill(self.rows, self.seq_lens)
        self.graph.replay()
        out = self.out.cpu().double()
        assert not out[used:].any(), "padded rows see no key"
        for i, request in enumerate(requests):
            part = slice(i * BLOCK, (i + 1) * BLOCK)
            k, v = (
                torch.cat([old, new[part].cpu().double()])
                for old, new in zip(self.history[request], (self.new_k, self.new_v), strict=True)
            )
            self.history[request] = k, v
            expected, _ = attend(
                self.q[part].cpu().double(), k, v, first_key=0, kv_len=len(k), scale=QK**-0.5, window_keys=self.window
            )
            assert (out[part] - expected).abs().max() < 1e-3, f"request {request}"

    def _prefill(self, request: int, length: int) -> None:
        """The keys in front of the block, stored eagerly if the request is new."""
        if request in self.history:
            assert len(self.history[request][0]) == length, "a request goes on where it stopped"
            return
        k, v = torch.randn(length, HEADS, QK).bfloat16(), torch.randn(length, HEADS, V).bfloat16()
        self.history[request] = k.double(), v.double()
        slots = self.to_swa[self.slots[request, :length]]
        new = (t.to(self.device) for t in (k, v))
        store_kv(*new, self.k, self.v, slots, layout=self.layout, page_size=PAGE)


def check(device: torch.device, layout: str) -> None:
    """Three replays over changing batches: requests join, go on and leave.

    Raises:
        AssertionError: see GraphedVerify.step.
    """
    graphed = GraphedVerify(device, layout)
    graphed.step([5, 2], [300, 64])
    graphed.step([1, 2, 3, 5], [7, 72, 130, 308])
    graphed.step([2], [80])
