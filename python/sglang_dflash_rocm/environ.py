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
    """``group`` names the hooks that a value other than the default asks for, empty if it asks for none by itself; a
    broken contract of an asked-for group stops the start."""

    name: str
    default: T
    parse: Callable[[str], T]
    allowed: str
    doc: str
    group: str = ""

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


def one_of(*values: str) -> Callable[[str], str]:
    """A parser that takes one of ``values``, whatever the case."""

    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError(text)
        return text.lower()

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` on."""

    def parse(text: str) -> int:
        if int(text) < least:
            raise ValueError(text)
        return int(text)

    return parse


def parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def _switch(name: str, doc: str, default: bool = False, group: str = "") -> Variable[bool]:
    return Variable(name, default, parse_bool, f"one of {', '.join(_TRUE + _FALSE)}", doc, group)


SGLANG_DFLASH_ROCM = _switch("SGLANG_DFLASH_ROCM", "0 keeps the plugin from doing anything", default=True)

SGLANG_DFLASH_CPU_GRAPH = _switch(
    "SGLANG_DFLASH_CPU_GRAPH",
    "on the CPU platform, 1 runs SGLang's decode graph runner; a replay runs the forward again",
)

SGLANG_DFLASH_DRAFT_GRAPH = Variable(
    name="SGLANG_DFLASH_DRAFT_GRAPH",
    default="auto",
    parse=one_of("auto", "off", "on"),
    allowed="one of auto, off, on",
    doc="draft graphs: auto leaves it to SGLang (eager under DP attention), on captures there too, off never captures",
    group="draft_graph",
)

SGLANG_DFLASH_IDLE_VERIFY_GRAPH = _switch(
    "SGLANG_DFLASH_IDLE_VERIFY_GRAPH",
    "1 verifies by graph although a DP rank is idle; that rank replays the same padded graph",
    group="idle_verify",
)

SGLANG_DFLASH_SWA_TOKEN_INTERVAL = Variable(
    name="SGLANG_DFLASH_SWA_TOKEN_INTERVAL",
    default=0,
    parse=at_least(0),
    allowed="a number of tokens, 0 or more",
    doc="tokens that slide out of the window before a request's slots are freed; 0 leaves it to SGLang",
    group="swa_interval",
)

SGLANG_AITER_PA_DECODE_IMPL = Variable(
    name="SGLANG_AITER_PA_DECODE_IMPL",
    default="aiter",
    parse=one_of("aiter", "flydsl"),
    allowed="one of aiter, flydsl",
    doc="flydsl: --attention-backend aiter means our backend too, for target and draft",
)

SGLANG_DFLASH_BUDGET_TABLE = _switch(
    "SGLANG_DFLASH_BUDGET_TABLE", "1 logs the memory table of a DFLASH server on every GPU, not only on gfx942"
)

VARIABLES: tuple[Variable, ...] = (
    SGLANG_DFLASH_ROCM,
    SGLANG_DFLASH_CPU_GRAPH,
    SGLANG_DFLASH_DRAFT_GRAPH,
    SGLANG_DFLASH_IDLE_VERIFY_GRAPH,
    SGLANG_DFLASH_SWA_TOKEN_INTERVAL,
    SGLANG_AITER_PA_DECODE_IMPL,
    SGLANG_DFLASH_BUDGET_TABLE,
)
