"""Source operands by their 9-bit code, as functions of (batch, selection).

A scalar source gives uint32 [waves] or [1]; a vector source gives uint32 [waves, 64], or something that broadcasts to
it: [waves, 1] for an SGPR, [1, 1] for a constant. With all waves selected a register comes as a view of the batch's own
array, so a handler that writes registers must read everything it needs before it writes the first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import UnknownInstruction
from .state import AGPR, Batch, Selection

Source = Callable[[Batch, Selection], np.ndarray]

FIRST_VGPR = 256
_LITERAL, _SCC, _EXECZ, _VCCZ = 255, 253, 252, 251
_INLINE_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
# 1 / (2 pi) has an encoding of its own in each width, as the ISA guide lists them.
_INV_2PI = {"f16": 0x3118, "f32": 0x3E22F983, "f64": 0x3FC45F306DC9C882}
_FLOAT_BITS = {"f16": (np.float16, np.uint16), "f32": (np.float32, np.uint32), "f64": (np.float64, np.uint64)}


def constant(code: int, literal: int | None, kind: str = "f32") -> int | None:
    """The value of a constant source as bits, or None if `code` is a register.

    Args:
        kind: how an inline float is encoded: "f16", "f32" (also for integer instructions) or "f64". A literal of an
            "f64" instruction is the high half; integers are sign-extended by the caller's mask.
    """
    if code == _LITERAL:
        if literal is None:
            raise UnknownInstruction("literal operand in a format that has none")
        return literal << 32 if kind == "f64" else literal
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return 192 - code
    if code in _INLINE_FLOATS:
        float_type, bits = _FLOAT_BITS[kind]
        return int(np.array(_INLINE_FLOATS[code], float_type).view(bits))
    if code == 248:
        return _INV_2PI[kind]
    return None


def scalar(code: int, literal: int | None = None, kind: str = "f32") -> Source:
    """A 32-bit scalar source."""
    if code < 128:
        return lambda batch, waves: batch.sgpr[code][waves]
    if code == _SCC:
        return lambda batch, waves: batch.scc[waves]
    if code in (_EXECZ, _VCCZ):
        pair = 126 if code == _EXECZ else 106
        return lambda batch, waves: ((batch.sgpr[pair][waves] | batch.sgpr[pair + 1][waves]) == 0).astype(np.uint32)
    bits = constant(code, literal, kind)
    if bits is None:
        raise UnknownInstruction(f"scalar source code {code}")
    value = np.full(1, bits & 0xFFFFFFFF, np.uint32)
    return lambda batch, waves: value


def scalar64(code: int, literal: int | None = None, kind: str = "b64") -> Source:
    """A 64-bit scalar source as uint64. kind "f64" reads inline floats and literals as doubles."""
    if code < 128:
        return lambda batch, waves: (
            batch.sgpr[code][waves].astype(np.uint64) | batch.sgpr[code + 1][waves].astype(np.uint64) << np.uint64(32)
        )
    bits = constant(code, literal, "f64" if kind == "f64" or 240 <= code <= 248 else "f32")
    if bits is None:
        raise UnknownInstruction(f"64-bit scalar source code {code}")
    value = np.full(1, bits & 0xFFFFFFFFFFFFFFFF, np.uint64)
    return lambda batch, waves: value


def vector(code: int, literal: int | None = None, kind: str = "f32", accumulator: bool = False) -> Source:
    """A 32-bit vector source. accumulator: VGPR codes mean AGPRs."""
    if code >= FIRST_VGPR:
        register = code - FIRST_VGPR + (AGPR if accumulator else 0)
        return lambda batch, waves: batch.vgpr[register][waves]
    read = scalar(code, literal, kind)
    return lambda batch, waves: read(batch, waves)[:, None]


def vector64(code: int, literal: int | None = None, kind: str = "b64") -> Source:
    """A 64-bit vector source (a register pair) as uint64."""
    if code >= FIRST_VGPR:
        low, high = code - FIRST_VGPR, code - FIRST_VGPR + 1
        return lambda batch, waves: (
            batch.vgpr[low][waves].astype(np.uint64) | batch.vgpr[high][waves].astype(np.uint64) << np.uint64(32)
        )
    read = scalar64(code, literal, kind)
    return lambda batch, waves: read(batch, waves)[:, None]
