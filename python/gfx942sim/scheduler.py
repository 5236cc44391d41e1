"""Runs the waves of a batch in a chosen order until all have ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from .decode import Instruction
from .errors import NoProgress, SimulationError
from .state import Batch, Selection
from .translate import Program

ORDERS = ("lockstep", "forward", "reverse", "random")
# A spinning wave must not starve the one it waits for: every so many picks, lockstep lets the wave that is furthest
# ahead run instead of the one that is furthest behind.
_FAIR_EVERY = 256
_RANDOM_RUN = 64


class InstructionCheck(Protocol):
    """Looks at every instruction of a batch before it runs."""

    def begin(self, batch: Batch) -> None: ...

    def before(self, batch: Batch, waves: Selection, instruction: Instruction) -> None: ...


_Ranking = Callable[[], np.ndarray | None]


def _ranking(batch: Batch, order: str, rng: np.random.Generator) -> _Ranking:
    """A function that gives each wave's rank inside its work-group (lowest runs first), or None: all may run."""
    if order == "lockstep":
        return lambda: None
    if order == "forward":
        return lambda: batch.wave_in_group
    if order == "reverse":
        return lambda: batch.waves_per_group - 1 - batch.wave_in_group
    return lambda: rng.permutation(batch.waves_per_group)[batch.wave_in_group]


class Scheduler:
    """Executes one batch.

    Waves of different work-groups that are at the same instruction run it together; which waves of one work-group run
    between two barriers is the order's choice:

    * lockstep: all, the ones furthest behind first, so that they stay together;
    * forward, reverse: one wave at a time up to the next barrier, in order of wave number;
    * random: one wave at a time, changed after a random number of instructions (at most 64).

    Args:
        counts: address -> executed wave-instructions; added to.
        limit: wave-instructions after which NoProgress is raised.
        register_check: sees every instruction before it runs.
    """

    def __init__(
        self,
        program: Program,
        batch: Batch,
        order: str,
        seed: int,
        counts: dict[int, int],
        limit: int,
        register_check: InstructionCheck | None = None,
    ):
        self.program, self.batch, self.counts, self.limit = program, batch, counts, limit
        self.register_check = register_check
        if register_check is not None:
            register_check.begin(batch)
        self.random = order == "random"
        self.rng = np.random.default_rng(seed)
        self.rank = _ranking(batch, order, self.rng)
        self.executed = 0
        self.picks = 0

    def run(self) -> int:
        """Run to the end; returns the wave-instructions executed."""
        with np.errstate(all="ignore"):
            while not self.batch.done.all():
                self._run_block(*self._pick())
                self._release_barriers()
        return self.executed

    def _pick(self) -> tuple[Selection, int, int, set[int]]:
        """(waves, how many, their address, addresses where other waves wait to be joined)."""
        batch = self.batch
        ready = ~batch.done & ~batch.waiting
        rank = self.rank()
        if rank is not None:
            lowest = np.where(ready, rank, batch.waves_per_group).reshape(batch.groups, -1).min(1)
            ready &= rank == np.repeat(lowest, batch.waves_per_group)
        at = batch.pc[ready]
        self.picks += 1
        address = int(at.max() if self.picks % _FAIR_EVERY == 0 else at.min())
        chosen = ready & (batch.pc == address)
        count = int(chosen.sum())
        if count == batch.waves:
            return slice(None), count, address, set()
        others = set() if self.random else set(batch.pc[ready & ~chosen].tolist())
        return np.flatnonzero(chosen), count, address, others

    def _run_block(self, waves: Selection, count: int, address: int, others: set[int]) -> None:
        steps, batch, counts = self.program.steps, self.batch, self.counts
        budget = int(self.rng.integers(1, _RANDOM_RUN + 1)) if self.random else -1
        ran = 0
        step = None
        try:
            while True:
                step = steps.get(address) or self.program.step(address)
                if self.register_check is not None:
                    self.register_check.before(batch, waves, step.instruction)
                if step.run is not None:
                    step.run(batch, waves)
                counts[address] = counts.get(address, 0) + count
                ran += 1
                if step.ends_block:
                    break
                address = step.next
                if address in others or ran == budget:
                    batch.pc[waves] = address
                    break
        except SimulationError as error:
            if step is None:
                raise
            raise error.at(self.program.kernel, step.instruction.address, step.instruction.text) from None
        self.executed += ran * count
        if self.executed > self.limit:
            raise NoProgress(
                f"{self.executed} wave-instructions and not at the end; waves are at "
                f"{sorted({hex(p) for p in batch.pc[~batch.done].tolist()})} (raise max_instructions if that is right)"
            ).at(self.program.kernel, address, step.instruction.text)

    def _release_barriers(self) -> None:
        """Let the waves of a work-group go on when every live one of them has reached s_barrier."""
        batch = self.batch
        if not batch.waiting.any():
            return
        waiting = batch.waiting.reshape(batch.groups, -1)
        released = (batch.done.reshape(batch.groups, -1) | waiting).all(1) & waiting.any(1)
        if released.any():
            waiting[released] = False
            for observer in batch.observers:
                observer.barrier(batch, np.flatnonzero(released))
