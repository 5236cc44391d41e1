"""Vector instructions of one result: VOP1, VOP2, VOP3 and VOP3SD, with their SDWA and DPP forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import vector_convert, vector_float, vector_int, vector_lanes
from .code_object import Descriptor
from .decode import Instruction
from .errors import UnknownInstruction
from .modifiers import Encoding, Reader, Writer, ieee_mode, saturated
from .operation import Operation
from .state import VCC, Batch, Selection

if TYPE_CHECKING:
    from .translate import Handler

_DIRECT = {"u32": np.uint32, "b32": np.uint32, "i32": np.int32, "f32": np.float32}
_NO_EFFECT = frozenset(("v_nop", "v_clrexcp"))


def operations(ieee: bool) -> dict[str, Operation]:
    """All mnemonics of this module and what they compute, except for the ones that move data between lanes."""
    return vector_int.OPERATIONS | vector_convert.OPERATIONS | vector_float.operations(ieee)


_OPERATIONS = {ieee: operations(ieee) for ieee in (False, True)}


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """VOP1, VOP2, VOP3 and VOP3SD.

    Raises:
        UnknownInstruction: the mnemonic, or a modifier that it does not take.
    """
    name = instruction.mnemonic
    if name in _NO_EFFECT:
        return None
    encoding = Encoding(instruction, descriptor)
    if name in vector_lanes.TRANSLATORS:
        return vector_lanes.TRANSLATORS[name](encoding)
    operation = _OPERATIONS[ieee_mode(descriptor)].get(name)
    if operation is None:
        raise UnknownInstruction(f"{name} is not implemented")
    readers = _readers(encoding, operation)
    if operation.result.endswith("+mask"):
        return _with_carry(encoding, operation, readers)
    function = operation.function
    if encoding.clamp and operation.result[0] in "iub":
        function = saturating(operation)
    write = encoding.writer(operation.result, operation.preserves_high)
    handler = compose(function, readers, write)
    plain = encoding.plain_result and not encoding.flushes(operation.result)
    if plain and operation.result in _DIRECT and isinstance(operation.function, np.ufunc):
        return _in_place(operation.function, readers, encoding.destination, _DIRECT[operation.result], handler)
    return handler


def _readers(encoding: Encoding, operation: Operation) -> list[Reader]:
    readers, index = [], 0
    for source in operation.sources:
        if source.startswith("D:"):
            readers.append(encoding.old_destination(source[2:]))
        elif source.startswith("K:"):
            readers.append(encoding.literal(source[2:]))
        else:
            readers.append(encoding.reader(source, index))
            index += 1
    if operation.largest:
        return [_limited(reader, operation.largest) for reader in readers]
    return readers


def _limited(read: Reader, largest: float) -> Reader:
    return lambda batch, waves: saturated(batch, waves, read(batch, waves), largest)


def compose(function: Callable[..., np.ndarray], readers: list[Reader], write: Writer) -> Handler:
    """Read all, compute, write."""
    if len(readers) == 1:
        (only,) = readers
        return lambda batch, waves: write(batch, waves, function(only(batch, waves)))
    if len(readers) == 2:
        left, right = readers
        return lambda batch, waves: write(batch, waves, function(left(batch, waves), right(batch, waves)))
    return lambda batch, waves: write(batch, waves, function(*[read(batch, waves) for read in readers]))


def _in_place(ufunc: np.ufunc, readers: list[Reader], register: int, dtype: type, otherwise: Handler) -> Handler:
    """Let numpy write into the register when all lanes of all waves take part."""

    def handler(batch: Batch, waves: Selection) -> None:
        if isinstance(waves, slice) and batch.exec.all():
            ufunc(*[read(batch, waves) for read in readers], out=batch.vgpr[register].view(dtype))
        else:
            otherwise(batch, waves)

    return handler


def saturating(operation: Operation) -> Callable[..., np.ndarray]:
    """The function with its exact result clipped to the range of the result's type."""
    if not operation.saturates:
        raise UnknownInstruction("clamp on an instruction without saturation")
    dtype = {"i32": np.int32, "u32": np.uint32, "i16": np.int16, "u16": np.uint16}[operation.result]
    limits = np.iinfo(dtype)
    function = operation.function

    def saturated(*sources: np.ndarray) -> np.ndarray:
        exact = function(*[source.astype(np.int64) for source in sources])
        return np.clip(exact, limits.min, limits.max).astype(dtype)

    return saturated


def _with_carry(encoding: Encoding, operation: Operation, readers: list[Reader]) -> Handler:
    """A vector result and a lane mask, which goes to sdst, or to VCC where the encoding has none."""
    if encoding.clamp and operation.result[0] in "iu":
        raise UnknownInstruction("clamp on an instruction with a carry output")
    if encoding.move is not None and not encoding.move.writes_all:
        raise UnknownInstruction("DPP that disables lanes of an instruction with a carry output")
    instruction = encoding.instruction
    target = instruction.field("sdst") if instruction.has("sdst") else VCC
    write = encoding.writer(operation.result.removesuffix("+mask"))
    function = operation.function

    def handler(batch: Batch, waves: Selection) -> None:
        value, carry = function(*[read(batch, waves) for read in readers])
        write(batch, waves, value)
        batch.write_lane_mask(waves, target, carry)

    return handler
