"""Scalar instructions on the state of a wave: its lane mask, program counter and hardware registers."""

from __future__ import annotations

import pytest
from tinygrad.renderer.amd.dsl import EXEC_LO, s
from tinygrad.renderer.amd.dsl import Reg as Register
from tinygrad.runtime.autogen.amd.cdna.enum import SOP1Op, SOP2Op, SOPKOp, SOPPOp
from tinygrad.runtime.autogen.amd.cdna.ins import SOP1, SOP2, SOPK, SOPK_LIT, SOPP

import machine
from gfx942sim.errors import OutOfRange, UnknownInstruction
from gfx942sim.state import EXEC, words_to_lanes


@pytest.mark.parametrize(
    "instruction",
    [
        SOP1(SOP1Op.S_MOV_B64, EXEC_LO, 5),
        SOP1(SOP1Op.S_MOV_B32, EXEC_LO, 5),
        SOP1(SOP1Op.S_MOV_B32, Register(127, 1), 5),
        SOP1(SOP1Op.S_NOT_B64, EXEC_LO, EXEC_LO),
        SOP2(SOP2Op.S_AND_B64, EXEC_LO, EXEC_LO, s[4:5]),
        SOP2(SOP2Op.S_LSHL_B64, EXEC_LO, EXEC_LO, 7),
        SOP2(SOP2Op.S_CSELECT_B64, EXEC_LO, s[4:5], -1),
        SOP2(SOP2Op.S_OR_B32, EXEC_LO, s[4], s[5]),
        SOPK(SOPKOp.S_MOVK_I32, EXEC_LO, 77),
        SOP1(SOP1Op.S_BITSET0_B64, EXEC_LO, 3),
        SOP1(SOP1Op.S_WQM_B64, EXEC_LO, s[4:5]),
    ],
    ids=str,
)
def test_writes_to_exec_reach_the_lane_mask(instruction):
    before = 0xFFFF0000FFFF00FF
    batch = machine.run([instruction], sgpr={4: 0x0000FFF0, 5: 0x12345678}, exec=before)
    now = int(batch.sgpr[EXEC, 0]) | int(batch.sgpr[EXEC + 1, 0]) << 32
    assert now != before
    assert (batch.exec == words_to_lanes(batch.sgpr[EXEC], batch.sgpr[EXEC + 1])).all()


def test_program_counter():
    """getpc and call link to the next instruction; swappc and setpc jump per wave; image_base is 0 on the bench."""
    code = [
        SOP1(SOP1Op.S_GETPC_B64, s[0:1]),  # 0
        SOP2(SOP2Op.S_ADD_U32, s[2], s[0], s[8]),  # 4: 0x14 in wave 0, 0x18 in wave 1
        SOP1(SOP1Op.S_MOV_B32, s[3], 0),  # 8
        SOP1(SOP1Op.S_SWAPPC_B64, s[4:5], s[2:3]),  # 12
        SOPP(SOPPOp.S_ENDPGM, 0),  # 16
        SOP2(SOP2Op.S_ADD_U32, s[6], s[6], 1),  # 20: wave 0 only
        SOPK(SOPKOp.S_CALL_B64, s[10:11], 1),  # 24: to 32
        SOPP(SOPPOp.S_ENDPGM, 0),  # 28
        SOP2(SOP2Op.S_ADD_U32, s[7], s[7], 1),  # 32
        SOP1(SOP1Op.S_SETPC_B64, ssrc0=s[4:5]),  # 36: to 16
    ]
    batch = machine.run(code, sgpr={6: 0, 7: 0, 8: [16, 20]})
    assert (batch.sgpr[0] == 4).all() and (batch.sgpr[1] == 0).all()
    assert (batch.sgpr[4] == 16).all() and (batch.sgpr[10] == 28).all()
    assert batch.sgpr[6].tolist() == [1, 0] and batch.sgpr[7].tolist() == [1, 1]


def test_jump_before_the_image():
    with pytest.raises(OutOfRange, match="before the image"):
        machine.run([SOP1(SOP1Op.S_SETPC_B64, ssrc0=s[4:5])], sgpr={4: 0, 5: 0x80000000})


def hwreg(number_: int, offset: int, size: int) -> int:
    return number_ | offset << 6 | size - 1 << 11


def test_hardware_registers():
    # rsrc1: denormals kept (MODE 7..4), DX10 clamp (MODE 8), IEEE (MODE 9).
    rsrc1 = 0xF << 16 | 1 << 21 | 1 << 23
    code = [
        SOPK(SOPKOp.S_GETREG_B32, s[0], hwreg(1, 0, 32)),
        SOPK(SOPKOp.S_GETREG_B32, s[1], hwreg(1, 4, 4)),
        SOPK(SOPKOp.S_GETREG_B32, s[2], hwreg(20, 0, 32)),
        SOPK_LIT(SOPKOp.S_SETREG_IMM32_B32, s[0], hwreg(1, 4, 2), literal=3),
        SOPK_LIT(SOPKOp.S_SETREG_IMM32_B32, s[0], hwreg(1, 12, 7), literal=0x55),  # exceptions: ignored
        SOPK(SOPKOp.S_SETREG_B32, s[0], hwreg(1, 0, 8)),
    ]
    batch = machine.run(code, rsrc1=rsrc1)
    assert [int(batch.sgpr[i, 0]) for i in range(3)] == [0x3F0, 0xF, 0]


@pytest.mark.parametrize(
    "instruction",
    [
        SOPK_LIT(SOPKOp.S_SETREG_IMM32_B32, s[0], hwreg(1, 4, 2), literal=0),  # flush f32 denormals
        SOPK_LIT(SOPKOp.S_SETREG_IMM32_B32, s[0], hwreg(1, 0, 4), literal=1),  # round up
        SOPK(SOPKOp.S_SETREG_B32, s[0], hwreg(1, 0, 8)),  # per wave: one of them differs
        SOPK(SOPKOp.S_SETREG_B32, s[0], hwreg(3, 0, 8)),
        SOPK(SOPKOp.S_GETREG_B32, s[0], hwreg(4, 0, 32)),
    ],
    ids=str,
)
def test_hardware_registers_that_matter(instruction):
    with pytest.raises(UnknownInstruction, match="etreg"):
        machine.run([instruction], sgpr={0: [0xF0, 0xF1]})
