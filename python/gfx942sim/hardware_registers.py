"""s_getreg and s_setreg: the hardware registers that a functional model can answer for.

Source: AMD Instinct MI300 ISA guide, "Mode register" and s_getreg_b32; LLVM's AMDGPU guide, compute_pgm_rsrc1/2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .code_object import Descriptor
from .errors import UnknownInstruction

_MODE, _XCC_ID = 1, 20
# Exception enables, debugging and LOD clamp: no result depends on them here.
_IGNORED_MODE_BITS = 0x1FF << 12 | 3 << 10


def mode(descriptor: Descriptor) -> int:
    """The MODE register as a wave of this kernel starts with it.

    Bits 3..0 rounding, 7..4 denormals, 8 DX10 clamp, 9 IEEE, 18..12 exception enables, 23 FP16 overflow.
    """
    rsrc1, rsrc2 = descriptor.rsrc1, descriptor.rsrc2
    return (
        (rsrc1 >> 12 & 0xFF)
        | (rsrc1 >> 21 & 1) << 8
        | (rsrc1 >> 23 & 1) << 9
        | (rsrc2 >> 24 & 0x7F) << 12
        | (rsrc1 >> 26 & 1) << 23
    )


def _place(immediate: int) -> tuple[int, int, int]:
    """(register, first bit, mask of its bits) of the 16-bit immediate."""
    offset, size = immediate >> 6 & 31, (immediate >> 11 & 31) + 1
    return immediate & 63, offset, ((1 << size) - 1) << offset & 0xFFFFFFFF


def getreg(immediate: int, descriptor: Descriptor) -> int:
    """What s_getreg_b32 reads: XCC_ID (0: everything runs on the first die) or MODE as the wave started with it.

    The bits of MODE that `setreg` lets a kernel change without effect (exception enables, debugging) are not kept.
    """
    register, offset, mask = _place(immediate)
    known = {_MODE: mode(descriptor), _XCC_ID: 0}
    if register not in known:
        raise UnknownInstruction(f"s_getreg_b32 of hardware register {register}; known: MODE (1) and XCC_ID (20)")
    return (known[register] & mask) >> offset


def setreg(immediate: int, descriptor: Descriptor) -> Callable[[np.ndarray], None]:
    """A check of the values that s_setreg writes: what they change must be bits that no result depends on.

    The returned function takes uint32 [waves] or [1] and raises UnknownInstruction for any other change.
    """
    register, offset, mask = _place(immediate)
    if register != _MODE:
        raise UnknownInstruction(f"s_setreg of hardware register {register}; only MODE (1) is known")
    kept = mask & ~_IGNORED_MODE_BITS
    wanted = np.uint32(mode(descriptor) & kept)

    def check(value: np.ndarray) -> None:
        written = value << np.uint32(offset) & np.uint32(kept)
        if (written != wanted).any():
            other = int(written[written != wanted][0])
            raise UnknownInstruction(
                f"s_setreg changes MODE bits {kept:#x} from {int(wanted):#x} to {other:#x}: "
                "rounding, denormal and clamp modes are fixed at the launch"
            )

    return check
