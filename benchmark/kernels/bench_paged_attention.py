"""Modelled cost of paged attention on gfx942: ours beside SGLang 0.5.23's Triton kernels, on the same work, in one run.

    python benchmark/kernels/bench_paged_attention.py [--json FILE] [--only NAME]

Code objects are compiled for gfx942, executed on gfx942sim, checked against the float reference, counted, and scaled.
MODELLED ON CODE OBJECTS, NOT MEASURED ON HARDWARE: the figures are bounds from single resources (MFMA, VALU, LDS, HBM)
at 2.1 GHz and 5.3 TB/s, on as many of 304 CUs as there are work-groups, each loading at most 64 B per clock; latencies
and stalls are not in them.

How a figure is made: one request is run at two short contexts; the difference is the cost per key, the rest the fixed
cost per work-group. Both are linear in what the kernels loop over. Sliding layers and the reduce kernel are run whole.
Runs are shared by all batches and contexts. The floor is max(least bytes / bandwidth, FLOPs / 1307 TFLOP/s) of the
whole GPU. HBM is the least bytes plus the partial results that a split context writes and reads. The peer's decode
splits each context in two at batch 48, and into 16, its limit, at smaller ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections import Counter

from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract
from sglang_dflash_rocm.kernels.paged_attention.launch import partitions_for
from sglang_dflash_rocm.testing.live import sglang_peers
from sglang_dflash_rocm.testing.paged_cases import PagedCase

CUS, SIMDS, CLOCK, HBM, PEAK = 304, 4, 2.1e9, 5.3e12, 1307e12
LOAD_WIDTH = 64  # bytes per clock and CU, CDNA3's vector L1
SHORT = 512  # keys of the first of two contexts that are run; the second has twice as many

FULL = PagedAttentionContract(q_heads=16, kv_heads=1, qk_dim=192, v_dim=128)
SLIDING = PagedAttentionContract(q_heads=16, kv_heads=2, qk_dim=192, v_dim=128, window=128, sinks=True)
DRAFT = PagedAttentionContract(16, 2, 128, 128, q_rows=8, window=1024, sinks=True, causal=False)


def rows(contract: PagedAttentionContract, count: int) -> PagedAttentionContract:
    return dataclasses.replace(contract, q_rows=count)


# Pages of a pool of 6 GiB, for rows that say so. Ours is the same code for every size; the peer loses 32-bit offsets.
LARGE_POOL = 160_000
LARGE = ", pool of 6 GiB"
CASES = {
    "decode, full layer": FULL,
    "decode, sliding layer": SLIDING,
    "verify (block 8), full layer": rows(FULL, 8),
    "verify (block 8), sliding layer": rows(SLIDING, 8),
    "draft block, window 1024": DRAFT,
    "decode, full layer, fp8": dataclasses.replace(FULL, kv_dtype="fp8_fnuz"),
    "verify (block 8), full layer, fp8": dataclasses.replace(FULL, q_rows=8, kv_dtype="fp8_fnuz"),
    "decode, full layer" + LARGE: FULL,
    "verify (block 8), full layer" + LARGE: rows(FULL, 8),
}


def counted(launch, case: PagedCase) -> Counter:
    """What one launch did in all. KV is what was asked for from tensors of the cache's shapes."""
    names = ("mfma_clocks", "valu_clocks", "lds_clocks", "mfma", "valu")
    found = Counter({name: launch.cost.count(name) for name in names})
    caches = tuple(str(list(pool.shape)) for pool in (case.k, case.v))
    buffers = launch.cost.buffers.items()
    found["kv"] = sum(b.get("read_bytes", 0) for label, b in buffers if label.endswith(caches))
    return found


def total(case: PagedCase, launches) -> Counter:
    """Sums, and `groups`: work-groups of the largest launch."""
    found = Counter()
    for launch in launches:
        found.update(counted(launch, case))
    found["groups"] = max(launch.cost.total_workgroups for launch in launches)
    return found


def combine(a: Counter, weight_a: float, b: Counter, weight_b: float) -> Counter:
    return Counter({name: a[name] * weight_a + b[name] * weight_b for name in a | b})


def scaled(run, contract: PagedAttentionContract, context: int, large: bool) -> Counter:
    """Cost of one request at `context` keys, from runs at SHORT and 2 * SHORT (or of the window, run whole)."""
    if contract.window is not None and contract.window < SHORT:
        return run(contract, 640, large)
    short, long = run(contract, SHORT, large), run(contract, 2 * SHORT, large)
    keys = context if contract.window is None else min(context, contract.window + contract.q_rows)
    return combine(short, 1 - (keys - SHORT) / SHORT, long, (keys - SHORT) / SHORT)


def make(contract: PagedAttentionContract, context: int, large: bool, partitions: int = 1) -> PagedCase:
    pool = dict(pages=LARGE_POOL, sparse=True) if large else {}
    return PagedCase(contract, [context - contract.q_rows], partitions=partitions, **pool)


@functools.cache
def ours(contract: PagedAttentionContract, context: int, large: bool, partitions: int = 1) -> Counter:
    case = make(contract, context, large, partitions)
    return total(case, case.check(cost=True, uninitialised="off"))


@functools.cache
def peer(contract: PagedAttentionContract, context: int, large: bool, splits: int) -> Counter:
    case = make(contract, context, large)
    if contract.q_rows > 1:
        return total(case, sglang_peers.verify(case, cost=True)[1])
    return total(case, sglang_peers.decode(case, splits=splits, cost=True)[1])


def bounds(cost: Counter, batch: int, hbm_bytes: float) -> dict[str, float]:
    """Microseconds that each resource is busy with the batch."""
    cus = min(CUS, cost["groups"] * batch)
    return {
        "MFMA": cost["mfma_clocks"] * batch / (cus * SIMDS * CLOCK) * 1e6,
        "VALU": cost["valu_clocks"] * batch / (cus * SIMDS * CLOCK) * 1e6,
        "LDS": cost["lds_clocks"] * batch / (cus * CLOCK) * 1e6,
        "HBM": hbm_bytes / min(HBM, cus * LOAD_WIDTH * CLOCK) * 1e6,
    }


def floor(c: PagedAttentionContract, batch: int, context: int) -> tuple[float, float, float]:
    """(microseconds, least bytes in all, least KV bytes per request)."""
    keys = context if c.window is None else min(context, c.window + c.q_rows - 1)
    kv = keys * c.kv_heads * (c.qk_dim + c.v_dim) * c.kv_bytes
    io = c.q_rows * c.q_heads * (c.qk_dim + c.v_dim) * 2
    seen = keys if c.window is None else min(context, c.window)
    flops = 2 * c.rows * c.kv_heads * seen * (c.qk_dim + c.v_dim) * batch
    least = batch * (kv + io)
    return max(least / HBM, flops / PEAK) * 1e6, least, kv


def measure(name: str, contract: PagedAttentionContract, batch: int, context: int) -> dict:
    base, least, kv = floor(contract, batch, context)
    parts = partitions_for(contract, batch, context)
    row = {"case": name, "batch": batch, "context": context, "floor": base, "partitions": parts}
    large, sides = name.endswith(LARGE), {"ours": ours}
    if contract.kv_dtype == "bf16" and contract.causal:
        sides["peer"] = functools.partial(peer, splits=2 if batch >= 48 else 16)
    for side, run in sides.items():
        cost = scaled(run, contract, context, large)
        extra = 0.0
        if side == "ours" and parts > 1:
            keys = max(SHORT, parts * 64)
            # What the split adds: the fixed cost of the other work-groups, and the reduce kernel.
            cost = combine(cost, 1, combine(ours(contract, keys, large, parts), 1, ours(contract, keys, large), -1), 1)
            extra = 2 * batch * contract.kv_heads * parts * contract.rows * contract.v_dim * 4
        busy = bounds(cost, batch, least + extra)
        row[side] = busy | {"bound": max(busy.values()), "ratio": max(busy.values()) / base, "kv": cost["kv"] / kv}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--only", help="a part of a case's name")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 48])
    parser.add_argument("--context", type=int, nargs="*", default=[1024, 8192, 65536])
    options = parser.parse_args()
    print(__doc__.split("\n\n")[2].replace("\n", " "))
    print("us busy per resource; KV: bytes asked for over the least; ratio: bound over floor\n")
    print("| case | batch | context | whose | MFMA | VALU | LDS | HBM | bound | floor | ratio | KV |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    found = []
    for name, contract in CASES.items():
        if options.only and options.only not in name:
            continue
        for batch in options.batch:
            for context in options.context:
                row = measure(name, contract, batch, context)
                found.append(row)
                for side in ("ours", "peer"):
                    if side in row:
                        s = row[side]
                        numbers = [f"{s[k]:.1f}" for k in ("MFMA", "VALU", "LDS", "HBM", "bound")]
                        numbers += [f"{row['floor']:.1f}", f"{s['ratio']:.2f}", f"{s['kv']:.2f}x"]
                        print(f"| {name} | {batch} | {context} | {side} | " + " | ".join(numbers) + " |", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
