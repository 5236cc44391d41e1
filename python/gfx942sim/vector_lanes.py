"""Instructions that move data between lanes and register files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import operands
from .errors import UnknownInstruction
from .modifiers import Encoding
from .state import AGPR, EXEC, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler


def _write_scalar(batch: Batch, waves: Selection, register: int, value: np.ndarray) -> None:
    batch.sgpr[register][waves] = value
    if register in (EXEC, EXEC + 1):
        batch.sync_exec(waves)


def _vector_register(encoding: Encoding, index: int = 0) -> int:
    code = encoding.sources[index].code
    if code < operands.FIRST_VGPR:
        raise UnknownInstruction("a scalar where a VGPR is read by lane")
    return code - operands.FIRST_VGPR


def _plain(encoding: Encoding) -> None:
    if not encoding.plain_result or any(source.negative or source.absolute for source in encoding.sources):
        raise UnknownInstruction("modifiers on an instruction that has none")


def _read_first_lane(encoding: Encoding) -> Handler:
    """From the lowest active lane, or lane 0 if none is."""
    _plain(encoding)
    register, source = encoding.destination, encoding.sources[0]
    if source.code < operands.FIRST_VGPR:
        scalar = operands.scalar(source.code, encoding.instruction.literal)
        return lambda batch, waves: _write_scalar(batch, waves, register, scalar(batch, waves))
    read = operands.vector(source.code)

    def handler(batch: Batch, waves: Selection) -> None:
        first = batch.exec[waves].argmax(1)
        value = read(batch, waves)
        _write_scalar(batch, waves, register, value[np.arange(len(value)), first])

    return handler


def _read_lane(encoding: Encoding) -> Handler:
    """EXEC does not matter."""
    _plain(encoding)
    target, register = encoding.destination, _vector_register(encoding)
    lane_of = operands.scalar(encoding.sources[1].code)

    def handler(batch: Batch, waves: Selection) -> None:
        value, lane = batch.vgpr[register][waves], lane_of(batch, waves) & 63
        _write_scalar(batch, waves, target, value[np.arange(len(value)), lane])

    return handler


def _write_lane(encoding: Encoding) -> Handler:
    """EXEC does not matter."""
    _plain(encoding)
    register = encoding.destination
    value_of, lane_of = (operands.scalar(source.code) for source in encoding.sources[:2])

    def handler(batch: Batch, waves: Selection) -> None:
        rows = np.arange(batch.waves)[waves]
        batch.vgpr[register][rows, lane_of(batch, waves) & 63] = value_of(batch, waves)

    return handler


def _swap(encoding: Encoding) -> Handler:
    _plain(encoding)
    first, second = encoding.destination, _vector_register(encoding)

    def handler(batch: Batch, waves: Selection) -> None:
        old_first, old_second = (batch.vgpr[register][waves].copy() for register in (first, second))
        batch.write_vgpr(waves, first, old_second)
        batch.write_vgpr(waves, second, old_first)

    return handler


def _move_accumulator(encoding: Encoding) -> Handler:
    _plain(encoding)
    target, register = encoding.destination + AGPR, _vector_register(encoding) + AGPR
    return lambda batch, waves: batch.write_vgpr(waves, target, batch.vgpr[register][waves])


TRANSLATORS: dict[str, Callable[[Encoding], Handler]] = {
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_swap_b32": _swap,
    "v_accvgpr_mov_b32": _move_accumulator,
}
