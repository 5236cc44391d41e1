"""FlyDSL kernels written for these tests. Importing this module sets the process up for FlyDSL on the simulator.

No `from __future__ import annotations` here: FlyDSL reads the annotations as objects.
"""

import functools

import torch

from gfx942sim import flydsl_target

flydsl_target.prepare()

import flydsl.compiler as flyc  # noqa: E402
import flydsl.expr as fx  # noqa: E402
from flydsl.expr import gpu, range_constexpr  # noqa: E402
from flydsl.expr.typing import T  # noqa: E402

THREADS = 256
TILE = 64  # rows of A and of B (columns of C) that one work-group multiplies
STREAM = fx.Stream(None)


def flat(tensor, element, width, copy):
    """(load, store) of `width` elements at an element index, over a buffer resource."""
    atom = fx.make_copy_atom(copy, element)
    register = fx.make_rmem_tensor(fx.make_layout(width, 1), element)
    base = fx.get_iter(fx.rocdl.make_buffer_tensor(tensor, max_size=False))
    cells = fx.logical_divide(fx.Tensor(fx.make_view(base, fx.make_layout(1 << 28, 1))), fx.make_layout(1, 1))

    def load(index):
        fx.copy(atom, fx.slice(cells, (None, index)), register)
        return fx.Vector(fx.memref_load_vec(register))

    def store(index, vector):
        register.store(vector)
        fx.copy(atom, register, fx.slice(cells, (None, index)))

    return load, store


def lds_view(storage):
    """(load, store) of a vector at a byte offset of the work-group's LDS."""
    base = fx.recast_iter(fx.Uint8, storage.buf.ptr)

    def pointer(offset, element):
        kind = fx.PointerType.get(element.ir_type, fx.AddressSpace.Shared, 4)
        return fx.recast_iter(kind, fx.add_offset(base, fx.make_int_tuple(offset)))

    def load(offset, element, count):
        return fx.ptr_load(pointer(offset, element), result_type=fx.Vector.make_type(count, element))

    def store(offset, element, vector):
        fx.ptr_store(vector, pointer(offset, element))

    return load, store


@functools.cache
def vector_add():
    @flyc.kernel(known_block_size=(THREADS, 1, 1))
    def vector_add_kernel(a: fx.Tensor, b: fx.Tensor, out: fx.Tensor):
        i = fx.Int32(gpu.block_id("x")) * THREADS + fx.Int32(gpu.thread_id("x"))
        load_a, _ = flat(a, fx.Float32, 1, fx.rocdl.BufferCopy32b())
        load_b, _ = flat(b, fx.Float32, 1, fx.rocdl.BufferCopy32b())
        _, store = flat(out, fx.Float32, 1, fx.rocdl.BufferCopy32b())
        store(i, load_a(i) + load_b(i))

    @flyc.jit
    def run(a: fx.Tensor, b: fx.Tensor, out: fx.Tensor, groups: fx.Int32, stream: fx.Stream = STREAM):
        vector_add_kernel(a, b, out).launch(grid=(groups, 1, 1), block=(THREADS, 1, 1), stream=stream)

    return run


@functools.cache
def reverse_through_lds(barrier: bool = True, written: int = THREADS):
    """out[i] = in[255 - i] by way of LDS: every wave reads what another one wrote.

    barrier=False plants a race; written < 256 leaves LDS behind that nobody wrote.
    """

    @fx.struct
    class Storage:
        buf: fx.Array[fx.Int32, THREADS * 4, 16]

    @flyc.kernel(known_block_size=(THREADS, 1, 1))
    def reverse_kernel(source: fx.Tensor, out: fx.Tensor):
        i = fx.Int32(gpu.thread_id("x"))
        load, _ = flat(source, fx.Float32, 4, fx.rocdl.BufferCopy128b())
        _, store = flat(out, fx.Float32, 4, fx.rocdl.BufferCopy128b())
        lds_load, lds_store = lds_view(fx.SharedAllocator().allocate(Storage).peek())
        value = load(i * 4)
        if i < written:
            lds_store(i * 16, fx.Float32, value)
        if fx.const_expr(barrier):
            gpu.barrier()
        store(i * 4, lds_load((THREADS - 1 - i) * 16, fx.Float32, 4))

    @flyc.jit
    def run(source: fx.Tensor, out: fx.Tensor, stream: fx.Stream = STREAM):
        reverse_kernel(source, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    return run


@functools.cache
def gemm(fp8: bool, inner: int, last_barrier: bool = True):
    """C[64 g, 64] = A[64 g, inner] @ B[64, inner]^T in float32, tiles of 32 through LDS.

    last_barrier=False drops the barrier that keeps a wave from overwriting a tile that others still read.
    """
    depth = 32
    element = fx.Float8E4M3FNUZ if fp8 else fx.BFloat16
    size = 1 if fp8 else 2
    per_thread = TILE * depth // THREADS
    copy = fx.rocdl.BufferCopy64b if fp8 else fx.rocdl.BufferCopy128b
    row_bytes = depth * size + 16  # the padding spreads rows over the banks
    words = per_thread * size // 4

    @fx.struct
    class Storage:
        buf: fx.Array[fx.Int32, 2 * TILE * row_bytes // 4, 16]

    @flyc.kernel(known_block_size=(THREADS, 1, 1))
    def gemm_kernel(a: fx.Tensor, b: fx.Tensor, c: fx.Tensor):
        thread = fx.Int32(gpu.thread_id("x"))
        group = fx.Int32(gpu.block_id("x"))
        wave, lane = thread // 64, thread % 64
        quarter, row16 = lane // 16, lane % 16
        load_a, _ = flat(a, element, per_thread, copy())
        load_b, _ = flat(b, element, per_thread, copy())
        _, store_c = flat(c, fx.Float32, 1, fx.rocdl.BufferCopy32b())
        lds_load, lds_store = lds_view(fx.SharedAllocator().allocate(Storage).peek())
        row, column = thread // (depth // per_thread), thread % (depth // per_thread) * per_thread
        sums = [fx.Vector.filled(4, 0.0, fx.Float32) for _ in range(4)]
        for step in range_constexpr(inner // depth):
            to = row * row_bytes + column * size
            at = column + step * depth
            lds_store(to, fx.Int32, load_a((group * TILE + row) * inner + at).bitcast(fx.Int32))
            lds_store(to + TILE * row_bytes, fx.Int32, load_b(row * inner + at).bitcast(fx.Int32))
            gpu.barrier()
            for part in range_constexpr(1 if fp8 else 2):
                k = quarter * 8 + part * 32
                left = lds_load((wave * 16 + row16) * row_bytes + k, fx.Int32, 2)
                for n in range_constexpr(4):
                    right = lds_load((TILE + n * 16 + row16) * row_bytes + k, fx.Int32, 2)
                    if fx.const_expr(fp8):
                        operands = [left.bitcast(fx.Int64)[0], right.bitcast(fx.Int64)[0], sums[n], 0, 0, 0]
                        sums[n] = fx.Vector(fx.rocdl.mfma_f32_16x16x32_fp8_fp8(T.f32x4, operands))
                    else:
                        operands = [left.bitcast(fx.Int16), right.bitcast(fx.Int16), sums[n], 0, 0, 0]
                        sums[n] = fx.Vector(fx.rocdl.mfma_f32_16x16x16bf16_1k(T.f32x4, operands))
            if fx.const_expr(last_barrier):
                gpu.barrier()
        for n in range_constexpr(4):
            for i in range_constexpr(4):
                value = fx.Vector.from_elements([sums[n][i]], dtype=fx.Float32)
                store_c((group * TILE + wave * 16 + quarter * 4 + i) * TILE + n * 16 + row16, value)

    assert words in (2, 4)

    @flyc.jit
    def run(a: fx.Tensor, b: fx.Tensor, c: fx.Tensor, groups: fx.Int32, stream: fx.Stream = STREAM):
        gemm_kernel(a, b, c).launch(grid=(groups, 1, 1), block=(THREADS, 1, 1), stream=stream)

    return run


@functools.cache
def compiled(jit, *types):
    """Compile for arguments of these (shape, dtype), or ints; gives a function of tensors and the stream."""
    placeholders = [t if isinstance(t, int) else torch.empty(t[0], dtype=t[1]) for t in types]
    return flyc.compile(jit, *placeholders, STREAM)
