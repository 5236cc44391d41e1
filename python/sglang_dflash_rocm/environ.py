"""Every environment variable that this package adds, typed, with its default and one line of documentation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """``asks`` says that setting it asks for a feature of ours, so that a broken contract must stop the start."""

    name: str
    default: T
    parse: Callable[[str], T]
    allowed: str
    doc: str
    asks: bool = True

    def get(self, env: Mapping[str, str] | None = None) -> T:
        """The variable's value; empty counts as not set.

        Raises:
            ValueError: the text is not one of the allowed values.
        """
        text = (os.environ if env is None else env).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(f"{self.name}={text!r}: must be {self.allowed} (default {self.default})") from None

    def is_set(self, env: Mapping[str, str] | None = None) -> bool:
        """Whether it has a value other than its default."""
        return self.get(env) != self.default


def parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


SGLANG_DFLASH_ROCM = Variable(
    name="SGLANG_DFLASH_ROCM",
    default=True,
    parse=parse_bool,
    allowed=f"one of {', '.join(_TRUE + _FALSE)}",
    doc="0 keeps the plugin from doing anything",
    asks=False,
)

SGLANG_DFLASH_BUDGET_TABLE = Variable(
    name="SGLANG_DFLASH_BUDGET_TABLE",
    default=False,
    parse=parse_bool,
    allowed=f"one of {', '.join(_TRUE + _FALSE)}",
    doc="1 logs the memory table of a DFLASH server on every GPU, not only on gfx942",
)

VARIABLES: tuple[Variable, ...] = (SGLANG_DFLASH_ROCM, SGLANG_DFLASH_BUDGET_TABLE)
