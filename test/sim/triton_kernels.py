"""Triton kernels written for the simulator's tests."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def read_one_row_past(x, out, rows, width: tl.constexpr):
    """The planted fault: program `rows` does not exist in x."""
    row = tl.program_id(0) + 1
    column = tl.arange(0, width)
    tl.store(out + (row - 1) * width + column, tl.load(x + row * width + column))


@triton.jit
def softmax_times(x, weights, out, columns, stride, rows: tl.constexpr, padded: tl.constexpr, width: tl.constexpr):
    """out = softmax(x) @ weights over rows of x, `columns` of `padded` used."""
    r = tl.program_id(0) * rows + tl.arange(0, rows)
    c = tl.arange(0, padded)
    d = tl.arange(0, width)
    logits = tl.load(x + r[:, None] * stride + c[None, :], mask=c[None, :] < columns, other=-float("inf"))
    logits = logits.to(tl.float32)
    p = tl.exp(logits - tl.max(logits, 1)[:, None])
    w = tl.load(weights + c[:, None] * width + d[None, :], mask=c[:, None] < columns, other=0.0)
    result = tl.dot(p.to(tl.bfloat16), w) / tl.sum(p, 1)[:, None]
    tl.store(out + r[:, None] * width + d[None, :], result)


@triton.jit
def matmul(a, b, c, inner, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr):
    """c = a @ b: a [rows * programs, inner], b [inner, columns], both contiguous; c float32."""
    r = tl.program_id(0) * rows + tl.arange(0, rows)
    n = tl.arange(0, columns)
    k = tl.arange(0, depth)
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, inner, depth):
        left = tl.load(a + r[:, None] * inner + (start + k)[None, :])
        right = tl.load(b + (start + k)[:, None] * columns + n[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + r[:, None] * columns + n[None, :], total)


@triton.jit
def integers(x, y, out, block: tl.constexpr):
    """64- and 32-bit integer arithmetic, divisions and shifts."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    a, b = tl.load(x + i), tl.load(y + i)
    wide = a.to(tl.int64) * b.to(tl.int64)
    value = wide // (b.to(tl.int64) * 3 + 7) + (a % (b + 1)) + (a >> 3) + tl.abs(a - b) + (a ^ b)
    tl.store(out + i, value)


@triton.jit
def histogram(x, counts, total, n, block: tl.constexpr):
    """Atomics: counts[x[i]] += 1 and total += sum(x)."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    inside = i < n
    value = tl.load(x + i, mask=inside, other=0)
    tl.atomic_add(counts + value, 1, mask=inside)
    tl.atomic_add(total, tl.sum(value.to(tl.float32)))


@triton.jit
def scan_and_sort(x, sums, ordered, block: tl.constexpr):
    i = tl.arange(0, block)
    value = tl.load(x + i)
    tl.store(sums + i, tl.cumsum(value, 0))
    tl.store(ordered + i, tl.sort(value))
