"""What the HIP stand-in and the Triton driver launch on: options, known buffers and the results so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .buffers import BufferRegistry, extent
from .code_object import CodeObject
from .launch import LaunchResult, launch


@dataclass
class SimulatedDevice:
    """One simulated gfx942.

    options: keyword arguments of `launch` (order, races, cost, ...) for every launch. registry: what kernels may
    access. launches: the results, oldest first.
    """

    options: dict[str, Any] = field(default_factory=dict)
    registry: BufferRegistry = field(default_factory=BufferRegistry)
    launches: list[LaunchResult] = field(default_factory=list)

    def register(self, *values: Any) -> None:
        """Let kernels access arrays or tensors that they reach by a raw pointer; a dict names them."""
        for value in values:
            named = value if isinstance(value, Mapping) else {f"buffer {sum(1 for _ in self.registry)}": value}
            for label, one in named.items():
                self.registry.add(one, label)

    def launch(
        self,
        code: CodeObject,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        dynamic_lds: int,
    ) -> LaunchResult:
        """Run one kernel. Tensors among `args` may be accessed by this launch only."""
        named = [(i, extent(value)) for i, value in enumerate(args)]
        reach = [(e[0], e[1] - e[0], f"argument {i} {e[2]}") for i, e in named if e is not None and e[1] > e[0]]
        pointers = [value if e is None else e[0] for value, (_, e) in zip(args, named, strict=True)]
        with self.registry.temporarily(reach):
            result = launch(code, kernel, grid, block, pointers, dynamic_lds, buffers=self.registry, **self.options)
        self.launches.append(result)
        return result
