"""Instructions to handlers, once per kernel: `Program` is the cache that the scheduler runs from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from . import buffer_memory, compare, control, flat_memory, lds, mfma, packed, scalar, scalar_memory, vector
from .code_object import CodeObject, Descriptor
from .decode import Instruction, decode
from .errors import SimulationError, UnknownInstruction
from .state import Batch, Selection

# Changes the batch for the selected waves. None: the instruction has no effect that is modelled (s_nop, s_waitcnt).
Handler = Callable[[Batch, Selection], None]

_BY_ENCODING = {
    "SOPP": control.translate,
    "SOP1": scalar.translate,
    "SOP2": scalar.translate,
    "SOPC": scalar.translate,
    "SOPK": scalar.translate,
    "SMEM": scalar_memory.translate,
    "DS": lds.translate,
    "MUBUF": buffer_memory.translate,
    "FLAT": flat_memory.translate,
    "GLOBAL": flat_memory.translate,
    "SCRATCH": flat_memory.translate,
    "VOPC": compare.translate,
    "VOP3P": packed.translate,
    "VOP1": vector.translate,
    "VOP2": vector.translate,
    "VOP3": vector.translate,
    "VOP3SD": vector.translate,
}


def translate(instruction: Instruction, descriptor: Descriptor) -> Handler | None:
    """The handler of one instruction.

    Raises:
        UnknownInstruction: it, its operand or a modifier is not implemented.
    """
    if instruction.mnemonic.startswith(("v_mfma", "v_smfmac")):
        return mfma.translate(instruction, descriptor)
    if instruction.mnemonic.startswith("v_cmp"):
        return compare.translate(instruction, descriptor)
    family = instruction.encoding.split("_")[0]
    if family not in _BY_ENCODING:
        raise UnknownInstruction(f"encoding {instruction.encoding} is not implemented")
    return _BY_ENCODING[family](instruction, descriptor)


class Step(NamedTuple):
    """One translated instruction and the address of the next one (bytes from the start of the image)."""

    run: Handler | None
    next: int
    ends_block: bool
    instruction: Instruction


class Program:
    """The translated instructions of one kernel, filled as they are first reached.

    Nothing in it depends on a launch or on where the image was loaded, so it is shared by all code objects of the same
    content.
    """

    def __init__(self, image: bytes, kernel: str, descriptor: Descriptor):
        self.image, self.kernel, self.descriptor = image, kernel, descriptor
        self.steps: dict[int, Step] = {}

    def step(self, address: int) -> Step:
        """The instruction at `address`. Raises UnknownInstruction, with its place."""
        found = self.steps.get(address)
        if found is None:
            try:
                instruction = decode(self.image, address)
            except SimulationError as error:
                raise error.at(self.kernel, address, "?") from None
            try:
                handler = translate(instruction, self.descriptor)
            except SimulationError as error:
                raise error.at(self.kernel, address, instruction.text) from None
            found = Step(handler, address + instruction.size, instruction.ends_block, instruction)
            self.steps[address] = found
        return found


_programs: dict[tuple[str, str], Program] = {}


def program(code: CodeObject, kernel: str) -> Program:
    """The program of a kernel, by the content of the code object: images are loaded at addresses that get reused."""
    key = code.digest, kernel
    if key not in _programs:
        _programs[key] = Program(bytes(code.image), kernel, code.descriptor(kernel))
    return _programs[key]
