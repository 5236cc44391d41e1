"""s_getreg and s_setreg: the hardware registers that a functional model can answer for.

Source: AMD Instinct MI300 ISA guide, "Mode register" and s_getreg_b32; LLVM's AMDGPU guide, compute_pgm_rsrc1/2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .code_object import Descriptor
from .errors import UnknownInstruction
from .state import Batch, Selection

_MODE, _XCC_ID = 1, 20
# Exception enables, debugging and LOD clamp: no result depends on them here.
_IGNORED_MODE_BITS = 0x1FF << 12 | 3 << 10
# FP16_OVFL: what is too large for f16 or fp8 becomes the largest number. Triton switches it on for fp8.
_FP16_OVERFLOW = 23


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


def setreg(immediate: int, descriptor: Descriptor) -> Callable[[Batch, Selection, np.ndarray], None]:
    """What s_setreg does with a value: FP16_OVFL goes to the waves, other changes must be bits without effect.

    The returned function takes uint32 [waves] or [1] and raises UnknownInstruction for a change of rounding, denormals
    or clamping, which are part of the translation.
    """
    register, offset, mask = _place(immediate)
    if register != _MODE:
        raise UnknownInstruction(f"s_setreg of hardware register {register}; only MODE (1) is known")
    kept = mask & ~_IGNORED_MODE_BITS & ~(1 << _FP16_OVERFLOW)
    wanted = np.uint32(mode(descriptor) & kept)

    def write(batch: Batch, waves: Selection, value: np.ndarray) -> None:
        written = value << np.uint32(offset)
        fixed = written & np.uint32(kept)
        if (fixed != wanted).any():
            other = int(fixed[fixed != wanted][0])
            raise UnknownInstruction(
                f"s_setreg changes MODE bits {kept:#x} from {int(wanted):#x} to {other:#x}: "
                "rounding, denormal and clamp modes are fixed at the launch"
            )
        if mask >> _FP16_OVERFLOW & 1:
            batch.saturates_f16[waves] = written >> np.uint32(_FP16_OVERFLOW) & np.uint32(1)

    return write
