"""Device memory is this process's memory: who may be accessed (`BufferRegistry`) and how (`view_of`)."""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BadLaunch, OutOfRange

# The lowest address that Linux maps for programs, and the first that x86-64 and arm64 user space cannot have. It is a
# multiple of 16, so that an index into a view of any width is a shift.
LOWEST = 1 << 16
_HIGHEST = 1 << 47


def view_of(dtype: np.dtype | type) -> np.ndarray:
    """The whole address space as one array of `dtype`: element i is at address LOWEST + i * itemsize.

    Only addresses that a `BufferRegistry` has confirmed may be indexed; any other is a segmentation fault.
    """
    size = np.dtype(dtype).itemsize
    count = (_HIGHEST - LOWEST) // size
    raw = (ctypes.c_uint8 * size * count).from_address(LOWEST)
    return np.ndarray(shape=(count,), dtype=dtype, buffer=raw)


@dataclass(frozen=True)
class Buffer:
    """Bytes `start` up to, not including, `end`, which kernels may access. `label` is for messages."""

    start: int
    end: int
    label: str

    def __str__(self) -> str:
        return f"{self.label} [{self.start:#x}, {self.end:#x})"


def extent(value: Any) -> tuple[int, int, str] | None:
    """(start, end, description) of the bytes that a numpy array or torch CPU tensor reaches, or None if it is neither.

    A view counts with its own bytes only: a read past the end of a slice is a fault even where the storage goes on.
    """
    if isinstance(value, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(value)
        return low, high, f"{value.dtype}{list(value.shape)}"
    if hasattr(value, "data_ptr") and hasattr(value, "stride"):
        if value.device.type != "cpu":
            raise BadLaunch(f"tensor on {value.device}; the simulator takes CPU tensors")
        start = value.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1 if value.numel() else 0
        return start, start + reach * value.element_size(), f"{value.dtype}{list(value.shape)}".replace("torch.", "")
    return None


class BufferRegistry:
    """The buffers that a launch may access, by address."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._starts: list[int] = []
        # Element i: the largest end of the buffers 0..i, or None if it has to be made again.
        self._reach: list[int] | None = None
        self._keep_alive: list[Any] = []

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._buffers)

    def add(self, value: Any, label: str = "buffer") -> Buffer | None:
        """Register an array or tensor. Returns None for empty ones. Raises BadLaunch for anything else."""
        found = extent(value)
        if found is None:
            raise BadLaunch(f"{label}: {type(value).__name__} is neither a numpy array nor a torch tensor")
        start, end, description = found
        self._keep_alive.append(value)
        return self.add_range(start, end - start, f"{label} {description}") if end > start else None

    def add_range(self, start: int, size: int, label: str) -> Buffer:
        buffer = Buffer(start, start + size, label)
        at = bisect.bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._buffers.insert(at, buffer)
        self._reach = None
        return buffer

    def remove_range(self, start: int) -> None:
        """Forget the buffers that begin at `start`, so that a use after free is found."""
        self._buffers = [b for b in self._buffers if b.start != start]
        self._starts = [b.start for b in self._buffers]
        self._reach = None

    @contextmanager
    def temporarily(self, other: list[tuple[int, int, str]]):
        """Add (start, size, label) ranges for the length of a `with` block."""
        before = list(self._buffers), list(self._starts)
        for start, size, label in other:
            self.add_range(start, size, label)
        try:
            yield self
        finally:
            self._buffers, self._starts = before
            self._reach = None

    def holding(self, address: int) -> list[Buffer]:
        """The buffers that hold the byte at `address` (views of one storage may overlap)."""
        last = bisect.bisect_right(self._starts, address)
        return [b for b in self._buffers[:last] if address < b.end]

    def nearest(self, address: int) -> str:
        """Where `address` lies, in words, measured from the closest buffer."""
        if not self._buffers:
            return "no buffer is registered"
        closest = min(self._buffers, key=lambda b: max(b.start - address, address - b.end + 1, 0))
        if address < closest.start:
            return f"{closest.start - address} bytes before {closest}"
        if address >= closest.end:
            return f"{address - closest.end} bytes past the end of {closest}"
        return f"inside {closest}, but the access crosses its end"

    def check(self, address: np.ndarray, active: np.ndarray, size: int, what: str) -> tuple[int, int]:
        """Raise OutOfRange unless each active access of `size` bytes lies in one registered buffer.

        Args:
            address: int64 [waves, 64], bytes. active: bool, same shape.
            what: "read", "write" or "atomic", for the message.

        Returns:
            The lowest address and the end of the highest access, of all lanes.
        """
        # An access lies in one buffer if a buffer that begins at or before it ends at or after its end.
        reach = self._reach
        if reach is None:
            reach = self._reach = list(itertools.accumulate((b.end for b in self._buffers), max))
        low, high = int(address.min()), int(address.max()) + size
        last = bisect.bisect_right(self._starts, low) - 1
        if last >= 0 and high <= reach[last]:
            return low, high
        # More than one buffer, or something that is out of range (perhaps only of lanes that take no part).
        inside = address[active]
        before = np.searchsorted(self._starts, inside, side="right") - 1
        ends = np.array(reach or [0], np.int64)[before]
        outside = np.flatnonzero((before < 0) | (inside > ends - size))
        if outside.size:
            wave, lane = np.argwhere(active)[outside[0]]
            one = int(address[wave, lane])
            raise OutOfRange(
                f"{size}-byte {what} at {one:#x} by lane {lane} (row {wave} of the waves in step): {self.nearest(one)}"
            )
        return low, high
