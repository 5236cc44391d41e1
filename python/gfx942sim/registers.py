"""Which VGPRs an instruction reads and writes. AGPR n counts as 256 + n."""

from __future__ import annotations

import functools

from .decode import Instruction
from .state import AGPR

FIRST = 256
_ACCUMULATE = ("v_fmac", "v_mac_", "v_dot2c", "v_dot4c", "v_dot8c", "v_pk_fmac", "v_writelane")


def _range(instruction: Instruction, field: str, accumulator: bool = False) -> range | None:
    """The registers of one operand field, or None if it names no VGPR."""
    register = getattr(instruction.raw, field)
    code = getattr(register, "offset", -1)
    if code < FIRST:
        return None
    start = code - FIRST + (AGPR if accumulator else 0)
    return range(start, start + register.sz)


def _source_fields(instruction: Instruction) -> list[str]:
    return [f for f in ("src0", "src1", "src2", "vsrc0", "vsrc1") if instruction.has(f)]


@functools.lru_cache(maxsize=16384)
def vgpr_reads(instruction: Instruction) -> tuple[range, ...]:
    """Registers whose lanes the instruction reads. Partial writes read what they keep."""
    name, encoding = instruction.mnemonic, instruction.encoding
    operands = instruction.raw.op_regs
    found: list[range | None] = []
    if encoding in ("DS", "FLAT", "GLOBAL", "SCRATCH", "MUBUF"):
        accumulator = bool(instruction.field("acc"))
        address = "vaddr" if encoding == "MUBUF" else "addr"
        if encoding == "MUBUF":
            if instruction.field("offen") or instruction.field("idxen"):
                found.append(_range(instruction, address))
        elif encoding != "SCRATCH" or instruction.field("sve"):
            found.append(_range(instruction, address))
        reads_data = "store" in name or "write" in name or "atomic" in name or "permute" in name
        reads_data |= encoding == "DS" and not any(w in name for w in ("read", "swizzle", "permute"))
        for field in ("data", "vdata", "data0", "data1"):
            if reads_data and instruction.has(field) and field in operands:
                found.append(_range(instruction, field, accumulator))
    elif encoding.startswith("VOP"):
        accumulators = instruction.optional("acc") if "mfma" in name else 0
        for i, field in enumerate(_source_fields(instruction)):
            if field.removeprefix("v") not in operands and field not in operands:
                continue
            in_agpr = bool(accumulators >> i & 1) if i < 2 else "mfma" in name and bool(instruction.field("acc_cd"))
            in_agpr |= name in ("v_accvgpr_read_b32", "v_accvgpr_read", "v_accvgpr_mov_b32")
            found.append(_range(instruction, field, in_agpr))
        if name.startswith(_ACCUMULATE):
            found.append(_range(instruction, "vdst"))
    return tuple(r for r in found if r is not None)


@functools.lru_cache(maxsize=16384)
def vgpr_writes(instruction: Instruction) -> tuple[range, ...]:
    """Registers that the instruction writes, in its active lanes (MFMA: in all)."""
    name = instruction.mnemonic
    if "store" in name or name.startswith(("v_cmp", "v_readfirstlane", "v_readlane")):
        return ()
    field = "vdata" if instruction.encoding == "MUBUF" else "vdst"
    if not instruction.has(field) or field not in instruction.raw.op_regs:
        return ()
    accumulator = bool(instruction.optional("acc_cd")) if "mfma" in name else False
    if instruction.encoding in ("DS", "FLAT", "GLOBAL", "SCRATCH", "MUBUF"):
        accumulator = bool(instruction.field("acc"))
    accumulator |= name in ("v_accvgpr_write_b32", "v_accvgpr_write", "v_accvgpr_mov_b32")
    found = _range(instruction, field, accumulator)
    return () if found is None else (found,)
