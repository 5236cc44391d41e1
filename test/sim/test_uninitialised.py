"""Reads of LDS and registers that nobody wrote."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import s, v
from tinygrad.runtime.autogen.amd.cdna.enum import DSOp, SOPPOp, VOP1Op, VOP2Op, VOP3POp
from tinygrad.runtime.autogen.amd.cdna.ins import DS, SOPP, VOP1, VOP2, VOP3P_MFMA

from gfx942sim.decode import decode
from gfx942sim.errors import Uninitialised
from gfx942sim.registers import vgpr_reads, vgpr_writes
from gfx942sim.uninitialised import LdsWriteCheck, RegisterWriteCheck
from machine import run

LANE = np.arange(64)


def ds(op, **fields):
    return DS(op, **({"vdst": v[0], "addr": v[0], "data0": v[2], "data1": v[0]} | fields))


def test_lds_that_was_written_by_another_wave_is_fine():
    own = np.stack([4 * LANE, 256 + 4 * LANE])
    check = LdsWriteCheck(True)
    barrier = SOPP(SOPPOp.S_BARRIER, simm16=0)
    run(
        [ds(DSOp.DS_WRITE_B32), barrier, ds(DSOp.DS_READ_B32, vdst=v[3], addr=v[1])],
        vgpr={0: own, 1: own[::-1], 2: 7},
        observers=[check],
    )
    assert check.found == []


@pytest.mark.parametrize("written, read, byte", [("B32", "B64", 4), ("B8", "U16", 1), ("B16", "B32", 2)])
def test_the_first_missing_byte_is_named(written, read, byte):
    program = [
        ds(getattr(DSOp, f"DS_WRITE_{written}")),
        ds(getattr(DSOp, f"DS_READ_{read}"), vdst=v[4:5] if read == "B64" else v[4]),
    ]
    with pytest.raises(Uninitialised, match=f"LDS byte {byte} is read at 0x8.*wave 0, lane 0"):
        run(program, vgpr={0: 8 * LANE, 2: 7}, waves=1, observers=[LdsWriteCheck(True)])


def test_lanes_that_are_off_write_nothing():
    program = [ds(DSOp.DS_WRITE_B32), ds(DSOp.DS_READ_B32, vdst=v[3])]
    check = LdsWriteCheck(False)
    run(program, vgpr={0: 4 * LANE, 2: 7}, waves=1, exec=0xFFFF, observers=[check])
    assert check.found == []
    whole = [ds(DSOp.DS_READ_B32, vdst=v[3])]
    run(whole, vgpr={0: 4 * LANE}, waves=1, observers=[check])
    assert [(read.what, read.lane) for read in check.found] == [("LDS byte 0", 0)]


def test_findings_are_one_per_instruction():
    check = LdsWriteCheck(False)
    run([ds(DSOp.DS_READ_B32, vdst=v[3])] * 2, vgpr={0: 4 * LANE}, observers=[check])
    assert [read.address for read in check.found] == [0, 8]


def registers(program, **state):
    check = RegisterWriteCheck(False)
    run(program, register_check=check, **state)
    return [(read.what, read.address) for read in check.found]


def test_registers_are_followed_lane_by_lane():
    move = VOP1(VOP1Op.V_MOV_B32_E32, v[1], v[0])
    add = VOP2(VOP2Op.V_ADD_U32_E32, v[2], v[1], v[0])
    assert registers([move, add]) == []
    assert registers([add]) == [("v1", 0)]
    unknown = VOP2(VOP2Op.V_ADD_U32_E32, v[2], v[9], v[9])
    assert registers([unknown]) == [("v9", 0)]


def test_stopping_at_the_first():
    with pytest.raises(Uninitialised, match="v7 is read at 0x0"):
        run([VOP1(VOP1Op.V_MOV_B32_E32, v[1], v[7])], register_check=RegisterWriteCheck(True))


def spans(instruction):
    decoded = decode(instruction.to_bytes() + bytes(16), 0)
    return [(r.start, r.stop) for r in vgpr_reads(decoded)], [(r.start, r.stop) for r in vgpr_writes(decoded)]


@pytest.mark.parametrize(
    "instruction, reads, writes",
    [
        (VOP2(VOP2Op.V_FMAC_F32_E32, v[5], v[1], v[2]), [(1, 2), (2, 3), (5, 6)], [(5, 6)]),
        (VOP2(VOP2Op.V_ADD_U32_E32, v[5], s[1], v[2]), [(2, 3)], [(5, 6)]),
        (ds(DSOp.DS_WRITE_B128, data0=v[4:7]), [(0, 1), (4, 8)], []),
        (ds(DSOp.DS_READ_B64, vdst=v[4:5], addr=v[1]), [(1, 2)], [(4, 6)]),
        (ds(DSOp.DS_BPERMUTE_B32, vdst=v[4], addr=v[1], data0=v[2]), [(1, 2), (2, 3)], [(4, 5)]),
    ],
)
def test_what_instructions_read_and_write(instruction, reads, writes):
    assert spans(instruction) == (reads, writes)


def test_matrix_operands_count_agprs_from_256():
    op = VOP3POp.V_MFMA_F32_16X16X16_F16
    a_agpr = VOP3P_MFMA(op, vdst=v[0:3], src0=v[4:5], src1=v[6:7], src2=v[0:3], acc=1, acc_cd=1)
    assert spans(a_agpr) == ([(260, 262), (6, 8), (256, 260)], [(256, 260)])
