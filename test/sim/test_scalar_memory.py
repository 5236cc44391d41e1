"""Scalar loads: every way to form the address, what is out of range, and who is told so."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import Reg as Register
from tinygrad.renderer.amd.dsl import s
from tinygrad.runtime.autogen.amd.cdna.enum import SMEMOp, SOP1Op, SOPPOp
from tinygrad.runtime.autogen.amd.cdna.ins import SMEM, SOP1, SOPP

import machine
from gfx942sim.errors import OutOfRange, UnknownInstruction

DATA = np.arange(1000, 1064, dtype=np.uint32)
EXEC_LO = Register(126, 2)


def pointer(array: np.ndarray, offsets=0) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) words of address + offset."""
    address = np.asarray(offsets, np.uint64) + np.uint64(array.ctypes.data)
    return (address & np.uint64(0xFFFFFFFF)).astype(np.uint32), (address >> np.uint64(32)).astype(np.uint32)


def load(op: SMEMOp, count: int, **fields) -> SMEM:
    base = 4 if "BUFFER" in op.name else 2
    sdata = s[16 : 16 + count - 1] if count > 1 else s[16]
    return SMEM(op, sdata=sdata, sbase=s[4 : 4 + base - 1], **fields)


def loaded(batch, count: int) -> np.ndarray:
    """[waves, count]"""
    return batch.sgpr[16 : 16 + count].T


LOADS = {1: SMEMOp.S_LOAD_DWORD, **{n: SMEMOp[f"S_LOAD_DWORDX{n}"] for n in (2, 4, 8, 16)}}
BUFFER_LOADS = {1: SMEMOp.S_BUFFER_LOAD_DWORD, **{n: SMEMOp[f"S_BUFFER_LOAD_DWORDX{n}"] for n in (2, 4, 8, 16)}}
# The encodings that LLVM makes for `0x14`, `s1`, `s1 offset:0x14` and `-4`; s1 holds 8.
OFFSETS = {
    "constant": ({"imm": 1, "offset": 0x14}, 5),
    "register": ({"offset": 1}, 2),
    "both": ({"imm": 1, "offset": 0x14, "soffset_en": 1, "soffset": s[1]}, 7),
    "negative": ({"imm": 1, "offset": (1 << 21) - 4}, -1),
}


@pytest.mark.parametrize("form", OFFSETS)
@pytest.mark.parametrize("count", LOADS)
@pytest.mark.parametrize("same", [True, False], ids=["uniform", "per wave"])
def test_load(count, form, same):
    fields, dword = OFFSETS[form]
    starts = np.array([16, 16] if same else [16, 80])
    low, high = pointer(DATA, starts)
    batch = machine.run([load(LOADS[count], count, **fields)], sgpr={1: 8, 4: low, 5: high}, buffers=[DATA])
    for wave in range(2):
        first = starts[wave] // 4 + dword
        assert loaded(batch, count)[wave].tolist() == DATA[first : first + count].tolist()


def test_load_for_some_waves():
    """Waves that skip the load keep their registers; the others get what their own address holds."""
    low, high = pointer(DATA, np.array([0, 4, 8, 12]))
    code = [SOPP(SOPPOp.S_CBRANCH_SCC0, simm16=2), load(LOADS[2], 2, imm=1)]
    scc = np.array([0, 1, 0, 1])
    batch = machine.run(code, sgpr={4: low, 5: high, 16: 1, 17: 2}, buffers=[DATA], waves=4, scc=scc)
    assert loaded(batch, 2).tolist() == [[1, 2], [1001, 1002], [1, 2], [1003, 1004]]


def test_load_over_its_own_address():
    low, high = pointer(DATA)
    code = [SMEM(SMEMOp.S_LOAD_DWORDX4, sdata=s[4:7], sbase=s[4:5], imm=1)]
    batch = machine.run(code, sgpr={4: low, 5: high}, buffers=[DATA])
    assert batch.sgpr[4:8, 1].tolist() == [1000, 1001, 1002, 1003]


@pytest.mark.parametrize(
    "start, count, message",
    [
        (256, 1, "4-byte scalar read .* by wave 0 .*: 0 bytes past the end of buffer 0"),
        (252, 2, "8-byte scalar read .*crosses its end"),
        (-4, 1, "4 bytes before buffer 0"),
        (2, 1, "not a multiple of 4"),
        ([0, 256], 1, r"by wave 1 of the batch \(wave 1 of work-group \(0, 0, 0\)\): 0 bytes past"),
    ],
)
def test_load_outside(start, count, message):
    low, high = pointer(DATA, np.asarray(start).astype(np.uint64))
    with pytest.raises(OutOfRange, match=message):
        machine.run([load(LOADS[count], count, imm=1)], sgpr={4: low, 5: high}, buffers=[DATA])


def test_waves_may_read_different_buffers():
    other = np.full(8, 7, np.uint32)
    far, near = pointer(DATA), pointer(other)
    registers = {4: [far[0], near[0]], 5: [far[1], near[1]]}
    batch = machine.run([load(LOADS[4], 4, imm=1)], sgpr=registers, buffers=[DATA, other])
    assert loaded(batch, 4).tolist() == [[1000, 1001, 1002, 1003], [7, 7, 7, 7]]


def resource(records, offsets=0, stride=0) -> dict[int, object]:
    low, high = pointer(DATA, offsets)
    return {4: low, 5: high | np.uint32(stride << 16), 6: records, 7: 0x27000}


@pytest.mark.parametrize("form", ["constant", "register", "both"])
@pytest.mark.parametrize("count", BUFFER_LOADS)
def test_buffer_load(count, form):
    fields, dword = OFFSETS[form]
    code = [load(BUFFER_LOADS[count], count, **fields)]
    batch = machine.run(code, sgpr={1: 8, **resource(256, np.array([0, 0]))}, buffers=[DATA])
    assert (loaded(batch, count) == DATA[dword : dword + count]).all()


def test_buffer_load_beyond_the_records_is_zero():
    """Each dword for itself, and per wave: num_records is 8, 12 and 0 bytes."""
    code = [load(BUFFER_LOADS[4], 4, imm=1, offset=4)]
    batch = machine.run(code, sgpr=resource(np.array([8, 12, 0])), buffers=[DATA], waves=3)
    assert loaded(batch, 4).tolist() == [[1001, 0, 0, 0], [1001, 1002, 0, 0], [0, 0, 0, 0]]


def test_buffer_load_of_nothing_needs_no_memory():
    batch = machine.run([load(BUFFER_LOADS[2], 2, imm=1)], sgpr={4: 0, 5: 0, 6: 0, 7: 0})
    assert loaded(batch, 2).tolist() == [[0, 0], [0, 0]]


def test_buffer_load_beyond_the_memory():
    with pytest.raises(OutOfRange, match="by wave 1 .*past the end of buffer 0"):
        machine.run([load(BUFFER_LOADS[1], 1, imm=1)], sgpr=resource(np.array([64, 64]), [0, 256]), buffers=[DATA])


@pytest.mark.parametrize(
    "code, registers, message",
    [
        (load(BUFFER_LOADS[1], 1, imm=1), resource(64, stride=4), "stride"),
        (load(BUFFER_LOADS[1], 1, imm=1, offset=(1 << 21) - 4), resource(64), "negative"),
        (SMEM(SMEMOp.S_STORE_DWORD, sdata=s[0], sbase=s[4:5], imm=1), {}, "not implemented"),
        (SMEM(SMEMOp.S_LOAD_DWORDX2, sdata=EXEC_LO, sbase=s[4:5], imm=1), {}, "into SGPR code 126"),
    ],
    ids=["structured", "negative", "store", "exec"],
)
def test_not_implemented(code, registers, message):
    with pytest.raises(UnknownInstruction, match=message):
        machine.run([code], sgpr=registers, buffers=[DATA])


def test_clocks_advance_and_caches_do_nothing():
    code = [
        SMEM(SMEMOp.S_MEMTIME, sdata=s[0:1]),
        SMEM(SMEMOp.S_DCACHE_INV),
        SMEM(SMEMOp.S_DCACHE_WB),
        SMEM(SMEMOp.S_MEMREALTIME, sdata=s[2:3]),
        SOP1(SOP1Op.S_MOV_B32, s[4], 1),
    ]
    first, second = machine.run(code), machine.run(code)
    assert (first.sgpr[2] > first.sgpr[0]).all() and (first.sgpr[[1, 3]] == 0).all()
    assert (first.sgpr[:5] == second.sgpr[:5]).all()
