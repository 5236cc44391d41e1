"""Runs a kernel of a code object on numpy arrays and torch CPU tensors."""

from __future__ import annotations

import ctypes
import itertools
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .buffers import BufferRegistry, extent
from .code_object import LDS_BYTES_PER_CU, Argument, CodeObject, Resources
from .cost import CostCounter, CostReport
from .errors import BadLaunch
from .races import LdsRace, LdsRaces, RaceCheck
from .scheduler import ORDERS, Scheduler
from .state import Batch, Observer
from .translate import program
from .uninitialised import LdsWriteCheck, RegisterWriteCheck, UninitialisedRead

_KERNARG_PADDING = 64
_MAX_THREADS = 1024
Dim = tuple[int, int, int]


@dataclass
class LaunchResult:
    """What one launch did.

    code: the code object that ran. instructions: wave-instructions executed. seconds: on this machine's clock, of the
    simulation. cost: counted work, or None. races, uninitialised: findings, when asked for with "report".
    """

    kernel: str
    code: CodeObject
    instructions: int
    seconds: float
    cost: CostReport | None = None
    races: list[LdsRace] = field(default_factory=list)
    uninitialised: list[UninitialisedRead] = field(default_factory=list)

    @property
    def resources(self) -> Resources:
        """Registers, LDS and spills of the kernel."""
        return self.code.resources(self.kernel)


def launch(
    code: CodeObject,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any] = (),
    dynamic_lds: int = 0,
    *,
    order: str = "lockstep",
    seed: int = 0,
    races: str = "raise",
    uninitialised: str = "off",
    cost: bool = False,
    buffers: Sequence[Any] | BufferRegistry = (),
    workgroups: Sequence[Dim] | None = None,
    batch_waves: int = 256,
    max_instructions: int = 2_000_000_000,
) -> LaunchResult:
    """Run one kernel to its end.

    Args:
        grid: work-groups per axis (not work-items). block: work-items per axis. Missing axes are 1.
        args: the explicit arguments in order: arrays and tensors are passed by address and may be accessed by the
            kernel; ints, floats and numpy scalars by value; bytes as they are; None is a null pointer.
        dynamic_lds: bytes of LDS on top of the kernel's static ones.
        order: "lockstep", "forward", "reverse" or "random" (with `seed`): see Scheduler.
        races: "raise" (LdsRaces after the launch), "report" (in the result) or "off".
        uninitialised: reads of LDS and registers that nobody wrote: "raise", "report", "off"; "lds" raises for LDS
            only. Compilers read unwritten registers on purpose (undefined halves, merged lanes), so registers are only
            worth a look where the source is known.
        cost: count the work; see cost.CostReport.
        buffers: arrays or tensors that the kernel reaches by other ways than its arguments, or a whole registry.
        workgroups: run only these (for sampling), with the grid's size unchanged.
        batch_waves: waves simulated together.

    Raises:
        BadLaunch: grid, block, LDS or arguments do not fit. SimulationError: anything that went wrong while running.
    """
    began = time.perf_counter()
    grid3, block3 = _dims(grid, "grid"), _dims(block, "block")
    _check_choice("order", order, ORDERS)
    _check_choice("races", races, ("raise", "report", "off"))
    _check_choice("uninitialised", uninitialised, ("raise", "report", "off", "lds"))
    resources = code.resources(kernel)
    threads = block3[0] * block3[1] * block3[2]
    most = min(_MAX_THREADS, code.kernels[kernel].get(".max_flat_workgroup_size", _MAX_THREADS))
    if threads > most:
        raise BadLaunch(f"block {block3} has {threads} work-items; {kernel} allows {most}")
    lds_bytes = resources.lds + dynamic_lds
    if dynamic_lds < 0 or lds_bytes > LDS_BYTES_PER_CU:
        raise BadLaunch(
            f"{resources.lds} static + {dynamic_lds} dynamic bytes of LDS; a work-group has {LDS_BYTES_PER_CU}"
        )
    kernarg = pack_arguments(code, kernel, args, grid3, block3, dynamic_lds)
    registry = _registry(buffers, args)
    race_check = RaceCheck(code, kernel) if races != "off" else None
    counter = CostCounter() if cost else None
    lds_check = LdsWriteCheck(uninitialised != "report") if uninitialised != "off" else None
    register_check = RegisterWriteCheck(uninitialised == "raise") if uninitialised in ("raise", "report") else None
    observers: list[Observer] = [o for o in (race_check, counter, lds_check) if o is not None]

    chosen = list(workgroups) if workgroups is not None else _all_workgroups(grid3)
    kept = ctypes.create_string_buffer(kernarg, len(kernarg) + _KERNARG_PADDING)
    address = ctypes.addressof(kept)
    per_batch = max(1, batch_waves // -(-threads // 64))
    counts: dict[int, int] = {}
    executed = 0
    prog = program(code, kernel)
    own = [(address, len(kept), "kernel arguments"), (code.base, len(code.image), "code object image")]
    with registry.temporarily(own):
        for first in range(0, len(chosen), per_batch):
            batch = Batch(
                prog.descriptor,
                image_base=code.base,
                agprs=resources.agpr > 0,
                workgroups=chosen[first : first + per_batch],
                block=block3,
                lds_bytes=lds_bytes,
                kernarg=kernarg,
                kernarg_address=address,
                registry=registry,
                observers=observers,
            )
            runner = Scheduler(prog, batch, order, seed + first, counts, max_instructions - executed, register_check)
            executed += runner.run()
    result = LaunchResult(kernel, code, executed, time.perf_counter() - began)
    if counter is not None:
        total = grid3[0] * grid3[1] * grid3[2]
        result.cost = counter.report(prog, counts, resources, threads, dynamic_lds, len(chosen), total)
    if lds_check is not None:
        result.uninitialised += lds_check.found
    if register_check is not None:
        result.uninitialised += register_check.found
    if race_check is not None:
        result.races = race_check.found()
        if result.races and races == "raise":
            raise LdsRaces(kernel, result.races)
    return result


def pack_arguments(
    code: CodeObject, kernel: str, args: Sequence[Any], grid: Dim, block: Dim, dynamic_lds: int = 0
) -> bytes:
    """The kernarg segment: explicit arguments in order, hidden ones from the launch.

    Raises:
        BadLaunch: too many or too few arguments, or one that does not fit its size.
    """
    declared = code.arguments(kernel)
    explicit = [a for a in declared if not a.hidden]
    if len(args) != len(explicit):
        names = ", ".join(f"{a.name} ({a.kind}, {a.size} bytes)" for a in explicit)
        raise BadLaunch(f"{kernel} takes {len(explicit)} arguments, got {len(args)}: {names}")
    segment = bytearray(max(code.resources(kernel).kernarg, 16))
    for argument, value in zip(explicit, args, strict=True):
        segment[argument.offset : argument.offset + argument.size] = _argument_bytes(kernel, argument, value)
    axes = dict(zip("xyz", range(3), strict=True))
    for argument in declared:
        if not argument.hidden:
            continue
        kind, axis = argument.kind.removeprefix("hidden_").rsplit("_", 1)[0], axes.get(argument.kind[-1], 0)
        known = {
            "block_count": grid[axis],
            "group_size": block[axis],
            "remainder": 0,
            "grid": 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1,  # hidden_grid_dims
            "dynamic_lds": dynamic_lds,  # hidden_dynamic_lds_size
        }
        # Offsets, queues, heaps and host-call buffers: zero, as for a launch that does not use them.
        value = known.get(kind, 0)
        segment[argument.offset : argument.offset + argument.size] = value.to_bytes(argument.size, "little")
    return bytes(segment)


def _argument_bytes(kernel: str, argument: Argument, value: Any) -> bytes:
    found = extent(value)
    try:
        if found is not None:
            packed = struct.pack("<Q", found[0])
        elif value is None:
            packed = bytes(argument.size)
        elif isinstance(value, bytes | bytearray):
            packed = bytes(value)
        elif isinstance(value, np.generic):
            packed = value.tobytes()
        elif isinstance(value, bool | int):
            packed = int(value).to_bytes(argument.size, "little", signed=value < 0)
        elif isinstance(value, float):
            packed = struct.pack({8: "<d", 4: "<f", 2: "<e"}[argument.size], value)
        else:
            raise BadLaunch(f"{kernel}: argument {argument.name} is a {type(value).__name__}, which cannot be passed")
    except (OverflowError, KeyError, struct.error) as error:
        raise BadLaunch(f"{kernel}: {value!r} does not fit {argument.name}, {argument.size} bytes ({error})") from None
    if len(packed) != argument.size:
        raise BadLaunch(f"{kernel}: argument {argument.name} takes {argument.size} bytes, got {len(packed)}")
    return packed


def _registry(buffers: Sequence[Any] | BufferRegistry, args: Sequence[Any]) -> BufferRegistry:
    if isinstance(buffers, BufferRegistry):
        registry = buffers
        more: Sequence[Any] = ()
    else:
        registry, more = BufferRegistry(), buffers
    for i, value in enumerate(itertools.chain(args, more)):
        if extent(value) is not None:
            registry.add(value, f"argument {i}" if i < len(args) else f"buffer {i - len(args)}")
    return registry


def _dims(value: Sequence[int], what: str) -> Dim:
    dims = tuple(int(v) for v in value) + (1,) * (3 - len(value))
    if len(dims) != 3 or min(dims) < 1:
        raise BadLaunch(f"{what} {tuple(value)}: wanted one to three sizes of at least 1")
    return dims


def _all_workgroups(grid: Dim) -> list[Dim]:
    return [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise BadLaunch(f"{name}={value!r}; allowed: {', '.join(allowed)}")
