"""Where kernel tests run: on an MI300X if there is one, else on gfx942sim, with the same code.

On the simulator the tensors are CPU tensors, every launch is race-checked, LDS that nobody wrote is a fault, and what a
launch may touch is listed: everything else is a fault too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

HARDWARE = torch.version.hip is not None and torch.cuda.is_available()
DEVICE = torch.device("cuda" if HARDWARE else "cpu")
# Orders in which the simulator runs the waves of a work-group. The hardware has one order, its own.
ORDERS = [("hardware", 0)] if HARDWARE else [("lockstep", 0), ("forward", 0), ("reverse", 0), ("random", 1)]

if not HARDWARE:
    from gfx942sim import flydsl_target

    flydsl_target.prepare()


@contextmanager
def flydsl_launches(tensors: dict[str, torch.Tensor], **options: Any) -> Iterator[Any]:
    """Launches of FlyDSL kernels inside may touch `tensors` (by name). Yields the SimulatedDevice, or None on hardware.

    Args:
        options: of gfx942sim.launch; ignored on hardware.
    """
    if HARDWARE:
        yield None
        torch.cuda.synchronize()
        return
    from gfx942sim import hip_runtime

    with hip_runtime.simulated_hip(tensors, **({"uninitialised": "lds"} | options)) as device:
        yield device


def bytes_read(launch: Any, *names: str) -> int:
    """Bytes that the lanes of a cost-counted launch asked for from buffers of these names."""
    buffers = launch.cost.buffers.items()
    return sum(b.get("read_bytes", 0) for label, b in buffers if label.split()[0] in names)


@contextmanager
def triton_launches(*tensors: torch.Tensor, **options: Any) -> Iterator[Any]:
    """The same for Triton kernels, whose tensor arguments need not be listed."""
    if HARDWARE:
        yield None
        torch.cuda.synchronize()
        return
    from gfx942sim.triton_target import simulated_triton

    with simulated_triton(*tensors, **options) as device:
        yield device
