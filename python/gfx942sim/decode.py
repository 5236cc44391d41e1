"""Machine code to `Instruction`, by the CDNA tables that the tinygrad wheel carries (made from AMD's ISA XML)."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from tinygrad.renderer.amd import decode_inst
from tinygrad.renderer.amd.dsl import Inst

from .errors import UnknownInstruction

_MAX_BYTES = 20
_SUFFIX = re.compile(r"_E(32|64)$")
_ENDS_BLOCK = ("s_cbranch", "s_branch", "s_barrier", "s_endpgm", "s_setpc", "s_swappc", "s_call", "s_trap")


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction.

    address: bytes from the start of the image. mnemonic: lower case, without the encoding suffix (`v_add_f32`).
    encoding: the table's name of the format (`VOP2`, `VOP3_SDST`, `VOP1_DPP16`, ...). raw: tinygrad's object.
    """

    address: int
    size: int
    mnemonic: str
    encoding: str
    raw: Inst

    def field(self, name: str) -> int:
        """A field as a number. Registers are source codes: SGPR 0..105, M0 124, EXEC 126, VGPR n is 256 + n."""
        value = getattr(self.raw, name)
        return int(getattr(value, "offset", value))

    def has(self, name: str) -> bool:
        return hasattr(type(self.raw), name)

    def optional(self, name: str, default: int = 0) -> int:
        return self.field(name) if self.has(name) else default

    @property
    def literal(self) -> int | None:
        """The 32-bit literal constant that follows the instruction, or None."""
        return int(self.raw.literal) if self.has("literal") else None

    def signed(self, name: str, bits: int) -> int:
        """A field of `bits` bits as a two's complement number."""
        value = self.field(name)
        return value - (1 << bits) if value >> (bits - 1) else value

    @property
    def ends_block(self) -> bool:
        """It may move the program counter, or stop the wave."""
        return self.mnemonic.startswith(_ENDS_BLOCK)

    @property
    def branch_target(self) -> int:
        """Where an s_branch or s_cbranch goes, bytes from the start of the image."""
        return self.address + 4 + 4 * self.signed("simm16", 16)

    @property
    def text(self) -> str:
        """The mnemonic with its operands; without them where the tables have no name for an odd register code."""
        try:
            return str(self.raw)
        except RuntimeError:
            return self.mnemonic

    def __str__(self) -> str:
        return f"{self.address:#x}: {self.text}"


@functools.lru_cache(maxsize=65536)
def _decode_bytes(code: bytes) -> tuple[Inst, int, str, str]:
    raw = decode_inst(code, "cdna")
    return raw, raw.size(), _SUFFIX.sub("", raw.op.name).lower(), type(raw).__name__


def decode(image, address: int) -> Instruction:
    """Decode the instruction at `address` of `image` (anything that slices to bytes).

    Raises:
        UnknownInstruction: the tables have no such encoding.
    """
    code = bytes(image[address : address + _MAX_BYTES])
    try:
        raw, size, mnemonic, encoding = _decode_bytes(code)
    except (ValueError, KeyError, AssertionError) as error:
        raise UnknownInstruction(f"{address:#x}: no CDNA encoding for {code[:8].hex(' ', 4)} ({error})") from error
    return Instruction(address, size, mnemonic, encoding, raw)


def disassemble(image, start: int, size: int) -> list[Instruction]:
    """All instructions of `size` bytes from `start`, in order. Padding after the last s_endpgm is included."""
    found, at = [], start
    while at < start + size:
        found.append(decode(image, at))
        at += found[-1].size
    return found
