"""What the evaluation tools' variables have in common: parsers, all problems at once, a table for `--help`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from sglang_dflash_rocm.environ import Variable, one_of


class WrongSettings(ValueError):
    """Every setting that is wrong, one line each."""


def number(allowed: Callable[[float], bool]) -> Callable[[str], float]:
    """A parser of numbers for which `allowed` holds."""

    def parse(text: str) -> float:
        if not allowed(float(text)):
            raise ValueError(text)
        return float(text)

    return parse


def between(low: float, high: float) -> Callable[[str], float]:
    """A parser of numbers from `low` to `high`, both included."""
    return number(lambda value: low <= value <= high)


def port(text: str) -> int:
    if not 1 <= int(text) <= 65535:
        raise ValueError(text)
    return int(text)


def url(text: str) -> str:
    """An address without its last slash."""
    if not text.startswith(("http://", "https://")):
        raise ValueError(text)
    return text.rstrip("/")


def switch(name: str, default: int, doc: str) -> Variable[int]:
    return Variable(name, default, lambda text: int(one_of("0", "1")(text)), "0 or 1", doc)


class Reader:
    """Values of variables; what is wrong is collected and raised once, by :meth:`finish`."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.env = os.environ if env is None else env
        self.problems: list[str] = []

    def get(self, variable: Variable):
        try:
            return variable.get(self.env)
        except ValueError as error:
            self.problems.append(str(error))
            return variable.default

    def given(self, variable: Variable) -> bool:
        return bool(self.env.get(variable.name, "").strip())

    def finish(self) -> None:
        """Raises:
        WrongSettings: anything was wrong.
        """
        if self.problems:
            raise WrongSettings("\n".join(dict.fromkeys(self.problems)))


def default_text(variable: Variable) -> str:
    """The default as one writes it in a shell; empty where there is none."""
    default = variable.default
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "" if default is None else str(default)


def plain_table(variables: Iterable[Variable]) -> str:
    """All variables for a terminal, one paragraph each."""
    rows = (f"{v.name}={default_text(v)}\n  {v.doc}\n  allowed: {v.allowed}" for v in variables)
    return "\n\n".join(rows).replace("`", "")
