"""A server started by one of the scripts in `evaluation/`, as a user starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .server import Server


@dataclass(frozen=True)
class LauncherRun:
    """A launcher script and the environment variables that it is given, besides the caller's."""

    script: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return dict(self.variables)


class LaunchedServer(Server):
    """:class:`Server` behind a launcher: the script becomes the server, so its process id is the server's."""

    def __init__(self, script: Path, variables: Mapping[str, str], log: Path) -> None:
        super().__init__(LauncherRun(script), log)
        self.config = LauncherRun(script, {**variables, "PORT": str(self.port)})

    def command(self) -> list[str]:
        return ["bash", str(self.config.script)]
