"""Several processes that run functions together on gloo, for tests of what ranks must do alike.

The processes stay up between calls, so building groups and models is paid for once. A function that does not return on
every rank in time is reported with the stack of each rank that hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .server import mapped_shared_memory


class RankError(RuntimeError):
    """A rank raised, died, or did not answer in time. The message holds each such rank's traceback or stack."""


class Ranks:
    """``size`` processes; :meth:`call` runs one function on all of them. Use as a context manager.

    Args:
        size: number of processes.
        env: environment of the processes on top of the caller's, set before anything is imported.
        timeout_s: time that one call may take on the slowest rank.
    """

    def __init__(self, size: int, env: dict[str, str] | None = None, timeout_s: float = 60.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._dir = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self._processes: list = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        with _environment({"TMPDIR": self._dir.name, **(env or {})}):
            for rank in range(size):
                ours, theirs = context.Pipe()
                args = (rank, theirs, str(self._log(rank)))
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """Whether another call can be made: no earlier one left ranks stuck or dead."""
        return bool(self._processes)

    def call(self, function: Callable, *args: Any, each: Sequence[tuple] | None = None) -> list:
        """``function(rank, *args)`` on every rank at once; the results by rank. ``each`` adds arguments per rank.

        Raises:
            RankError: a rank raised, died, or did not return in time. Unless all of them answered, the ranks are
                closed: some are stuck in a collective that the others left.
        """
        if not self.usable:
            raise RankError("the ranks were closed, by an earlier failure or by the caller")
        for rank, pipe in enumerate(self._pipes):
            pipe.send((function, (*args, *(each[rank] if each is not None else ()))))
        deadline = time.monotonic() + self.timeout_s
        answers = [self._answer(pipe, deadline) for pipe in self._pipes]
        if all(ok for ok, _ in answers):
            return [value for _, value in answers]
        problems = "\n".join(self._problem(rank, value) for rank, (ok, value) in enumerate(answers) if not ok)
        if not all(ok or trace is not None for ok, trace in answers):
            self.close()
        raise RankError(f"{getattr(function, '__name__', function)} on {self.size} ranks:\n{problems}")

    def close(self) -> None:
        """End the processes and remove the shared memory that they had mapped. Safe to call twice."""
        shared = mapped_shared_memory(self._processes)
        for process in self._processes:
            process.kill()
            process.join(10)
        for path in shared:
            path.unlink(missing_ok=True)
        self._processes, self._pipes = [], []
        self._dir.cleanup()

    @staticmethod
    def _answer(pipe: Connection, deadline: float) -> tuple[bool, Any]:
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pipe.recv()
        except (EOFError, OSError):
            pass
        return False, None

    def _problem(self, rank: int, trace: str | None) -> str:
        if trace is not None:
            return f"rank {rank} raised:\n{trace}"
        process = self._processes[rank]
        process.join(0.5)
        what = "did not return" if process.is_alive() else f"ended with exit code {process.exitcode}"
        if process.is_alive():
            os.kill(process.pid, _STACK_SIGNAL)
            time.sleep(0.5)
        return f"rank {rank} {what}; the end of its output:\n" + self._log(rank).read_text(errors="replace")[-3000:]

    def _log(self, rank: int) -> Path:
        return Path(self._dir.name) / f"rank{rank}.log"


_STACK_SIGNAL = 10  # SIGUSR1


def _serve(rank: int, pipe: Connection, log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.register(_STACK_SIGNAL, file=2, all_threads=True)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, function(rank, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


@contextlib.contextmanager
def _environment(values: dict[str, str]):
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
