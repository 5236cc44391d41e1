"""The vector instructions that Triton's compiler emits for varied kernels all translate."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl

from gfx942sim.code_object import CodeObject
from gfx942sim.decode import decode
from gfx942sim.errors import UnknownInstruction
from gfx942sim.translate import translate


@triton.jit
def integers(a, b, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(a + at, mask=at < n, other=1), tl.load(b + at, mask=at < n, other=1)
    r = (x * y + x // y) ^ (x % y)
    r = tl.minimum(r + (x >> 3) - (y << 2), x) | tl.maximum(y, r) & x
    tl.store(out + at, tl.where(x > y, r, -r) + tl.abs(x), mask=at < n)


@triton.jit
def functions(a, b, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(a + at, mask=at < n, other=1.0), tl.load(b + at, mask=at < n, other=1.0)
    r = tl.exp(x) + tl.log(y) + tl.sqrt(y) + tl.rsqrt(y) + x / y + tl.sin(x) + tl.cos(y) + tl.floor(x)
    tl.store(out + at, tl.clamp(r + tl.div_rn(x, y) + tl.erf(x), -1e6, 1e6), mask=at < n)


@triton.jit
def converts(a, out, BLOCK: tl.constexpr, KIND: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(a + at)
    tl.store(out + at, (x.to(KIND).to(tl.float32) * 2 + x.to(tl.float32)).to(KIND))


@triton.jit
def reduces(a, out, scan, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(a + at)
    tl.store(scan + at, tl.cumsum(x, 0))
    tl.store(out, tl.sum(x, 0) + tl.max(x, 0))
    tl.store(out + 1, tl.argmax(x, 0))


@triton.jit
def randoms(out, seed, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.rand(seed, at) + tl.randn(seed, at + 7))


@triton.jit
def sorts(a, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.sort(tl.load(a + at)))


def two(kind):
    return {"a": f"*{kind}", "b": f"*{kind}", "out": f"*{kind}", "n": "i32"}


CASES = {f"integers-{kind}": (integers, two(kind), {"BLOCK": 512}) for kind in ("i8", "i16", "i32", "i64", "u32")}
CASES |= {"functions-fp32": (functions, two("fp32"), {"BLOCK": 256})}
CASES |= {
    f"converts-{name}": (converts, {"a": "*fp32", "out": f"*{name}"}, {"BLOCK": 512, "KIND": kind})
    for name, kind in (
        ("fp16", tl.float16),
        ("bf16", tl.bfloat16),
        ("fp8e4b8", tl.float8e4b8),
        ("fp8e5b16", tl.float8e5b16),
    )
}
CASES |= {
    f"reduces-{kind}": (reduces, {"a": f"*{kind}", "out": f"*{kind}", "scan": f"*{kind}"}, {"BLOCK": 512})
    for kind in ("fp32", "fp16", "i64", "i16")
}
CASES |= {"randoms": (randoms, {"out": "*fp32", "seed": "i32"}, {"BLOCK": 256})}
CASES |= {f"sorts-{kind}": (sorts, {"a": f"*{kind}", "out": f"*{kind}"}, {"BLOCK": 128}) for kind in ("fp32", "i16")}
# What the kernels were written to bring up; a compiler that no longer emits one of these makes the test weaker.
EXPECTED = {
    "integers-i64": "v_mad_u64_u32",
    "functions-fp32": "v_div_fixup_f32",
    "converts-fp8e4b8": "v_cvt_pk_fp8_f32",
    "reduces-fp32": "DPP16",
    "integers-i8": "SDWA",
    "randoms": "v_mul_hi_u32",
}


@pytest.mark.parametrize("case", CASES)
def test_all_vector_instructions_translate(case):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, signature, constants = CASES[case]
    source = ASTSource(function, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("hip", "gfx942", 64))
    code, kernel = CodeObject(compiled.asm["hsaco"]), compiled.metadata.name
    descriptor = code.descriptor(kernel)
    vector = [i for i in _instructions(code, descriptor) if i.encoding.startswith("VOP")]
    for instruction in vector:
        translate(instruction, descriptor)
    found = [f"{instruction.mnemonic} {instruction.encoding}" for instruction in vector]
    assert len(found) > 5
    assert EXPECTED.get(case, "") in " ".join(found)


def _instructions(code: CodeObject, descriptor) -> list:
    """From the kernel's entry to the last s_endpgm before what does not decode."""
    image, found, end = bytes(code.image), [], 0
    at = descriptor.entry + (256 if descriptor.preload_dwords else 0)
    while at < len(image):
        try:
            found.append(decode(image, at))
        except UnknownInstruction:
            break
        at += found[-1].size
        end = len(found) if found[-1].mnemonic == "s_endpgm" else end
    return found[:end]
