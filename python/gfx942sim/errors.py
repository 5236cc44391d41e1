"""What can go wrong in a simulated launch. Every error says kernel, instruction address and mnemonic."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """A launch that stopped. `kernel`, `address` (bytes from the start of the image) and `mnemonic` say where."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message
        self.kernel: str | None = None
        self.address: int | None = None
        self.mnemonic: str | None = None

    def at(self, kernel: str, address: int, mnemonic: str) -> SimulationError:
        """Add the place, once: the first one to know it is the innermost. Returns self, to be raised."""
        if self.address is None:
            self.kernel, self.address, self.mnemonic = kernel, address, mnemonic
        return self

    def __str__(self) -> str:
        if self.address is None:
            return self.message
        return f"{self.kernel} at {self.address:#x}, {self.mnemonic}: {self.message}"


class BadCodeObject(SimulationError):
    """The file is not a gfx942 code object, or uses a part of the format that the loader does not know."""


class BadLaunch(SimulationError):
    """The arguments, grid or block of a launch do not fit the kernel."""


class UnknownInstruction(SimulationError):
    """An instruction, operand or modifier that the simulator does not implement. It is never skipped."""


class OutOfRange(SimulationError):
    """A global, scratch or LDS access outside of everything the launch was given."""


class Uninitialised(SimulationError):
    """A read of LDS or of a register that nobody wrote."""


class NoProgress(SimulationError):
    """Waves wait for each other and none can go on, or the instruction limit was reached."""
