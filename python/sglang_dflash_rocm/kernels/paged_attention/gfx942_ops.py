"""Building blocks of our gfx942 kernels in FlyDSL: buffer access by 64-bit base, lane operations, control flow.

A buffer resource ends where its `num_records` says: loads past it give 0 without touching memory, which is how rows
that do not exist become zeros at no cost.
"""

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, fly, llvm, rocdl, scf
from flydsl.expr.typing import T

# A raw buffer of 32-bit words: what the resource's fourth dword must say for loads that name their own width.
_RAW_FLAGS = (7 << 12) | (4 << 15)


def raw(value):
    """The MLIR value behind a DSL value."""
    return value if isinstance(value, ir.Value) else value.ir_value()


def base_of(tensor):
    """The 64-bit address of a tensor argument."""
    pointer = fly.extract_aligned_pointer_as_index(ir.Type.parse("!llvm.ptr"), raw(tensor))
    return fx.Int64(llvm.PtrToIntOp(ir.IntegerType.get_signless(64), pointer).result)


def resource(address, num_records):
    """A buffer resource.

    Args:
        address: Int64, wave-uniform.
        num_records: bytes from there that exist, Int32, wave-uniform.
    """
    pointer = llvm.IntToPtrOp(ir.Type.parse("!llvm.ptr"), raw(address)).result
    return rocdl.MakeBufferRsrcOp(
        ir.Type.parse("!llvm.ptr<8>"),
        pointer,
        raw(fx.Int16(0)),
        raw(fx.Int64(num_records)),
        raw(fx.Int32(_RAW_FLAGS)),
    ).result


def load(buffer, offset, words):
    """`words` (1, 2 or 4) dwords at a byte offset per lane, as Vector of Int32."""
    kind = T.i32 if words == 1 else ir.VectorType.get([words], T.i32)
    value = rocdl.raw_ptr_buffer_load(kind, buffer, raw(offset), raw(fx.Int32(0)))
    if words == 1:
        return fx.Vector.from_elements([fx.Int32(value)], dtype=fx.Int32)
    return fx.Vector(value, dtype=fx.Int32)


def load_number(buffer, index, dtype):
    """Element `index` of a buffer of float32 or bf16 ("float32", "bf16"), per lane, as Float32."""
    if dtype == "float32":
        return float_at(load(buffer, index * 4, 1))
    half = rocdl.raw_ptr_buffer_load(T.i16, buffer, raw(index * 2), raw(fx.Int32(0)))
    return (fx.Int32(arith.extui(T.i32, half)) << 16).bitcast(fx.Float32)


def store(buffer, offset, vector):
    """Store a Vector of 1, 2 or 4 Int32 at a byte offset per lane."""
    value = raw(vector[0]) if vector.numel == 1 else raw(vector)
    rocdl.raw_ptr_buffer_store(value, buffer, raw(offset), raw(fx.Int32(0)))


def scalar_load(buffer, index):
    """One Int32 at a wave-uniform dword index, into an SGPR."""
    words = llvm.bitcast(ir.VectorType.get([4], T.i32), llvm.ptrtoint(ir.IntegerType.get_signless(128), buffer))
    args = [words, raw(fx.Int32(index) * fx.Int32(4)), raw(fx.Int32(0))]
    return fx.Int32(llvm.call_intrinsic(T.i32, "llvm.amdgcn.s.buffer.load.i32", args, [], []))


def uniform(value):
    """Tell the compiler that an Int32 is the same in all lanes of the wave."""
    return fx.Int32(rocdl.readfirstlane(T.i32, raw(value)))


def lane_id():
    """The lane's number in its wave, made anew: for code that should not keep it in a register from the start."""
    ones = raw(fx.Int32(-1))
    low = llvm.call_intrinsic(T.i32, "llvm.amdgcn.mbcnt.lo", [ones, raw(fx.Int32(0))], [], [])
    return fx.Int32(llvm.call_intrinsic(T.i32, "llvm.amdgcn.mbcnt.hi", [ones, low], [], []))


def any_lane(condition):
    """Wave-uniform: is the condition true in some lane?"""
    mask = fx.Int64(rocdl.ballot(ir.IntegerType.get_signless(64), raw(condition)))
    return mask != fx.Int64(0)


def exp2(value):
    """2**value of a Float32 in one instruction; below 2**-126 it gives 0."""
    return fx.Float32(llvm.call_intrinsic(T.f32, "llvm.amdgcn.exp2.f32", [raw(value)], [], []))


def log2(value):
    return fx.Float32(llvm.call_intrinsic(T.f32, "llvm.amdgcn.log.f32", [raw(value)], [], []))


def fma(a, b, c):
    return fx.Float32(llvm.intr_fma(raw(a), raw(b), raw(c)))


def maximum(a, b):
    return fx.Float32(llvm.intr_maxnum(raw(a), raw(b)))


def permute_bytes(high, low, selector):
    """v_perm_b32: four bytes of (high, low), byte 0 of low is 0."""
    return fx.Int32(
        llvm.call_intrinsic(T.i32, "llvm.amdgcn.perm", [raw(high), raw(low), raw(fx.Int32(selector))], [], [])
    )


def low_halves(high, low):
    return permute_bytes(high, low, 0x05040100)


def high_halves(high, low):
    return permute_bytes(high, low, 0x07060302)


def pack_bf16(low, high):
    """Two non-negative finite Float32 to bf16, rounded to nearest (ties up), as one Int32."""
    half = fx.Int32(0x8000)
    return high_halves(high.bitcast(fx.Int32) + half, low.bitcast(fx.Int32) + half)


def mfma_bf16(a, b, c):
    """v_mfma_f32_16x16x16_bf16. a, b: Vector of 2 Int32 (four bf16); c: Vector of 4 Float32."""
    kind = ir.VectorType.get([4], T.f32)
    operands = [raw(a.bitcast(fx.Int16)), raw(b.bitcast(fx.Int16)), raw(c), 0, 0, 0]
    return fx.Vector(fx.rocdl.mfma_f32_16x16x16bf16_1k(kind, operands), dtype=fx.Float32)


def pair(low, high):
    return fx.Vector.from_elements([low, high], dtype=fx.Int32)


def _wrappers(state):
    """Per value, a function that gives an MLIR result the DSL type of the value that it replaces."""

    def wrapper(value):
        if isinstance(value, fx.Vector):
            return lambda result: fx.Vector(result, dtype=value.dtype)
        return type(value)

    return [wrapper(v) for v in state]


def _wrap(wrappers, results):
    return [w(r) for w, r in zip(wrappers, results, strict=True)]


def loop(first, last, state, body):
    """for i in [first, last): state = body(i, state). `state` is a list of DSL values; gives the final list."""
    wrappers = _wrappers(state)
    step = scf.ForOp(raw(first), raw(last), raw(fx.Int32(1)), [raw(v) for v in state])
    with ir.InsertionPoint(step.body):
        after = body(fx.Int32(step.induction_variable), _wrap(wrappers, step.inner_iter_args))
        scf.YieldOp([raw(v) for v in after])
    return _wrap(wrappers, step.results)


def when(condition, state, body):
    """state = body(state) if the wave-uniform condition holds, else state."""
    values = [raw(v) for v in state]
    branch = scf.IfOp(raw(condition), [v.type for v in values], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.YieldOp([raw(v) for v in body(state)])
    with ir.InsertionPoint(branch.else_block):
        scf.YieldOp(values)
    return _wrap(_wrappers(state), branch.results)


def only_if(condition, body):
    """Run body() where the condition holds, for its stores."""
    branch = scf.IfOp(raw(condition), [], has_else=False)
    with ir.InsertionPoint(branch.then_block):
        body()
        scf.YieldOp([])


def larger(a, b):
    """Signed maximum of two Int32."""
    return fx.Int32(arith.maxsi(raw(a), raw(b)))


def smaller(a, b):
    """Signed minimum of two Int32."""
    return fx.Int32(arith.minsi(raw(a), raw(b)))


def unsigned_below(a, b):
    """a < b of two Int32 as unsigned numbers: one comparison for 0 <= a < b."""
    return fx.Uint32(raw(a)) < fx.Uint32(raw(b))


def reciprocal(value):
    return fx.Float32(rocdl.rcp(T.f32, raw(value)))


def fp8_to_f32(word):
    """Four e4m3fnuz of an Int32 as four Float32, exactly."""
    kind = ir.VectorType.get([2], T.f32)
    pairs = [fx.Vector(rocdl.cvt_pk_f32_fp8(kind, raw(word), high), dtype=fx.Float32) for high in (False, True)]
    return [p[i] for p in pairs for i in range(2)]


def fp8_to_bf16(word):
    """Four e4m3fnuz of an Int32 as two Int32 of bf16 pairs, exactly: three mantissa bits fit."""
    bits = [x.bitcast(fx.Int32) for x in fp8_to_f32(word)]
    return high_halves(bits[1], bits[0]), high_halves(bits[3], bits[2])


def words(value):
    """A Float32 as Vector of one Int32."""
    return fx.Vector.from_elements([value.bitcast(fx.Int32)], dtype=fx.Int32)


def vector_words(values):
    """Float32 values as a Vector of Int32."""
    return fx.Vector.from_elements([v.bitcast(fx.Int32) for v in values], dtype=fx.Int32)


def as_words(vector):
    return vector.bitcast(fx.Int32)


def floats(vector):
    return vector.bitcast(fx.Float32)


def float_at(vector):
    """The Float32 in a Vector of one Int32."""
    return vector[0].bitcast(fx.Float32)


def bf16_words(vector):
    """Vector of Float32 rounded to nearest even, as Int32 pairs."""
    return vector.to(fx.BFloat16).bitcast(fx.Int32)


def lds_view(storage):
    """(load, store) at a byte offset of the work-group's LDS; load(offset, words) gives a Vector of Int32."""
    base = fx.recast_iter(fx.Uint8, storage.buf.ptr)

    def pointer(offset, count):
        kind = fx.PointerType.get(fx.Int32.ir_type, fx.AddressSpace.Shared, min(16, 4 * count))
        return fx.recast_iter(kind, fx.add_offset(base, fx.make_int_tuple(offset)))

    def load(offset, count):
        return fx.ptr_load(pointer(offset, count), result_type=fx.Vector.make_type(count, fx.Int32))

    def store(offset, vector):
        fx.ptr_store(vector, pointer(offset, vector.numel))

    return load, store


def first_bytes(count, words):
    """Masks of the first `count` (any Int32) bytes of that many dwords."""
    masks = []
    for w in range(words):
        bits = (count - 4 * w) * 8
        partial = (fx.Int32(1) << smaller(larger(bits, fx.Int32(0)), fx.Int32(31))) - 1
        masks.append((bits >= 32).select(fx.Int32(-1), partial))
    return masks
