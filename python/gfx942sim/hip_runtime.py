"""A HIP runtime stand-in, so that FlyDSL's own host launcher runs unmodified on CPU tensors.

`libamdhip64.so.7` is built from hip_stub.c with the system's C compiler on first use, and loaded before anything else
asks for it. Device memory is this process's memory; a kernel launch comes back here and runs on the simulator.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .cache import built
from .code_object import CodeObject, elf_size
from .device import SimulatedDevice
from .errors import SimulationError

_LIBRARY = "libamdhip64.so.7"
_LAUNCH_FAILURE = 719
# The symbol version that programs built against ROCm's library ask for.
_VERSION_SCRIPT = "hip_4.2 { global: hip*; gfx942sim_*; local: *; };\n"

_LaunchCallback = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_void_p),
)
_MemoryCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Active:
    """The device that launches go to, and the first error of it. C code cannot carry a Python exception."""

    device: SimulatedDevice | None = None
    error: BaseException | None = None


_codes: dict[bytes, CodeObject] = {}


def build_library() -> Path:
    """Compile the stand-in; returns the path of the shared library.

    Raises:
        SimulationError: no C compiler, or it failed (with its output).
    """
    source = Path(__file__).with_name("hip_stub.c")
    compiler = os.environ.get("CC", "cc")

    def build(folder: Path) -> None:
        script = folder / "hip.map"
        script.write_text(_VERSION_SCRIPT)
        command = [compiler, "-O2", "-shared", "-fPIC", f"-Wl,--version-script={script}", f"-Wl,-soname,{_LIBRARY}"]
        command += ["-o", str(folder / _LIBRARY), str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise SimulationError(f"no C compiler {compiler!r}: install gcc, or name one with CC") from None
        if done.returncode:
            raise SimulationError(f"{' '.join(command)} failed:\n{done.stderr}")

    return built("hip", source.read_bytes() + _VERSION_SCRIPT.encode(), build) / _LIBRARY


def _on_launch(image, kernel, grid, block, dynamic_lds, arguments, extra) -> int:
    device = _Active.device
    if device is None:
        return 100  # hipErrorNoDevice
    try:
        name = kernel.decode()
        # By content: images are loaded at addresses that get reused.
        elf = ctypes.string_at(image, elf_size(lambda at, size: ctypes.string_at(image + at, size)))
        if elf not in _codes:
            _codes[elf] = CodeObject(elf)
        code = _codes[elf]
        explicit = [a for a in code.arguments(name) if not a.hidden]
        values = [ctypes.string_at(arguments[i], a.size) for i, a in enumerate(explicit)]
        device.launch(code, name, grid[:3], block[:3], values, dynamic_lds)
    except BaseException as error:  # it must not cross C code; simulated_hip raises it
        if _Active.error is None:
            _Active.error = error
        return _LAUNCH_FAILURE
    return 0


def _on_memory(start: int, size: int, is_free: int) -> None:
    if _Active.device is not None:
        if is_free:
            _Active.device.registry.remove_range(start)
        else:
            _Active.device.registry.add_range(start, size, "hipMalloc")


@cache
def load() -> ctypes.CDLL:
    """Load the stand-in for the whole process, so that whatever links to libamdhip64.so.7 gets it.

    Raises:
        SimulationError: this process has a real HIP runtime already.
    """
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libamdhip64" in line}
    if loaded:
        raise SimulationError(
            f"a HIP runtime is loaded already ({', '.join(sorted(loaded))}): simulate in a process of its own"
        )
    library = ctypes.CDLL(str(build_library()), mode=ctypes.RTLD_GLOBAL)
    library.keep = (_LaunchCallback(_on_launch), _MemoryCallback(_on_memory))
    library.gfx942sim_set_callbacks(*library.keep)
    return library


@contextmanager
def simulated_hip(*buffers: Any, **options: Any) -> Iterator[SimulatedDevice]:
    """Inside the `with` block, HIP launches of this process run on the simulator.

    Args:
        buffers: arrays or tensors that kernels may access, or dicts that name them; more with `device.register`.
        options: keyword arguments of gfx942sim.launch, for every launch.

    Raises:
        SimulationError: what went wrong in the first failing launch, when the block ends.
    """
    load()
    if _Active.device is not None:
        raise SimulationError("a simulated device is active already")
    device = SimulatedDevice(options=options)
    device.register(*buffers)
    _Active.device, _Active.error = device, None
    try:
        yield device
    except Exception as error:
        if _Active.error is not None:
            raise _Active.error from error
        raise
    finally:
        _Active.device = None
    if _Active.error is not None:
        raise _Active.error


def run(function: Any, *args: Any, buffers: Sequence[Any] = (), **options: Any) -> SimulatedDevice:
    """Call a compiled FlyDSL function (or anything that launches through HIP) with tensors that kernels may access."""
    tensors = [a for a in args if hasattr(a, "data_ptr")]
    with simulated_hip(*tensors, *buffers, **options) as device:
        function(*args)
    return device
