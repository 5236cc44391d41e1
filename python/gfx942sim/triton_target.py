"""Triton on the simulator: a driver under which `kernel[grid](...)` compiles for gfx942 and runs on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver as active_driver

from .code_object import LDS_BYTES_PER_CU, CodeObject
from .device import SimulatedDevice
from .errors import BadLaunch, SimulationError

TARGET = GPUTarget("hip", "gfx942", 64)
# Triton caches a kernel's target per device number; one that no real device has keeps the caches apart.
_DEVICE = 942


class _Utils:
    def load_binary(self, name: str, binary: bytes, shared: int, device: int):
        code = CodeObject(binary)
        resources = code.resources(name)
        return code, (code, name), resources.vgpr, resources.vgpr_spills, 1024

    def unload_module(self, module: CodeObject) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return {
            "arch": TARGET.arch,
            "warpSize": TARGET.warp_size,
            "max_shared_mem": LDS_BYTES_PER_CU,
            "multiprocessor_count": 304,
            "max_num_regs": 65536,
            "cooperativeLaunch": 0,
        }


class _Launcher:
    """What Triton calls for every launch of one compiled kernel."""

    def __init__(self, source: Any, metadata: Any):
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise SimulationError(f"{metadata.name} wants scratch memory from the host, which is not provided")
        self.metadata = metadata
        self.types = list(source.signature.values())

    def __call__(self, grid_x, grid_y, grid_z, stream, function, packed, launch_metadata, enter, leave, *args) -> None:
        code, name = function
        device = active_driver.active.device
        values = _runtime_arguments(self.types, args)
        # Triton's last two kernel arguments are pointers to host-provided scratch memory: none.
        missing = sum(not a.hidden for a in code.arguments(name)) - len(values)
        device.launch(
            code,
            name,
            (grid_x, grid_y, grid_z),
            (TARGET.warp_size * self.metadata.num_warps, 1, 1),
            [*values, *([None] * missing)],
            self.metadata.shared,
        )


def _runtime_arguments(types: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The arguments that reach the kernel, in order; constants are compiled in. Tuples are taken apart."""
    found: list[Any] = []
    for kind, value in zip(types, args, strict=True):
        if isinstance(kind, tuple | list):
            found += _runtime_arguments(kind, value)
        elif isinstance(kind, str) and kind.startswith("tensordesc"):
            raise BadLaunch("tensor descriptors as arguments are not supported by the simulator")
        elif kind != "constexpr":
            found.append(value)
    return found


class SimulatorDriver(DriverBase):
    """The Triton driver of one simulated device."""

    def __init__(self, device: SimulatedDevice):
        self.device = device
        self.utils = _Utils()
        self.launcher_cls = _Launcher

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return _DEVICE

    def set_current_device(self, device: int) -> None:
        if device != _DEVICE:
            raise BadLaunch(f"device {device}: the simulator has one")

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        raise SimulationError("the simulator has no clock to benchmark with; ask for cost=True")


@contextmanager
def simulated_triton(*buffers: Any, **options: Any) -> Iterator[SimulatedDevice]:
    """Inside the `with` block, every Triton kernel compiles for gfx942 and runs on the simulator.

    Args:
        buffers: what kernels reach by raw pointers, besides their tensor arguments.
        options: keyword arguments of gfx942sim.launch, for every launch.
    """
    device = SimulatedDevice(options=options)
    device.register(*buffers)
    try:
        before = active_driver.active
    except RuntimeError:  # no GPU: there is no default driver
        before = None
    active_driver.set_active(SimulatorDriver(device))
    try:
        yield device
    finally:
        active_driver.set_active(before)
