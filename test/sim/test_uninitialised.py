"""Reads of what nobody wrote, and the registers that each kind of instruction reads and writes."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import DPP, EXEC_LO, SDWA, s, v
from tinygrad.renderer.amd.dsl import Reg as Register
from tinygrad.runtime.autogen.amd.cdna import enum, ins

import machine
from gfx942sim import translate
from gfx942sim.decode import Instruction, decode
from gfx942sim.errors import Uninitialised
from gfx942sim.registers import ignores_exec, vgpr_reads, vgpr_writes
from gfx942sim.uninitialised import LdsWriteCheck, RegisterWriteCheck, UninitialisedRead

OFF = Register(127, 1)
ALL = slice(None)
LANE = np.arange(64)
READ, WRITE = (Instruction(a, 8, f"ds_{a}", "DS", ins.DS(enum.DSOp.DS_READ_B32)) for a in (8, 16))


def access(check, batch, instruction, kind, address, size=4, waves=ALL, lanes=range(64)):
    selection = waves if isinstance(waves, slice) else np.array(waves)
    shape = batch.exec[selection].shape
    address = np.broadcast_to(np.asarray(address, np.int64), shape)
    active = np.broadcast_to(np.isin(LANE, list(lanes)), shape)
    check.lds(batch, selection, instruction, address, active, size, kind)


class TestLds:
    def test_what_was_written_may_be_read(self):
        """Through every width, by any wave of the group."""
        batch, check = machine.run([], waves=2, groups=2), LdsWriteCheck(True)
        access(check, batch, WRITE, "write", 4 * LANE, waves=[0, 3])
        for size in (1, 2, 4, 8, 16):
            access(check, batch, READ, "read", LANE % (256 // size) * size, size=size)
        assert check.found == []

    @pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 16])
    @pytest.mark.parametrize("start", [256, 260])
    def test_first_missing_byte(self, size, start):
        """Bytes up to 261 are written, and only of the first group."""
        batch, check = machine.run([], waves=2, groups=2), LdsWriteCheck(False)
        access(check, batch, WRITE, "write", 4 * LANE, waves=[0])
        access(check, batch, WRITE, "write", 256, size=4, waves=[0], lanes=[0])
        access(check, batch, WRITE, "write", 260, size=2, waves=[0], lanes=[0])
        access(check, batch, READ, "read", start, size=size, waves=[1], lanes=[7])
        missing = start + size > 262
        expected = UninitialisedRead("LDS", 262, 8, "ds_8", (0, 0, 0), 1, 7)
        assert check.found == ([expected] if missing else [])

    def test_other_group(self):
        batch, check = machine.run([], waves=2, groups=2), LdsWriteCheck(False)
        access(check, batch, WRITE, "write", 64, waves=[0])
        access(check, batch, READ, "read", 64, waves=[0, 1, 2, 3], lanes=[5])
        assert check.found == [UninitialisedRead("LDS", 64, 8, "ds_8", (1, 0, 0), 0, 5)]

    def test_atomic_reads_and_then_writes(self):
        batch, check = machine.run([]), LdsWriteCheck(False)
        access(check, batch, WRITE, "atomic", 64, lanes=[0])
        assert [(r.where, r.mnemonic) for r in check.found] == [(64, "ds_16")]
        access(check, batch, READ, "read", 64)
        assert len(check.found) == 1

    def test_one_finding_for_each_instruction(self):
        batch, check = machine.run([]), LdsWriteCheck(False)
        for address in (0, 8):
            access(check, batch, READ, "read", address)
        assert len(check.found) == 1
        assert LdsWriteCheck(False).found == []

    def test_a_batch_begins_anew(self):
        check = LdsWriteCheck(True)
        access(check, machine.run([]), WRITE, "write", 0)
        with pytest.raises(Uninitialised, match=r"LDS byte 0x0, which nobody wrote \(wave 0, lane 3"):
            access(check, machine.run([]), READ, "read", 0, lanes=[3])


PLACES = itertools.count(0, 16)


def placed(code) -> Instruction:
    """Each at an address of its own, as in a kernel."""
    return dataclasses.replace(decode(code.to_bytes() + bytes(16), 0), address=next(PLACES))


MFMA = ins.VOP3P_MFMA(
    enum.VOP3POp.V_MFMA_F32_16X16X16_F16, v[0:3], v[4:5], v[6:7], v[8:11], acc=2, acc_cd=1, opsel_hi2=0
)
LOAD, STORE = enum.MUBUFOp.BUFFER_LOAD_DWORDX2, enum.MUBUFOp.BUFFER_STORE_DWORDX2
GLOBAL, SCRATCH, DS = ins.GLOBAL, ins.SCRATCH, ins.DS
G, S, D = enum.GLOBALOp, enum.SCRATCHOp, enum.DSOp
TABLE = [
    # instruction, registers read, registers written (AGPR n is 256 + n)
    (ins.VOP1(enum.VOP1Op.V_MOV_B32_E32, v[1], v[2]), {2}, {1}),
    (ins.VOP1(enum.VOP1Op.V_MOV_B32_E32, v[1], s[2]), set(), {1}),
    (ins.VOP1(enum.VOP1Op.V_NOP_E32), set(), set()),
    (ins.VOP1(enum.VOP1Op.V_READFIRSTLANE_B32_E32, v[1], v[2]), {2}, set()),
    (ins.VOP1(enum.VOP1Op.V_SWAP_B32_E32, v[1], v[2]), {1, 2}, {1, 2}),
    (ins.VOP2(enum.VOP2Op.V_ADD_F32_E32, v[1], v[2], v[3]), {2, 3}, {1}),
    (ins.VOP2(enum.VOP2Op.V_FMAC_F32_E32, v[1], v[2], v[3]), {1, 2, 3}, {1}),
    (ins.VOP2(enum.VOP2Op.V_FMAC_F64_E32, v[0:1], v[2:3], v[4:5]), set(range(6)), {0, 1}),
    (ins.VOP2(enum.VOP2Op.V_DOT4C_I32_I8_E32, v[1], v[2], v[3]), {1, 2, 3}, {1}),
    (ins.VOP3(enum.VOP3Op.V_FMA_F32, v[1], v[2], s[3], v[4]), {2, 4}, {1}),
    (ins.VOP3(enum.VOP3Op.V_READLANE_B32, v[1], v[2], 3), {2}, set()),
    (ins.VOP3(enum.VOP3Op.V_WRITELANE_B32, v[1], s[2], 3), set(), {1}),
    (ins.VOP3(enum.VOP3Op.V_LSHLREV_B64, v[0:1], v[2], v[4:5]), {2, 4, 5}, {0, 1}),
    (ins.VOP3(enum.VOP3Op.V_CVT_PK_FP8_F32, v[1], v[2], v[3]), {1, 2, 3}, {1}),
    (ins.VOP3(enum.VOP3Op.V_FMA_F16, v[1], v[2], v[3], v[4]), {2, 3, 4}, {1}),
    (ins.VOP3(enum.VOP3Op.V_FMA_F16, v[1], v[2], v[3], v[4], opsel=8), {1, 2, 3, 4}, {1}),
    (ins.VOP3_SDST(enum.VOP3Op.V_CMP_LT_F32_E64, s[0:1], v[2], v[3]), {2, 3}, set()),
    (ins.VOPC(enum.VOPCOp.V_CMP_LT_F64_E32, v[2:3], v[4:5]), {2, 3, 4, 5}, set()),
    (ins.VOP3SD(enum.VOP3SDOp.V_MAD_U64_U32, v[0:1], s[0:1], v[2], v[3], v[4:5]), {2, 3, 4, 5}, {0, 1}),
    (ins.VOP3P(enum.VOP3POp.V_PK_MUL_F32, v[0:1], v[2:3], v[4:5]), {2, 3, 4, 5}, {0, 1}),
    (ins.VOP3P(enum.VOP3POp.V_MAD_MIXHI_F16, v[1], v[2], v[3], v[4]), {1, 2, 3, 4}, {1}),
    (ins.VOP3P(enum.VOP3POp.V_ACCVGPR_READ, v[1], v[2]), {258}, {1}),
    (ins.VOP3P(enum.VOP3POp.V_ACCVGPR_WRITE, v[1], v[2]), {2}, {257}),
    (ins.VOP1(enum.VOP1Op.V_ACCVGPR_MOV_B32_E32, v[1], v[2]), {258}, {257}),
    (ins.VOP1_DPP16(enum.VOP1Op.V_MOV_B32_E32, v[1], DPP, v[2], dpp=0x111, row_mask=15, bank_mask=15), {1, 2}, {1}),
    (ins.VOP1_DPP16(enum.VOP1Op.V_MOV_B32_E32, v[1], DPP, v[2], dpp=0x111, bc=1, row_mask=15, bank_mask=15), {2}, {1}),
    (ins.VOP1_DPP16(enum.VOP1Op.V_MOV_B32_E32, v[1], DPP, v[2], dpp=0x1B, row_mask=15, bank_mask=15), {2}, {1}),
    (ins.VOP1_DPP16(enum.VOP1Op.V_MOV_B32_E32, v[1], DPP, v[2], dpp=0x1B, row_mask=3, bank_mask=15), {1, 2}, {1}),
    (ins.VOP2_SDWA(enum.VOP2Op.V_ADD_U32_E32, v[1], SDWA, v[3], v[2], dst_sel=5, dst_unused=2), {1, 2, 3}, {1}),
    (ins.VOP2_SDWA(enum.VOP2Op.V_ADD_U32_E32, v[1], SDWA, v[3], v[2], dst_sel=5, dst_unused=0), {2, 3}, {1}),
    (ins.VOP2_SDWA(enum.VOP2Op.V_ADD_U32_E32, v[1], SDWA, v[3], v[2], dst_sel=6, dst_unused=2, s1=1), {2}, {1}),
    (MFMA, {4, 5, 262, 263, 264, 265, 266, 267}, {256, 257, 258, 259}),
    (
        ins.VOP3P_MFMA(enum.VOP3POp.V_MFMA_F32_16X16X16_F16, v[0:3], v[4:5], v[6:7], 0, opsel_hi=0, opsel_hi2=0),
        {4, 5, 6, 7},
        {0, 1, 2, 3},
    ),
    (
        ins.VOP3P_MFMA(
            enum.VOP3POp.V_SMFMAC_F32_16X16X32_F16, v[0:3], v[4:5], v[8:11], v[12], acc=0, acc_cd=1, opsel_hi2=0
        ),
        {256, 257, 258, 259, 4, 5, 8, 9, 10, 11, 12},
        {256, 257, 258, 259},
    ),
    (DS(D.DS_READ_B64, vdst=v[4:5], addr=v[1]), {1}, {4, 5}),
    (DS(D.DS_READ_B64, vdst=v[4:5], addr=v[1], acc=1), {1}, {260, 261}),
    (DS(D.DS_READ2_B32, vdst=v[4:5], addr=v[1]), {1}, {4, 5}),
    (DS(D.DS_READ_U16_D16_HI, vdst=v[4], addr=v[1]), {1, 4}, {4}),
    (DS(D.DS_WRITE_B128, addr=v[1], data0=v[4:7]), {1, 4, 5, 6, 7}, set()),
    (DS(D.DS_WRITE2_B32, addr=v[1], data0=v[4], data1=v[9], acc=1), {1, 260, 265}, set()),
    (DS(D.DS_ADD_U32, addr=v[1], data0=v[4]), {1, 4}, set()),
    (DS(D.DS_ADD_RTN_U32, vdst=v[2], addr=v[1], data0=v[4]), {1, 4}, {2}),
    (DS(D.DS_BPERMUTE_B32, vdst=v[2], addr=v[1], data0=v[4]), {1, 4}, {2}),
    (ins.MUBUF(LOAD, v[4:5], v[1], s[4:7], 0, offen=1), {1}, {4, 5}),
    (ins.MUBUF(LOAD, v[4:5], v[1:2], s[4:7], 0, offen=1, idxen=1), {1, 2}, {4, 5}),
    (ins.MUBUF(LOAD, v[4:5], v[0], s[4:7], 0, acc=1), set(), {260, 261}),
    (ins.MUBUF(enum.MUBUFOp.BUFFER_LOAD_DWORD, v[0], v[1], s[4:7], 0, offen=1, lds=1), {1}, set()),
    (ins.MUBUF(enum.MUBUFOp.BUFFER_LOAD_SHORT_D16, v[4], v[1], s[4:7], 0, offen=1), {1, 4}, {4}),
    (ins.MUBUF(STORE, v[4:5], v[1], s[4:7], 0, offen=1), {1, 4, 5}, set()),
    (ins.MUBUF(enum.MUBUFOp.BUFFER_ATOMIC_ADD, v[4], v[1], s[4:7], 0, offen=1), {1, 4}, set()),
    (ins.MUBUF(enum.MUBUFOp.BUFFER_ATOMIC_CMPSWAP, v[4:5], v[1], s[4:7], 0, offen=1, sc0=1), {1, 4, 5}, {4}),
    (ins.MUBUF(enum.MUBUFOp.BUFFER_WBL2), set(), set()),
    (GLOBAL(G.GLOBAL_LOAD_DWORD, vdst=v[4], addr=v[2], saddr=OFF), {2, 3}, {4}),
    (GLOBAL(G.GLOBAL_LOAD_DWORD, vdst=v[4], addr=v[2], saddr=s[2:3], acc=1), {2}, {260}),
    (GLOBAL(G.GLOBAL_STORE_DWORDX2, data=v[4:5], addr=v[2], saddr=s[2:3]), {2, 4, 5}, set()),
    (GLOBAL(G.GLOBAL_LOAD_LDS_DWORD, addr=v[2], saddr=OFF), {2, 3}, set()),
    (GLOBAL(G.GLOBAL_ATOMIC_ADD, vdst=v[6], addr=v[2], data=v[4], saddr=OFF), {2, 3, 4}, set()),
    (GLOBAL(G.GLOBAL_ATOMIC_CMPSWAP, vdst=v[6], addr=v[2], data=v[4:5], saddr=OFF, sc0=1), {2, 3, 4, 5}, {6}),
    (SCRATCH(S.SCRATCH_LOAD_DWORD, vdst=v[4], saddr=OFF), set(), {4}),
    (SCRATCH(S.SCRATCH_LOAD_DWORD, vdst=v[4], addr=v[2], saddr=OFF, sve=1), {2}, {4}),
    (SCRATCH(S.SCRATCH_STORE_DWORD, data=v[4], saddr=s[3], acc=1), {260}, set()),
    (ins.FLAT(enum.FLATOp.FLAT_LOAD_DWORD, vdst=v[4], addr=v[2], saddr=OFF), {2, 3}, {4}),
    (ins.SOP2(enum.SOP2Op.S_ADD_U32, s[0], s[1], s[2]), set(), set()),
    (ins.SMEM(enum.SMEMOp.S_LOAD_DWORD, s[0], s[2:3]), set(), set()),
]


def flat(ranges) -> set[int]:
    return {register for registers in ranges for register in registers}


@pytest.mark.parametrize("code, reads, writes", TABLE, ids=[str(row[0]) for row in TABLE])
def test_registers(code, reads, writes):
    instruction = placed(code)
    assert (flat(vgpr_reads(instruction)), flat(vgpr_writes(instruction))) == (reads, writes)
    assert ignores_exec(instruction) == ("mfma" in instruction.mnemonic or "smfmac" in instruction.mnemonic)


ADD = placed(ins.VOP2(enum.VOP2Op.V_ADD_F32_E32, v[1], v[2], v[3]))
MOVES = {n: placed(ins.VOP1(enum.VOP1Op.V_MOV_B32_E32, v[n], 0)) for n in range(12)}


class TestRegisters:
    def begin(self, stop=False, exec=(1 << 64) - 1):
        batch, check = machine.run([], groups=2, exec=exec), RegisterWriteCheck(stop)
        check.begin(batch)
        return batch, check

    def test_what_the_launch_sets(self):
        batch, check = self.begin(stop=True)
        check.before(batch, ALL, placed(ins.VOP1(enum.VOP1Op.V_MOV_B32_E32, v[1], v[0])))
        with pytest.raises(Uninitialised, match=r"reads v2, which nobody wrote \(wave 0, lane 0 of \(0, 0, 0\)\)"):
            check.before(batch, ALL, ADD)

    def test_written_registers(self):
        batch, check = self.begin(stop=True)
        for register in (2, 3):
            check.before(batch, ALL, MOVES[register])
        check.before(batch, ALL, ADD)
        check.before(batch, np.array([1]), placed(ins.VOP1(enum.VOP1Op.V_MOV_B32_E32, v[2], v[1])))

    def test_only_the_waves_that_ran_it(self):
        batch, check = self.begin()
        check.before(batch, ALL, MOVES[2])
        check.before(batch, np.array([0, 1, 2]), MOVES[3])
        check.before(batch, np.array([0, 2]), ADD)
        assert check.found == []
        check.before(batch, ALL, ADD)
        assert check.found == [UninitialisedRead("VGPR", 3, ADD.address, "v_add_f32", (1, 0, 0), 1, 0)]
        check.before(batch, ALL, ADD)
        assert len(check.found) == 1

    @pytest.mark.parametrize("waves", [ALL, np.arange(4)], ids=["all", "rows"])
    def test_only_the_lanes_that_were_on(self, waves):
        batch, check = self.begin()
        check.before(batch, ALL, MOVES[3])
        batch.exec[:, 40:] = False
        check.before(batch, waves, MOVES[2])
        check.before(batch, ALL, ADD)
        assert check.found == []
        batch.exec[:] = True
        check.before(batch, ALL, ADD)
        assert [(read.name, read.lane) for read in check.found] == [("v2", 40)]

    def test_matrix_instructions_take_all_lanes(self):
        batch, check = self.begin()
        for register in range(256, 512):
            check._written[register] = True
        batch.exec[:, 5:] = False
        check.before(batch, ALL, MOVES[4])
        check.before(batch, ALL, MOVES[5])
        check.before(batch, ALL, placed(MFMA))
        assert [(read.name, read.lane) for read in check.found] == [("v4", 5)]

    def test_with_the_scheduler(self, monkeypatch):
        """Only what the check sees matters here, so the vector instructions need not do anything."""
        for encoding in ("VOP1", "VOP2"):
            monkeypatch.setitem(translate._BY_ENCODING, encoding, lambda instruction, descriptor: None)
        code = [
            ins.VOP1(enum.VOP1Op.V_MOV_B32_E32, v[2], v[0]),
            ins.SOP1(enum.SOP1Op.S_MOV_B64, EXEC_LO, 3),
            ins.VOP1(enum.VOP1Op.V_MOV_B32_E32, v[3], v[0]),
            ins.VOP2(enum.VOP2Op.V_ADD_F32_E32, v[1], v[2], v[3]),
            ins.SOP1(enum.SOP1Op.S_MOV_B64, EXEC_LO, 7),
            ins.VOP2(enum.VOP2Op.V_ADD_F32_E32, v[1], v[2], v[3]),
        ]
        check = RegisterWriteCheck(False)
        machine.run(code, register_check=check)
        assert [(read.name, read.address, read.lane) for read in check.found] == [("v3", 20, 2)]
        with pytest.raises(Uninitialised, match="bench at 0x14, v_add_f32.* reads v3"):
            machine.run(code, register_check=RegisterWriteCheck(True))
