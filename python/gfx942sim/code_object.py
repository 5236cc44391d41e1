"""Loads an AMDGPU code object (ELF) into memory: segments, dynamic relocations, kernel descriptors, metadata.

Sources: LLVM's "User Guide for AMDGPU Backend" (code object V5, kernel descriptor, kernarg preload).
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import msgpack

from .errors import BadCodeObject

_EM_AMDGPU = 224
_MACH_GFX942 = 0x4C
_PT_LOAD, _PT_NOTE = 1, 4
_SHT_SYMTAB, _SHT_RELA, _SHT_DYNSYM = 2, 4, 11
_R_AMDGPU_ABS64, _R_AMDGPU_RELATIVE64 = 3, 13
_NT_AMDGPU_METADATA = 32
_PAGE = 4096

LDS_BYTES_PER_CU = 64 * 1024
VGPRS_PER_LANE = 512
MAX_WAVES_PER_SIMD = 8


@dataclass(frozen=True)
class Descriptor:
    """The 64-byte kernel descriptor (`<name>.kd`).

    entry: byte offset of the first instruction from the start of the image. lds, scratch, kernarg: bytes (LDS per
    work-group, scratch per lane). rsrc1..3, properties: the raw register images. preload_dwords, preload_offset:
    kernel arguments that the hardware puts into SGPRs before the wave starts, in dwords.
    """

    entry: int
    lds: int
    scratch: int
    kernarg: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload_dwords: int
    preload_offset: int

    @property
    def user_sgprs(self) -> int:
        return (self.rsrc2 >> 1) & 31

    @property
    def flushes_f32_denormals(self) -> bool:
        """FLOAT_DENORM_MODE_32 is 0: inputs and outputs of f32 instructions are flushed to zero."""
        return (self.rsrc1 >> 16) & 3 == 0

    @property
    def flushes_f16_f64_denormals(self) -> bool:
        return (self.rsrc1 >> 18) & 3 == 0


@dataclass(frozen=True)
class Argument:
    """One kernel argument from the metadata: where it lies in the kernarg segment (bytes) and what it is."""

    name: str
    offset: int
    size: int
    kind: str

    @property
    def hidden(self) -> bool:
        return self.kind.startswith("hidden_")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes. Registers per lane (VGPR, AGPR) or wave (SGPR); sizes in bytes.

    vgpr counts architectural and accumulation registers together, as the hardware allocates them; agpr is the
    accumulation part. scratch is per lane; lds is what the file asks for, a launch may add dynamic LDS.
    """

    vgpr: int
    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    kernarg: int
    code: int

    def waves_per_simd(self, block_threads: int, dynamic_lds: int = 0) -> int:
        """Waves that fit on one SIMD of a CU, by registers and by LDS (rounded down to whole work-groups)."""
        by_registers = min(MAX_WAVES_PER_SIMD, VGPRS_PER_LANE // max(8, -(-self.vgpr // 8) * 8))
        waves_per_group = -(-block_threads // 64)
        groups = by_registers * 4 // waves_per_group
        lds = self.lds + dynamic_lds
        if lds:
            groups = min(groups, LDS_BYTES_PER_CU // lds)
        return max(0, min(by_registers, -(-groups * waves_per_group // 4)))


class CodeObject:
    """One loaded code object. `base` is the address of its image in this process; offsets below are from there.

    Args:
        elf: the bytes of the file (`.hsaco`).

    Raises:
        BadCodeObject: not an ELF for gfx942, no metadata, or a relocation that is not one of the dynamic ones.
    """

    def __init__(self, elf: bytes):
        if elf[:4] != b"\x7fELF":
            raise BadCodeObject(f"not an ELF file: it starts with {elf[:8]!r}")
        machine = struct.unpack_from("<H", elf, 18)[0]
        flags = struct.unpack_from("<I", elf, 48)[0]
        if machine != _EM_AMDGPU or flags & 0xFF != _MACH_GFX942:
            raise BadCodeObject(
                f"ELF machine {machine}, flags {flags:#x}: expected machine {_EM_AMDGPU} (AMDGPU) and target "
                f"{_MACH_GFX942:#x} (gfx942); compile for gfx942"
            )
        self.elf = elf
        self.digest = hashlib.sha256(elf).hexdigest()
        programs = _table(elf, at=0x20, entry="<IIQQQQQQ", size_at=0x36)
        sections = _table(elf, at=0x28, entry="<IIQQQQIIQQ", size_at=0x3A)
        self._load(programs)
        self.symbols = self._symbols(sections)
        self._relocate(sections)
        self.metadata = self._metadata(programs)
        self.kernels: dict[str, dict] = {k[".name"]: k for k in self.metadata["amdhsa.kernels"]}

    @classmethod
    def from_file(cls, path: str | Path) -> CodeObject:
        return cls(Path(path).read_bytes())

    def _load(self, programs: list[tuple]) -> None:
        loads = [p for p in programs if p[0] == _PT_LOAD]
        if not loads:
            raise BadCodeObject("no loadable segment")
        # One page more than the segments: the decoder may look past the last instruction.
        size = (max(p[3] + p[6] for p in loads) + 2 * _PAGE) // _PAGE * _PAGE
        self.image = mmap.mmap(-1, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._pin = (ctypes.c_char * size).from_buffer(self.image)
        self.base = ctypes.addressof(self._pin)
        for _, _, offset, address, _, file_size, _, _ in loads:
            self.image[address : address + file_size] = self.elf[offset : offset + file_size]

    def _symbols(self, sections: list[tuple]) -> dict[str, tuple[int, int]]:
        """Name -> (offset in the image, size in bytes)."""
        found = {}
        for section in sections:
            if section[1] not in (_SHT_SYMTAB, _SHT_DYNSYM):
                continue
            names = sections[section[6]][4]
            for at in range(section[4], section[4] + section[5], 24):
                name, _, _, _, value, size = struct.unpack_from("<IBBHQQ", self.elf, at)
                end = self.elf.index(b"\0", names + name)
                if text := self.elf[names + name : end].decode():
                    found[text] = (value, size)
        return found

    def _relocate(self, sections: list[tuple]) -> None:
        for section in sections:
            if section[1] != _SHT_RELA:
                continue
            dynsym = sections[section[6]]
            for at in range(section[4], section[4] + section[5], 24):
                offset, info, addend = struct.unpack_from("<QQq", self.elf, at)
                kind, symbol = info & 0xFFFFFFFF, info >> 32
                if kind == _R_AMDGPU_RELATIVE64:
                    value = self.base + addend
                elif kind == _R_AMDGPU_ABS64:
                    _, _, _, index, target, _ = struct.unpack_from("<IBBHQQ", self.elf, dynsym[4] + 24 * symbol)
                    if index == 0:
                        raise BadCodeObject(f"relocation at {offset:#x} names a symbol that this file does not define")
                    value = self.base + target + addend
                else:
                    raise BadCodeObject(f"relocation type {kind} at {offset:#x}; known: ABS64 (3), RELATIVE64 (13)")
                struct.pack_into("<Q", self.image, offset, value)

    def _metadata(self, programs: list[tuple]) -> dict:
        for kind, _, offset, _, _, size, _, _ in programs:
            at = offset
            while kind == _PT_NOTE and at < offset + size:
                name_size, data_size, note = struct.unpack_from("<III", self.elf, at)
                data = at + 12 + -(-name_size // 4) * 4
                if note == _NT_AMDGPU_METADATA:
                    return msgpack.unpackb(self.elf[data : data + data_size])
                at = data + -(-data_size // 4) * 4
        raise BadCodeObject("no NT_AMDGPU_METADATA note (code object V3 or later has one)")

    def _kernel(self, name: str) -> dict:
        if name not in self.kernels:
            raise BadCodeObject(f"no kernel {name!r}; this code object has {', '.join(sorted(self.kernels)) or 'none'}")
        return self.kernels[name]

    def descriptor(self, name: str) -> Descriptor:
        """The kernel's descriptor. Raises BadCodeObject when there is no such kernel."""
        self._kernel(name)
        at = self.symbols[name + ".kd"][0]
        lds, scratch, kernarg = struct.unpack_from("<III", self.image, at)
        entry = struct.unpack_from("<q", self.image, at + 16)[0]
        rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", self.image, at + 44)
        return Descriptor(
            entry=at + entry,
            lds=lds,
            scratch=scratch,
            kernarg=kernarg,
            rsrc1=rsrc1,
            rsrc2=rsrc2,
            rsrc3=rsrc3,
            properties=properties,
            preload_dwords=preload & 0x7F,
            preload_offset=preload >> 7,
        )

    def arguments(self, name: str) -> list[Argument]:
        """All arguments, hidden ones included, in the order of the metadata."""
        found = self._kernel(name).get(".args", [])
        return [
            Argument(a.get(".name", f"arg{i}"), a[".offset"], a[".size"], a[".value_kind"]) for i, a in enumerate(found)
        ]

    def resources(self, name: str) -> Resources:
        meta = self._kernel(name)
        return Resources(
            vgpr=meta[".vgpr_count"],
            agpr=meta.get(".agpr_count", 0),
            sgpr=meta[".sgpr_count"],
            vgpr_spills=meta.get(".vgpr_spill_count", 0),
            sgpr_spills=meta.get(".sgpr_spill_count", 0),
            scratch=meta[".private_segment_fixed_size"],
            lds=meta[".group_segment_fixed_size"],
            kernarg=meta[".kernarg_segment_size"],
            code=self.symbols[name][1],
        )


def elf_size(read_at) -> int:
    """Bytes of an ELF file in memory, of which only the start is known: the section headers come last (lld).

    Args:
        read_at: function (offset, size) -> bytes.
    """
    header = read_at(0, 64)
    if header[:4] != b"\x7fELF":
        raise BadCodeObject(f"not an ELF file: it starts with {header[:8]!r}")
    offset = struct.unpack_from("<Q", header, 0x28)[0]
    size, count = struct.unpack_from("<HH", header, 0x3A)
    return offset + size * count


def _table(elf: bytes, at: int, entry: str, size_at: int) -> list[tuple]:
    """The program or section header table. `at` and `size_at` are where the ELF header keeps its place and shape."""
    start = struct.unpack_from("<Q", elf, at)[0]
    size, count = struct.unpack_from("<HH", elf, size_at)
    return [struct.unpack_from(entry, elf, start + i * size) for i in range(count)]
