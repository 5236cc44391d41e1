"""A real ``sglang.launch_server`` on the CPU platform as a context manager, for the demo and the end-to-end tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import requests

#: Lines of SGLang's log that mean a plugin or hook error was swallowed, or a scheduler died.
SWALLOWED_ERRORS = (
    "Failed to apply hooks",
    "Failed to execute general plugin",
    "Failed to load plugin",
)
FATAL_LINES = ("Scheduler hit an exception", "hit an exception: Traceback", "Received sigquit from a child")
_PLUGIN_LINE = re.compile(r"sglang-dflash-rocm \S+ on SGLang \S+: hooks active")
_LOOPBACK = "127.0.0.1"


class ServerError(RuntimeError):
    """The server did not start, died, or left something behind. The message ends with the tail of its log."""


@dataclass(frozen=True)
class ServerConfig:
    """Flags of one server. ``dp > 1`` turns on DP attention and the DP LM head; ``draft`` turns on DFLASH."""

    model: Path
    draft: Path | None = None
    tp: int = 1
    dp: int = 1
    context_length: int = 512
    max_total_tokens: int = 4096
    max_running_requests: int = 16
    watchdog_s: int = 60
    extra: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def arguments(self, port: int) -> list[str]:
        """Arguments after ``python -m sglang.launch_server``."""
        flags = {
            "--model-path": self.model,
            "--device": "cpu",
            "--dtype": "float32",
            "--host": _LOOPBACK,
            "--port": port,
            "--tp": self.tp,
            "--context-length": self.context_length,
            "--max-total-tokens": self.max_total_tokens,
            "--max-running-requests": self.max_running_requests,
            "--mem-fraction-static": 0.05,
            "--watchdog-timeout": self.watchdog_s,
        }
        if self.dp > 1:
            flags["--dp"] = self.dp
        if self.draft is not None:
            flags["--speculative-algorithm"] = "DFLASH"
            flags["--speculative-draft-model-path"] = self.draft
        args = [str(x) for pair in flags.items() for x in pair]
        if self.dp > 1:
            args += ["--enable-dp-attention", "--enable-dp-lm-head"]
        return [*args, "--trust-remote-code", "--skip-server-warmup", *self.extra]

    def environment(self) -> dict[str, str]:
        """Environment on top of the caller's: selects the CPU platform and keeps the hubs out."""
        return {
            "SGLANG_PLATFORM": "dflash_cpu",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **self.env,
        }


class Server:
    """One server process tree. Use as a context manager; :meth:`wait_ready` before the first request.

    The tree is a session of its own, so that :meth:`leftovers` finds what outlived the stop (SGLang renames its
    processes, which wipes their environment), and the launcher gets SIGTERM from the kernel if we die first.
    """

    def __init__(self, config: ServerConfig, log: Path) -> None:
        self.config = config
        self.log = log
        self.port = free_port()
        self.url = f"http://{_LOOPBACK}:{self.port}"
        self._process: subprocess.Popen | None = None
        self._scratch: tempfile.TemporaryDirectory | None = None
        self._shared: set[Path] = set()

    def __enter__(self) -> Server:
        if self._process is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        assert self._process is not None, "not started"
        return self._process.pid

    def command(self) -> list[str]:
        """The command line, to print or to run by hand."""
        return [sys.executable, "-m", "sglang.launch_server", *self.config.arguments(self.port)]

    def shell_line(self) -> str:
        """The command with the environment it needs, ready to paste into a shell."""
        env = " ".join(f"{k}={shlex.quote(v)}" for k, v in self.config.environment().items())
        return f"{env} {shlex.join(self.command())}"

    def start(self) -> None:
        """Start the launcher in a session of its own, logging to :attr:`log`."""
        if self._process is not None:
            raise ServerError(f"the server was started already (pid {self.pid})")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # SGLang leaves the files of its sockets behind when it is stopped; they go into a folder that we remove.
        self._scratch = tempfile.TemporaryDirectory(prefix="dflash-", ignore_cleanup_errors=True)
        env = {**os.environ, "TMPDIR": self._scratch.name, **self.config.environment()}
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command(),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
                preexec_fn=_terminate_with_parent,
            )

    def wait_ready(self, timeout_s: float = 240, progress: Callable[[float, str], None] | None = None) -> float:
        """Wait until ``/health`` answers; seconds it took. ``progress(seconds, last log line)`` is called meanwhile.

        Raises:
            ServerError: the server ended, a scheduler died, or the time is up.
        """
        start = time.monotonic()
        while (waited := time.monotonic() - start) < timeout_s:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=2).status_code == 200:
                    # Asked now, because a server that dies by itself can no longer be asked.
                    self._shared |= mapped_shared_memory(self.leftovers())
                    return time.monotonic() - start
            if self._process.poll() is not None:
                raise self.failure(f"the server ended with exit code {self._process.returncode}")
            if any(line in self.log_text() for line in FATAL_LINES):
                raise self.failure("a server process failed while starting")
            if progress is not None:
                progress(waited, self._last_line())
            time.sleep(0.3)
        raise self.failure(f"the server did not answer within {timeout_s:.0f} s")

    def alive(self) -> bool:
        """Whether the launcher still runs."""
        return self._process is not None and self._process.poll() is None

    def exit_code(self) -> int | None:
        """Exit code of the launcher, ``None`` while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    def stop(self, grace_s: float = 5.0) -> None:
        """End every process of the server, wait until all are gone, remove their sockets and shared memory.

        Safe to call twice.

        Raises:
            ServerError: a process survived SIGKILL.
        """
        if self._process is None:
            return
        self._shared |= mapped_shared_memory(self.leftovers())
        # The launcher takes its children with it on SIGTERM; signalling them too would look like a crash to it.
        launcher = [psutil.Process(self.pid)] if self.alive() else []
        for number, targets, wait_s in ((signal.SIGTERM, launcher, grace_s), (signal.SIGKILL, None, 10.0)):
            ours = self.leftovers()
            for process in ours if targets is None else targets:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            psutil.wait_procs(ours, timeout=wait_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
        self._scratch.cleanup()
        for path in self._shared:
            path.unlink(missing_ok=True)
        if left := self.leftovers():
            raise self.failure(f"processes survived SIGKILL: {[p.pid for p in left]}")

    def leftovers(self) -> list[psutil.Process]:
        """Living processes of this server, zombies left out."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def swallowed_errors(self) -> list[str]:
        """Log lines in which SGLang reports a plugin or hook error that it went on without."""
        return [line for line in self.log_text().splitlines() if any(text in line for text in SWALLOWED_ERRORS)]

    def plugin_lines(self) -> list[str]:
        """The line that each process with active hooks of ours logs: package, SGLang version, hooks."""
        return [line.strip() for line in self.log_text().splitlines() if _PLUGIN_LINE.search(line)]

    def failure(self, what: str, lines: int = 25) -> ServerError:
        """A :class:`ServerError` that names the log and shows its end."""
        tail = [line[:300] for line in self.log_text().splitlines() if "Warning" not in line][-lines:]
        return ServerError("\n".join([f"{what}; log: {self.log}", *tail]))

    def _last_line(self) -> str:
        lines = [line for line in self.log_text().splitlines() if line.startswith("[")]
        return lines[-1] if lines else "starting Python"


def free_port() -> int:
    """A free loopback port below the range from which the system hands out outgoing ports."""
    for _ in range(100):
        candidate = random.randrange(20000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind((_LOOPBACK, candidate))
            except OSError:
                continue
            return candidate
    raise ServerError("no free port between 20000 and 30000 on the loopback address")


def mapped_shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Named shared memory that the processes have mapped; SGLang unlinks little of it, even on a graceful exit."""
    paths = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = line.partition("/dev/shm/")[2]
                if path and not path.endswith("(deleted)"):
                    paths.add(Path("/dev/shm") / path)
    return paths


def _terminate_with_parent() -> None:
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
