"""DPP: source 0 comes from another lane. Source: AMD Instinct MI300 ISA guide, "Data parallel processing (DPP)"."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import Instruction
from .errors import UnknownInstruction
from .state import LANE, LANES, Batch, Selection

_IN_ROW, _ROW = LANE % 16, LANE // 16
_NOWHERE = -1
# Wave-wide moves and broadcasts by control code: the lane that each lane reads, or _NOWHERE.
_WHOLE_WAVE = {
    0x130: np.where(LANE < 63, LANE + 1, _NOWHERE),  # wave_shl:1
    0x134: (LANE + 1) % LANES,  # wave_rol:1
    0x138: LANE - 1,  # wave_shr:1
    0x13C: (LANE - 1) % LANES,  # wave_ror:1
    0x140: _ROW * 16 + 15 - _IN_ROW,  # row_mirror
    0x141: LANE // 8 * 8 + 7 - LANE % 8,  # row_half_mirror
    0x142: np.where(_ROW > 0, _ROW * 16 - 1, _NOWHERE),  # row_bcast:15
    0x143: np.where(_ROW > 1, 31, _NOWHERE),  # row_bcast:31
}


def source_lanes(control: int) -> np.ndarray:
    """int [64]: the lane that each lane reads, or -1.

    Raises:
        UnknownInstruction: no such control code.
    """
    amount = control & 15
    if control < 0x100:
        return LANE // 4 * 4 + (control >> 2 * (LANE % 4) & 3)
    if control in _WHOLE_WAVE:
        return _WHOLE_WAVE[control]
    if control >> 4 == 0x15:  # row_newbcast
        return _ROW * 16 + amount
    if amount and control >> 4 in (0x10, 0x11):
        moved = _IN_ROW + amount if control >> 4 == 0x10 else _IN_ROW - amount
        return np.where((moved >= 0) & (moved < 16), _ROW * 16 + moved, _NOWHERE)
    if amount and control >> 4 == 0x12:
        return _ROW * 16 + (_IN_ROW - amount) % 16
    raise UnknownInstruction(f"DPP control {control:#x}")


class LaneMove:
    """One DPP control. A source lane that does not exist or that EXEC disables is invalid: it reads as 0 with
    bound_ctrl, and without it the reading lane is not written. row_mask and bank_mask disable lanes as well."""

    def __init__(self, instruction: Instruction):
        control = instruction.field("dpp")
        lanes = source_lanes(control)
        self.exists = lanes != _NOWHERE
        self.lanes = np.where(self.exists, lanes, 0)
        self.bound_control = bool(instruction.field("bc"))
        rows, banks = instruction.field("row_mask"), instruction.field("bank_mask")
        self.enabled = (rows >> _ROW & 1).astype(bool) & (banks >> _IN_ROW // 4 & 1).astype(bool)
        # 64-bit operands only have the row broadcast.
        self.allows_64_bits = control >> 4 == 0x15

    @property
    def writes_all(self) -> bool:
        """Every lane of EXEC is written."""
        return self.bound_control and bool(self.enabled.all())

    def _valid(self, batch: Batch, waves: Selection) -> np.ndarray:
        active = batch.exec[waves]
        if active.all():
            return self.exists
        return active[:, self.lanes] & self.exists

    def applied(self, raw: Callable[[Batch, Selection], np.ndarray]) -> Callable[[Batch, Selection], np.ndarray]:
        """The source `raw` as seen through the move. The result is never a view of a register."""

        def read(batch: Batch, waves: Selection) -> np.ndarray:
            value = raw(batch, waves)
            return np.take(value, self.lanes, axis=1) * self._valid(batch, waves).astype(value.dtype)

        return read

    def written(self, batch: Batch, waves: Selection) -> np.ndarray:
        """bool [waves, 64]: the lanes that the instruction writes."""
        lanes = batch.exec[waves] & self.enabled
        return lanes if self.bound_control else lanes & self._valid(batch, waves)
