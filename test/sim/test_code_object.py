"""The loader: descriptors, metadata, resources and what it refuses."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import triton_kernels as kernels
from gfx942sim import CodeObject
from gfx942sim.code_object import Resources, elf_size
from gfx942sim.errors import BadCodeObject
from gfx942sim.triton_target import simulated_triton


@pytest.fixture(scope="module")
def matmul():
    a, b, c = torch.zeros(128, 64).bfloat16(), torch.zeros(64, 128).bfloat16(), torch.zeros(128, 128)
    with simulated_triton():
        return kernels.matmul[(1,)](a, b, c, 64, rows=128, columns=128, depth=32, num_warps=4)


def test_resources_and_arguments_agree_with_the_compiler(matmul):
    code = CodeObject(matmul.asm["hsaco"])
    resources = code.resources("matmul")
    text = matmul.asm["amdgcn"]
    assert f".vgpr_count:     {resources.vgpr}" in text
    assert f".sgpr_count:     {resources.sgpr}" in text
    assert f".agpr_count:     {resources.agpr}" in text
    assert resources.vgpr_spills == resources.scratch == 0
    assert resources.lds == 0  # Triton's LDS is all dynamic
    # Three pointers and inner, then Triton's two scratch pointers.
    assert [a.size for a in code.arguments("matmul")] == [8, 8, 8, 4, 8, 8]
    descriptor = code.descriptor("matmul")
    assert descriptor.kernarg == resources.kernarg
    assert code.symbols["matmul"][0] == descriptor.entry


def test_an_elf_in_memory_is_measured_by_its_section_headers(matmul):
    elf = matmul.asm["hsaco"]
    followed = elf + b"more"
    assert elf_size(lambda at, size: followed[at : at + size]) == len(elf)


@pytest.mark.parametrize(
    "content, message",
    [(b"not an elf at all", "not an ELF"), (b"\x7fELF" + bytes(80), "expected machine 224")],
)
def test_other_files_are_refused(content, message):
    with pytest.raises(BadCodeObject, match=message):
        CodeObject(content)


def test_another_target_is_refused():
    source = ASTSource(kernels.add, dict(x="*fp32", y="*fp32", out="*fp32", n="i32", block="constexpr"), {"block": 64})
    other = triton.compile(source, target=GPUTarget("hip", "gfx950", 64))
    with pytest.raises(BadCodeObject, match="gfx942"):
        CodeObject(other.asm["hsaco"])


def test_an_unknown_kernel_is_named_with_the_known_ones(matmul):
    with pytest.raises(BadCodeObject, match="no kernel 'mat'; this code object has matmul"):
        CodeObject(matmul.asm["hsaco"]).descriptor("mat")


@pytest.mark.parametrize(
    "vgpr, lds, threads, waves",
    [
        (64, 0, 256, 8),
        (128, 0, 256, 4),
        (132, 0, 256, 3),
        (512, 0, 256, 1),
        (64, 32 * 1024, 256, 2),
        (64, 40 * 1024, 256, 1),
        (64, 64 * 1024, 512, 2),
    ],
)
def test_waves_per_simd(vgpr, lds, threads, waves):
    resources = Resources(
        vgpr=vgpr, agpr=0, sgpr=16, vgpr_spills=0, sgpr_spills=0, scratch=0, lds=lds, kernarg=0, code=0
    )
    assert resources.waves_per_simd(threads) == waves
