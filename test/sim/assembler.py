"""LLVM's assembler for gfx942, out of the Triton wheel: encodings that do not come from the decoder's own tables."""

from __future__ import annotations

import functools
import struct


class Assembled:
    """One line of machine code, as `machine.run` takes it."""

    def __init__(self, code: bytes):
        self.code = code

    def to_bytes(self) -> bytes:
        return self.code


@functools.cache
def assemble(line: str) -> Assembled:
    """Raises AssertionError for a line that LLVM refuses."""
    from triton._C import libtriton

    libtriton.llvm.init_targets()
    text = f'.amdgcn_target "amdgcn-amd-amdhsa--gfx942"\n.text\n{line}\n'
    elf = libtriton.amd.assemble_amdgcn(text, "gfx942", "")
    assert elf, f"LLVM refuses {line!r}"
    (table,), (count, names) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HH", elf, 0x3C)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + 64 * i) for i in range(count)]
    for name, _, _, _, offset, size in sections:
        if elf[sections[names][4] + name :].startswith(b".text\0"):
            return Assembled(bytes(elf[offset : offset + size]))
    raise AssertionError("no .text")
