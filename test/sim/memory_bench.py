"""What the tests of memory instructions share: register ranges, wave selections, and an observer that takes notes."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import s, src, v

ALL_LANES = (1 << 64) - 1
SOME_LANES = 0xF0F0_1234_8001_00FE
NO_SADDR = src[127]  # 0x7F in the encoding: no SGPR

# All waves at once, all with a part of the lanes, and one wave after another (waves as an index array).
SELECTIONS = pytest.mark.parametrize(
    ("exec", "order"),
    [(ALL_LANES, "lockstep"), (SOME_LANES, "lockstep"), (ALL_LANES, "forward"), (SOME_LANES, "forward")],
    ids=["all", "masked", "one wave", "one wave masked"],
)


def vgprs(first: int, count: int = 1):
    return v[first] if count == 1 else v[first : first + count - 1]


def sgprs(first: int, count: int = 1):
    return s[first] if count == 1 else s[first : first + count - 1]


def offsets(offset: int) -> dict[str, int]:
    """The two fields that hold the 16-bit offset of a DS instruction."""
    return {"offset0": offset & 255, "offset1": offset >> 8}


def lanes_of(exec: int) -> list[int]:
    """The active lanes, ascending."""
    return [lane for lane in range(64) if exec >> lane & 1]


def random_words(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, np.uint64).astype(np.uint32)


def random_bytes(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def aligned_buffer(content: np.ndarray) -> np.ndarray:
    """A uint8 array of the content whose address is a multiple of 16."""
    space = np.empty(content.nbytes + 16, np.uint8)
    start = -space.ctypes.data % 16
    found = space[start : start + content.nbytes]
    found[:] = content.view(np.uint8)
    return found


def loaded_register(raw: bytes, old: int, signed: bool, half: str) -> int:
    """What a load of fewer than 4 bytes makes of a register."""
    value = int.from_bytes(raw, "little", signed=signed)
    if half == "low":
        return old & 0xFFFF0000 | value & 0xFFFF
    if half == "high":
        return old & 0xFFFF | (value & 0xFFFF) << 16
    return value & 0xFFFFFFFF


class Notes:
    """An observer that keeps (what, address, active, size, kind) of every access."""

    def __init__(self):
        self.seen: list[tuple] = []

    def lds(self, batch, waves, instruction, address, active, size, kind):
        assert address.shape == active.shape and address.dtype == np.int64 and active.dtype == bool
        self.seen.append(("lds", address.copy(), active.copy(), size, kind))

    def vmem(self, batch, waves, instruction, address, active, size, kind):
        assert address.shape == active.shape and address.dtype == np.int64 and active.dtype == bool
        self.seen.append(("vmem", address.copy(), active.copy(), size, kind))

    def barrier(self, batch, workgroups): ...


# Suffix of a load or store: bytes, signed, half.
LOADS = {
    "UBYTE": (1, False, ""),
    "SBYTE": (1, True, ""),
    "USHORT": (2, False, ""),
    "SSHORT": (2, True, ""),
    "DWORD": (4, False, ""),
    "DWORDX2": (8, False, ""),
    "DWORDX3": (12, False, ""),
    "DWORDX4": (16, False, ""),
    "UBYTE_D16": (1, False, "low"),
    "UBYTE_D16_HI": (1, False, "high"),
    "SBYTE_D16": (1, True, "low"),
    "SBYTE_D16_HI": (1, True, "high"),
    "SHORT_D16": (2, False, "low"),
    "SHORT_D16_HI": (2, False, "high"),
}
# Suffix: bytes, first byte of the register.
STORES = {
    "BYTE": (1, 0),
    "BYTE_D16_HI": (1, 2),
    "SHORT": (2, 0),
    "SHORT_D16_HI": (2, 2),
    "DWORD": (4, 0),
    "DWORDX2": (8, 0),
    "DWORDX3": (12, 0),
    "DWORDX4": (16, 0),
}


def expected_load(name: str, memory: np.ndarray, at: np.ndarray, exec: int, old: int) -> np.ndarray:
    """Registers after a load. memory: uint8 [n]; at: byte index [waves, 64]. Returns uint32 [registers, waves, 64]."""
    size, signed, half = LOADS[name]
    words = np.full((max(1, size // 4), *at.shape), old, np.uint32)
    for wave in range(len(at)):
        for lane in lanes_of(exec):
            raw = memory[at[wave, lane] : at[wave, lane] + size].tobytes()
            if size < 4:
                words[0, wave, lane] = loaded_register(raw, old, signed, half)
            else:
                words[:, wave, lane] = np.frombuffer(raw, np.uint32)
    return words


def expected_store(name: str, memory: np.ndarray, at: np.ndarray, exec: int, data: np.ndarray) -> np.ndarray:
    """Memory after a store. data: uint32 [registers, waves, 64]. Returns a changed copy."""
    size, first = STORES[name]
    after = memory.copy()
    for wave in range(len(at)):
        for lane in lanes_of(exec):
            raw = np.ascontiguousarray(data[:, wave, lane]).tobytes()[first:][:size]
            after[at[wave, lane] : at[wave, lane] + size] = np.frombuffer(raw, np.uint8)
    return after
