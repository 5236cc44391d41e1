"""How fast the simulator runs: an attention kernel of four waves on 64 work-groups, on one core.

    python benchmark/sim/bench_simulator.py [--repeat 5] [--context 256]

The kernel is a Triton flash-decoding loop of MiMo's shape (16 query heads, one KV head, QK 192, V 128, bf16), one
request per work-group. Printed: wave-instructions per second after a warm-up launch, in each mode of checking. Times
are of this machine, not of a GPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import triton
import triton.language as tl

from gfx942sim.triton_target import simulated_triton

HEADS, QK, V = 16, 192, 128


@triton.jit
def attend(q, k, v, out, length, scale, heads: tl.constexpr, tile: tl.constexpr):
    request = tl.program_id(0)
    h, t = tl.arange(0, heads), tl.arange(0, tile)
    d, d2, dv = tl.arange(0, 128), 128 + tl.arange(0, 64), tl.arange(0, 128)
    row = q + (request * heads + h)[:, None] * 192
    q1, q2 = tl.load(row + d[None, :]), tl.load(row + d2[None, :])
    best = tl.full((heads,), -float("inf"), tl.float32)
    total = tl.zeros((heads,), tl.float32)
    sums = tl.zeros((heads, 128), tl.float32)
    for start in range(0, length, tile):
        keys = (request * length + start + t)[None, :] * 192
        scores = tl.dot(q1, tl.load(k + keys + d[:, None])) + tl.dot(q2, tl.load(k + keys + d2[:, None]))
        scores = scores * scale
        top = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp2(scores - top[:, None])
        fade = tl.exp2(best - top)
        values = tl.load(v + (request * length + start + t)[:, None] * 128 + dv[None, :])
        sums = sums * fade[:, None] + tl.dot(p.to(tl.bfloat16), values)
        total = total * fade + tl.sum(p, 1)
        best = top
    tl.store(out + (request * heads + h)[:, None] * 128 + dv[None, :], sums / total[:, None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--context", type=int, default=256, help="tokens per request, a multiple of 64")
    parser.add_argument("--groups", type=int, default=64, help="work-groups (requests)")
    options = parser.parse_args()
    torch.manual_seed(0)
    n, length = options.groups, options.context
    q = torch.randn(n, HEADS, QK).bfloat16()
    k, v = torch.randn(n, length, QK).bfloat16(), torch.randn(n, length, V).bfloat16()
    out = torch.zeros(n, HEADS, V)
    scale = QK**-0.5
    print(f"{platform.machine()}, one core, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{n} work-groups of 4 waves, context {length}")
    modes = {
        "no checks": dict(races="off"),
        "race check": dict(races="raise"),
        "race check, LDS writes, cost": dict(races="raise", uninitialised="lds", cost=True),
    }
    for name, mode in modes.items():
        times = []
        for _ in range(options.repeat + 1):
            out.zero_()
            with simulated_triton(**mode) as device:
                began = time.perf_counter()
                attend[(n,)](q, k, v, out, length, scale * 1.4426950408889634, heads=HEADS, tile=64, num_warps=4)
                times.append(time.perf_counter() - began)
        expected = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
        error = (out.double() - expected).abs().max().item()
        executed, best = device.launches[0].instructions, min(times[1:])
        print(
            f"{name:30s} {executed} wave-instructions, best of {options.repeat}: {best:.3f} s, "
            f"{executed / best / 1e6:.2f} M/s, first (with translation) {times[0]:.2f} s, largest error {error:.1e}"
        )


if __name__ == "__main__":
    main()
