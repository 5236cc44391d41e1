"""Stub: being written."""

from .errors import UnknownInstruction


def translate(instruction, descriptor):
    raise UnknownInstruction(f"{instruction.mnemonic} is not implemented")
