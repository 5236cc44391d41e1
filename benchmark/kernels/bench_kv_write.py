"""Measured on the GPU at hand: one launch of store_kv beside what a pool without a fused writer does, two index_puts.

    python benchmark/kernels/bench_kv_write.py

bf16, K 192 and V 128 wide, random slots; graphs of 100 writes, replayed; microseconds per write and the ratio. Both are
checked against each other first.
"""

from __future__ import annotations

import torch

from sglang_dflash_rocm.kernels.kv_cache.layout import shapes, write_reference
from sglang_dflash_rocm.kernels.kv_cache.write import store_kv

PAGE, SLOTS, WRITES, REPLAYS = 64, 1 << 18, 100, 20


def seconds(write) -> float:
    """Seconds per call of `write`, in a graph."""
    write()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(WRITES):
            write()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / (WRITES * REPLAYS)


def compare(layout: str, heads: int, tokens: int) -> None:
    make = dict(dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(tokens, heads, 192, **make), torch.randn(tokens, heads, 128, **make)
    slots = torch.randperm(SLOTS, device="cuda")[:tokens]
    k_shape, v_shape = shapes(layout, SLOTS, heads, 192, 128, PAGE, torch.bfloat16)
    ours, theirs = ([torch.zeros(shape, **make) for shape in (k_shape, v_shape)] for _ in range(2))
    page, offset, x = slots // PAGE, slots % PAGE, 8

    def index_put():
        if layout == "nhd":
            theirs[0][slots], theirs[1][slots] = k, v
        else:
            theirs[0][page, :, :, offset, :] = k.unflatten(2, (-1, x))
            theirs[1][page, :, offset // x, :, offset % x] = v

    fused = seconds(lambda: store_kv(k, v, *ours, slots, layout=layout, page_size=PAGE))
    separate = seconds(index_put)
    expected = [torch.zeros_like(t) for t in ours]
    write_reference(k, v, *expected, slots, layout, PAGE)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(theirs, expected, strict=True))
    row = f"{fused * 1e6:.2f} | {separate * 1e6:.2f} | {separate / fused:.1f}"
    print(f"| {layout} | {heads} | {tokens} | {row} |", flush=True)


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("| layout | KV heads | tokens | store_kv us | index_put us | ratio |\n|---|---|---|---|---|---|")
    for layout in ("nhd", "vectorized_5d"):
        for heads in (1, 2):
            for tokens in (8, 384, 8192):
                compare(layout, heads, tokens)


if __name__ == "__main__":
    main()
