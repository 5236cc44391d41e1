"""Which vector registers one instruction reads and writes, from the operand tables and the fields that modify them.

Registers are numbered as rows of `Batch.vgpr`: VGPR n is n, AGPR n is 256 + n.
"""

from __future__ import annotations

from .decode import Instruction
from .operands import FIRST_VGPR
from .state import AGPR

_MEMORY = ("DS", "MUBUF", "FLAT", "GLOBAL", "SCRATCH")
_NO_SCALAR_ADDRESS = 0x7F
_SDWA_PRESERVE, _SDWA_DWORD = 2, 6
_DPP_FULL = 0xF
# The destination is also an operand, though the tables list it once: accumulation, and exchange of two registers.
_READS_DESTINATION = ("v_fmac", "v_mac_", "v_pk_fmac", "v_dot2c", "v_dot4c", "v_dot8c", "v_smfmac", "v_swap")
# One half or one byte of the destination is written, and the rest is kept.
_WRITES_PART = ("v_mad_mixlo", "v_mad_mixhi", "v_cvt_pk_fp8", "v_cvt_pk_bf8", "v_cvt_sr_fp8", "v_cvt_sr_bf8")
_WRITES_SCALAR = ("v_readlane", "v_readfirstlane", "v_cmp")


def vgpr_reads(instruction: Instruction) -> tuple[range, ...]:
    """The registers it needs the old value of, one range per operand; a destination that is written in part is one."""
    if _family(instruction) in _MEMORY:
        return _memory_reads(instruction)
    name, sizes = instruction.mnemonic, instruction.raw.op_regs
    found = []
    # DPP and SDWA keep the register of src0 in vsrc0; SDWA has a bit for each source that makes it an SGPR.
    scalars = {"vsrc0": instruction.optional("s0"), "vsrc1": instruction.optional("s1")}
    for field in ("src0", "vsrc0", "src1", "vsrc1", "src2"):
        if scalars.get(field):
            continue
        size = sizes.get("src0" if field == "vsrc0" else field, 0)
        if size and instruction.has(field) and instruction.field(field) >= FIRST_VGPR:
            found.append(_registers(instruction.field(field), size, _source_is_agpr(instruction, field)))
    if name.startswith(_READS_DESTINATION) or _keeps_part(instruction):
        found += _destination(instruction)
    return tuple(found)


def vgpr_writes(instruction: Instruction) -> tuple[range, ...]:
    """The registers that it may write, at least in part."""
    if _family(instruction) in _MEMORY:
        return _memory_writes(instruction)
    found = _destination(instruction)
    if instruction.mnemonic.startswith("v_swap"):
        found.append(_registers(instruction.field("src0"), 1, False))
    return tuple(found)


def ignores_exec(instruction: Instruction) -> bool:
    """Matrix instructions read and write all lanes, whatever EXEC is."""
    return instruction.mnemonic.startswith(("v_mfma", "v_smfmac"))


def _family(instruction: Instruction) -> str:
    return instruction.encoding.split("_")[0]


def _registers(code: int, count: int, is_agpr: bool | int) -> range:
    first = code - FIRST_VGPR + (AGPR if is_agpr else 0)
    return range(first, first + count)


def _source_is_agpr(instruction: Instruction, field: str) -> bool:
    name = instruction.mnemonic
    if name.startswith(("v_accvgpr_read", "v_accvgpr_mov")):
        return True
    if not instruction.has("acc_cd"):
        return False
    if field == "src2":
        # The index of a sparse instruction is always a VGPR.
        return bool(instruction.field("acc_cd")) and not name.startswith("v_smfmac")
    return bool(instruction.field("acc") >> (0 if field == "src0" else 1) & 1)


def _destination(instruction: Instruction) -> list[range]:
    """vdst of a vector ALU instruction, unless it is a scalar register or there is none."""
    size, name = instruction.raw.op_regs.get("vdst", 0), instruction.mnemonic
    if not size or name.startswith(_WRITES_SCALAR) or instruction.field("vdst") < FIRST_VGPR:
        return []
    is_agpr = name.startswith(("v_accvgpr_write", "v_accvgpr_mov")) or bool(instruction.optional("acc_cd"))
    return [_registers(instruction.field("vdst"), size, is_agpr)]


def _keeps_part(instruction: Instruction) -> bool:
    """Some bits of an active lane's destination, or all bits of some active lanes, keep their value."""
    name = instruction.mnemonic
    if name.startswith(_WRITES_PART):
        return True
    if instruction.has("dst_unused"):
        return instruction.field("dst_unused") == _SDWA_PRESERVE and instruction.field("dst_sel") != _SDWA_DWORD
    if instruction.has("row_mask"):
        # Without bound_ctrl, a lane whose source is out of its row keeps its value; so do rows and banks that are off.
        masks = instruction.field("row_mask"), instruction.field("bank_mask")
        return masks != (_DPP_FULL, _DPP_FULL) or (
            not instruction.field("bc") and _shifts_out(instruction.field("dpp"))
        )
    # 16-bit results in VOP3: op_sel bit 3 chooses the high half, and the low one is kept.
    bits = instruction.raw.op_bits.get("vdst", 32)
    return instruction.encoding == "VOP3" and bits == 16 and bool(instruction.optional("opsel") & 8)


def _shifts_out(control: int) -> bool:
    """Whether a DPP control has lanes without a source: row_shl, row_shr, wave_shl, wave_shr and the broadcasts."""
    return 0x101 <= control <= 0x10F or 0x111 <= control <= 0x11F or control in (0x130, 0x138, 0x142, 0x143)


def _memory_reads(instruction: Instruction) -> tuple[range, ...]:
    sizes, is_agpr = instruction.raw.op_regs, instruction.optional("acc")
    found = []
    if address := _address_registers(instruction):
        found.append(_registers(instruction.field("vaddr" if instruction.has("vaddr") else "addr"), address, False))
    name = instruction.mnemonic
    for field in ("data", "data0", "data1"):
        if field in sizes:
            found.append(_registers(instruction.field(field), sizes[field], is_agpr))
    if "vdata" in sizes and ("_store" in name or "_atomic" in name):
        found.append(_registers(instruction.field("vdata"), sizes["vdata"], is_agpr))
    if "_d16" in name and ("_load" in name or "_read" in name):
        found += _memory_writes(instruction)
    return tuple(found)


def _address_registers(instruction: Instruction) -> int:
    family, sizes = _family(instruction), instruction.raw.op_regs
    if family == "MUBUF":
        return (instruction.field("offen") + instruction.field("idxen")) if "vaddr" in sizes else 0
    if "addr" not in sizes:
        return 0
    if family == "SCRATCH":
        return instruction.field("sve")
    if family == "GLOBAL":
        return 2 if instruction.field("saddr") == _NO_SCALAR_ADDRESS else 1
    return 2 if family == "FLAT" else 1


def _memory_writes(instruction: Instruction) -> tuple[range, ...]:
    sizes, is_agpr, name = instruction.raw.op_regs, instruction.optional("acc"), instruction.mnemonic
    if "_store" in name or "_load_lds" in name or instruction.optional("lds"):
        return ()
    if "_atomic" in name and not instruction.field("sc0"):
        return ()
    field = "vdata" if "vdata" in sizes else "vdst"
    if field not in sizes:
        return ()
    count = sizes[field]
    if "atomic_cmpswap" in name and field == "vdata":
        count //= 2  # data and comparand go in, the old value comes out
    return (_registers(instruction.field(field), count, is_agpr),)
