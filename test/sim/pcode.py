"""Evaluates the ISA guide's pseudo-code for one lane: an independent source of expectations.

The strings are those of `tinygrad.runtime.autogen.amd.cdna.str_pcode.PCODE`. The language: assignments to (parts of)
registers, if/elsif/else/endif, for loops, lambdas; C-like expressions with typed members (`S0.f32`), slices
(`S1[4 : 0]`), casts (`64'U(x)`), sized literals (`16'1.0`), concatenation (`{ a, b }`). What is not known raises
`NotEvaluable`.
"""

from __future__ import annotations

import functools
import re

from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

from pcode_expressions import MEMBER, Expressions
from pcode_values import FUNCTIONS, NotEvaluable, Value, arithmetic, norm, round_exact, saturate

__all__ = ["NotEvaluable", "evaluate", "find", "round_exact"]

_CONVERSION = re.compile(r"([fiu])(\d+)_to_([fiu])(\d+)$")


def _call(name: str, arguments: list[Value], ieee: bool) -> Value:
    if name in FUNCTIONS:
        return FUNCTIONS[name](*arguments)
    if match := _CONVERSION.match(name):
        kind, width = match[3], int(match[4])
        (value,) = arguments
        return Value("f", width, float(value.number), value.signalling) if kind == "f" else saturate(value, kind, width)
    if name in ("f32_to_snorm", "f16_to_snorm", "f32_to_unorm", "f16_to_unorm"):
        return norm(arguments[0], "i" if "snorm" in name else "u")
    if match := re.match(r"v_\w+_([fiu])(\d+)$", name):
        state = {f"S{i}": value for i, value in enumerate(arguments)}
        kind, width = match[1], int(match[2])
        inner = evaluate(find(name), {k: v.bits() for k, v in state.items()}, 0, ieee=ieee)
        return Value("u", 64, inner["D0"]).member(kind, 32 if name.endswith("u8") else width)
    raise NotEvaluable(f"function {name}")


class _Break(Exception):
    pass


class _Return(Exception):
    pass


class _Parser(Expressions):
    """Statements."""

    @staticmethod
    def call(name: str, arguments: list[Value], ieee: bool) -> Value:
        return _call(name, arguments, ieee)

    def block(self, *ends: str):
        steps = []
        while self.peek() and self.peek() not in ends:
            if self.peek() == ";":
                self.take()
            else:
                steps.append(self.statement())

        def run(state):
            for step in steps:
                step(state)

        return run

    def statement(self):
        word = self.peek()
        if word == "if":
            return self.conditional()
        if word == "for":
            return self.loop()
        if word == "break":
            self.take()
            return lambda state: (_ for _ in ()).throw(_Break)
        if word == "return":
            self.take()
            value = self.expression()

            def leave(state):
                state["return"] = value(state)
                raise _Return

            return leave
        if word == "declare":
            return self.declaration()
        if self.peek(1) == "=" and self.peek(2) == "lambda":
            return self.function()
        return self.assignment()

    def conditional(self):
        arms, otherwise = [], lambda state: None
        while self.take() in ("if", "elsif"):
            condition = self.expression()
            self.take("then")
            arms.append((condition, self.block("elsif", "else", "endif")))
        if self.tokens[self.at - 1][1] == "else":
            otherwise = self.block("endif")
            self.take("endif")

        def run(state):
            for condition, body in arms:
                if condition(state).truth():
                    return body(state)
            return otherwise(state)

        return run

    def loop(self):
        self.take()
        name = self.take()
        self.take("in")
        first = self.expression()
        self.take(":")
        last = self.expression()
        self.take("do")
        body = self.block("endfor")
        self.take("endfor")

        def run(state):
            try:
                for i in range(first(state).number, last(state).number + 1):
                    state[name] = Value("i", 32, i)
                    body(state)
            except _Break:
                pass

        return run

    def declaration(self):
        self.take()
        name = self.take()
        self.take(":")
        width, kind = self.take().split("'")
        if self.peek() == "[":
            count = int(self.tokens[self.at + 1][1])
            self.at += 3
            return lambda state: state.__setitem__(name, [Value("u", int(width), 0)] * count)
        return lambda state: state.setdefault(name, Value("u", int(width), 0))

    def function(self):
        name = self.take()
        self.at += 3  # = lambda (
        parameters = [self.take()]
        while self.take() == ",":
            parameters.append(self.take())
        self.take("(")
        if self.peek() in ("if", "declare"):
            body = self.block(")")
        else:
            value = self.expression()
            body = lambda state: state.__setitem__("return", value(state))  # noqa: E731
        self.take(")")

        def call(state, arguments):
            inner = dict(zip(parameters, arguments, strict=True))
            try:
                body(inner)
            except _Return:
                pass
            return inner["return"]

        return lambda state: state.__setitem__(name, call)

    def assignment(self):
        target = self.target()
        op = self.take()
        if op == "=":
            start = self.at
            try:  # a = b = c
                second = self.target()
                chained = self.peek() == "="
            except NotEvaluable:
                chained = False
            if chained:
                self.take()
                value = self.expression()
                return lambda state: (target(state, value(state)), second(state, value(state)))
            self.at = start
            value = self.expression()
            return lambda state: target(state, value(state))
        if op not in ("+=", "-=", "|="):
            raise NotEvaluable(f"assignment {op}")
        value = self.expression()

        def update(state):
            old = target.read(state)
            target(state, arithmetic(op[0], old, value(state)))

        return update

    def target(self):
        if self.peek() == "{":
            self.take()
            high = self.target()
            self.take(",")
            low = self.target()
            self.take("}")

            def both(state, value):
                low(state, value)
                high(state, Value("u", 1, value.bits() >> low.width))

            return both
        if self.tokens[self.at][0] != "name":
            raise NotEvaluable(f"target {self.peek()!r}")
        name = self.take()
        kind = place = None
        while self.peek() in (".", "["):
            if self.peek() == ".":
                self.take()
                match = MEMBER.match(self.take())
                if not match:
                    raise NotEvaluable("member of a target")
                kind = match[1], int(match[2])
            else:
                place = self.index()

        def assign(state, value):
            if kind is not None and kind[0] == "f" and value.kind == "f":
                value = Value("f", kind[1], value.number, value.signalling)
            if isinstance(state.get(name), list):
                state[name] = list(state[name])
                state[name][place(state)[0]] = value
            elif place is not None:
                high, low = place(state)
                old = state.get(name, Value("u", 128, 0))
                mask = (1 << (high - low + 1)) - 1
                bits = old.bits() & ~(mask << low) | (value.bits() & mask) << low
                state[name] = Value("u", max(old.width, high + 1), bits)
            elif kind is not None:
                state[name] = value if value.kind == kind[0] == "f" else Value("u", kind[1], value.bits_as(kind))
            else:
                state[name] = value

        def read(state):
            value = state[name]
            if place is not None:
                value = value.part(*place(state))
            return value if kind is None else value.member(*kind)

        assign.read, assign.width = read, kind[1] if kind else 0
        return assign


@functools.cache
def find(mnemonic: str) -> str:
    """The pseudo-code of a mnemonic. Raises KeyError."""
    for op, text in PCODE.items():
        if type(op).__name__.startswith("VOP") and re.sub(r"_E(32|64)$", "", op.name).lower() == mnemonic:
            return text
    raise KeyError(mnemonic)


@functools.cache
def _compiled(text: str):
    return _Parser(text).block()


def evaluate(text: str, registers: dict[str, int], lane: int, *, ieee: bool = False) -> dict[str, int]:
    """Run pseudo-code for one lane.

    registers: name -> bits: S0..S2 (up to 64 bits), D0 (the old destination), VCC (the 64-bit mask), SIMM32.
    Returns the bits of D0, D1, VCC and EXEC where they were assigned. Raises NotEvaluable.
    """
    state = {name: Value("u", 64, bits) for name, bits in registers.items()}
    state |= {"laneId": Value("u", 32, lane), "WAVE_MODE": Value("u", 1, int(ieee))}
    before = dict(state)
    _compiled(text)(state)
    return {k: v.bits() for k in ("D0", "D1", "VCC", "EXEC") if (v := state.get(k)) is not before.get(k)}
