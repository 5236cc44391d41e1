"""The registers, LDS and program counters of a batch of waves: every array has the waves along one axis."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .buffers import BufferRegistry
from .code_object import Descriptor

if TYPE_CHECKING:
    from .decode import Instruction

LANES = 64
LANE = np.arange(LANES)
VCC, M0, EXEC = 106, 124, 126
AGPR = 256
# A NaN as f32, as bf16 and as f16, and no address of anything: what nobody wrote must not look harmless.
POISON = np.uint32(0x7FC17FC1)

# glibc hands freed blocks of this size back to the kernel, and every handler's temporaries with them, until it has seen
# a larger one freed: then it keeps them. It makes handlers two to four times faster.
_large_block = np.empty(16 << 20, np.uint8)
del _large_block

# Which waves an instruction runs for: all of the batch, or the rows given.
Selection = slice | np.ndarray


class Observer(Protocol):
    """Sees every memory access and barrier. Race check, cost report and use-before-write check are observers.

    `address` is int64 [waves, 64]: bytes from the start of the work-group's LDS, or a global address. `active` is bool
    of that shape: the lanes that take part. `kind` is "read", "write" or "atomic". `selection` says which waves.
    """

    def lds(self, batch, selection, instruction: Instruction, address, active, size: int, kind: str) -> None: ...

    def vmem(self, batch, selection, instruction: Instruction, address, active, size: int, kind: str) -> None: ...

    def barrier(self, batch, workgroups: np.ndarray) -> None: ...


class Batch:
    """The state of the waves of some work-groups of one launch.

    Shapes (W waves, G work-groups): sgpr uint32 [128, W] (VCC, M0 and EXEC at their source codes), scc uint32 [W],
    vgpr uint32 [256 or 512, W, 64] (AGPRs from 256), exec bool [W, 64] (kept equal to sgpr[126:128]), pc int64 [W]
    (bytes from the start of the image), done, waiting and saturates_f16 bool [W], lds uint8 [G, lds_bytes].
    """

    def __init__(
        self,
        descriptor: Descriptor,
        *,
        image_base: int,
        agprs: bool,
        workgroups: Sequence[tuple[int, int, int]],
        block: tuple[int, int, int],
        lds_bytes: int,
        kernarg: bytes,
        kernarg_address: int,
        registry: BufferRegistry,
        observers: Sequence[Observer] = (),
    ):
        threads = block[0] * block[1] * block[2]
        self.descriptor, self.image_base, self.registry = descriptor, image_base, registry
        self.observers = tuple(observers)
        self.groups = len(workgroups)
        self.waves_per_group = -(-threads // LANES)
        self.waves = self.groups * self.waves_per_group
        self.group_of = np.repeat(np.arange(self.groups), self.waves_per_group)
        self.wave_in_group = np.tile(np.arange(self.waves_per_group), self.groups)
        self.workgroup_ids = list(workgroups)

        self.sgpr = np.full((128, self.waves), POISON, np.uint32)
        self.scc = np.zeros(self.waves, np.uint32)
        self.vgpr = np.full((512 if agprs else 256, self.waves, LANES), POISON, np.uint32)
        self.pc = np.zeros(self.waves, np.int64)
        self.done = np.zeros(self.waves, bool)
        self.waiting = np.zeros(self.waves, bool)
        # MODE.FP16_OVFL: f16 and fp8 results that overflow become the largest finite number. s_setreg may change it.
        self.saturates_f16 = np.full(self.waves, bool(descriptor.rsrc1 >> 26 & 1))

        # Rows are a multiple of 16 bytes apart, so that a wide view of the flat array is aligned for every group.
        self.lds_bytes = lds_bytes
        self.lds = np.full((self.groups, -(-max(lds_bytes, 16) // 16) * 16), 0xC1, np.uint8)
        self.lds_flat = self.lds.reshape(-1)
        self.lds_start = (self.group_of * self.lds.shape[1]).astype(np.int64)[:, None]

        # One private array per lane; the hardware interleaves lanes, which no program can see.
        stride = -(-descriptor.scratch // 16) * 16
        self.scratch = np.full((self.waves, LANES, stride), 0xC1, np.uint8)

        self._set_registers(block, threads, kernarg, kernarg_address)

    def _set_registers(self, block, threads: int, kernarg: bytes, kernarg_address: int) -> None:
        """The initial state the hardware gives: user SGPRs by the property bits, then ids, then v0."""
        d = self.descriptor
        user: list[int] = []
        for bit, count in ((1, 4), (2, 2), (4, 2)):  # private segment buffer, dispatch and queue pointers: unused
            user += [0] * count if d.properties & bit else []
        if d.properties & 8:
            user += [kernarg_address & 0xFFFFFFFF, kernarg_address >> 32]
        user += [0, 0] if d.properties & 16 else []  # dispatch id
        user += [0, 0] if d.properties & 32 else []  # flat scratch: architected on gfx942
        user += [d.scratch] if d.properties & 64 else []
        # A kernel with preloaded arguments starts with 256 bytes for firmware that cannot preload.
        self.pc[:] = d.entry
        if d.preload_dwords:
            user += struct.unpack_from(f"<{d.preload_dwords}I", kernarg, d.preload_offset * 4)
            self.pc[:] += 256
        user += [0] * (d.user_sgprs - len(user))
        for i, value in enumerate(user):
            self.sgpr[i] = value
        at = len(user)
        ids = np.array(self.workgroup_ids, np.uint32)
        for axis in range(3):
            if d.rsrc2 >> (7 + axis) & 1:
                self.sgpr[at] = np.repeat(ids[:, axis], self.waves_per_group)
                at += 1
        self.sgpr[VCC : VCC + 2] = 0
        self.sgpr[M0] = 0
        thread = self.wave_in_group[:, None] * LANES + LANE
        x, y, z = thread % block[0], thread // block[0] % block[1], thread // (block[0] * block[1])
        self.vgpr[0] = x | y << 10 | z << 20
        self.exec = thread < threads
        self.sgpr[EXEC : EXEC + 2] = lanes_to_words(self.exec)

    def sync_exec(self, selection: Selection) -> None:
        """After a scalar write to EXEC: bring the lane mask up to date."""
        self.exec[selection] = words_to_lanes(self.sgpr[EXEC][selection], self.sgpr[EXEC + 1][selection])

    def write_vgpr(
        self, selection: Selection, register: int, value: np.ndarray, mask: np.ndarray | None = None
    ) -> None:
        """Write uint32 `value` (broadcasts to [waves, 64]) to one register, in the lanes of `mask` (default: EXEC)."""
        lanes = self.exec[selection] if mask is None else mask
        if isinstance(selection, slice):
            if lanes.all():
                self.vgpr[register] = value
            else:
                np.copyto(self.vgpr[register], value, where=lanes, casting="unsafe")
        else:
            self.vgpr[register][selection] = np.where(lanes, value, self.vgpr[register][selection])

    def write_vgpr_pair(self, selection: Selection, register: int, value: np.ndarray) -> None:
        """Write uint64 `value` to a register and the next."""
        self.write_vgpr(selection, register, (value & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        self.write_vgpr(selection, register + 1, (value >> np.uint64(32)).astype(np.uint32))

    def write_lane_mask(self, selection: Selection, register: int, lanes: np.ndarray) -> None:
        """Write one bit per lane to an SGPR pair; lanes that are off give 0."""
        lanes = np.broadcast_to(lanes, self.exec[selection].shape) & self.exec[selection]
        self.write_sgpr_pair(selection, register, lanes_to_words(lanes))

    def read_lane_mask(self, selection: Selection, register: int) -> np.ndarray:
        """An SGPR pair as bool [waves, 64]."""
        return words_to_lanes(self.sgpr[register][selection], self.sgpr[register + 1][selection])

    def write_sgpr_pair(self, selection: Selection, register: int, words) -> None:
        """Write (low, high) uint32 words to an SGPR pair, EXEC included."""
        self.sgpr[register][selection], self.sgpr[register + 1][selection] = words
        if register == EXEC:
            self.sync_exec(selection)


def lanes_to_words(lanes: np.ndarray) -> np.ndarray:
    """bool [W, 64] -> uint32 [2, W]: lane 0 is bit 0 of the first word."""
    packed = np.packbits(np.ascontiguousarray(lanes), axis=-1, bitorder="little")
    return packed.view(np.uint32).reshape(-1, 2).T


def words_to_lanes(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two uint32 [W] -> bool [W, 64]."""
    words = np.stack([np.atleast_1d(low), np.atleast_1d(high)], -1).astype(np.uint32)
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
