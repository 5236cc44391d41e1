"""gfx942sim: runs gfx942 (CDNA3, wave64) code objects on the CPU, with race checks and a cost report.

    from gfx942sim import CodeObject, launch
    code = CodeObject.from_file("kernel.hsaco")
    result = launch(code, "kernel", grid=(4,), block=(256,), args=(x, y, 1024), cost=True)

It is a functional model: what it models and what it does not is in docs/simulator.md.
"""

from .buffers import BufferRegistry
from .code_object import CodeObject, Resources
from .errors import SimulationError
from .launch import LaunchResult, launch, pack_arguments

__all__ = ["BufferRegistry", "CodeObject", "LaunchResult", "Resources", "SimulationError", "launch", "pack_arguments"]
