"""Expressions of the ISA guide's pseudo-code, parsed into closures; see pcode.py."""

from __future__ import annotations

import math
import re

from pcode_values import NotEvaluable, SignedZero, Value, arithmetic, compare

_TOKEN = re.compile(
    r"\s+|//[^\n]*|(?P<sized>\d+'(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)?)U?|\d+'[FIUB]+)|(?P<number>0x[0-9a-fA-F]+(?:ULL|LL|U)?"
    r"|\d+\.\d+F?|\d+(?:ULL|LL|U)?)|(?P<name>[A-Za-z_]\w*)|(?P<op>\*\*|<<|>>|<=|>=|==|!=|<>|&&|\|\||[-+*/]=|\|=|.)"
)
_LEVELS = [("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!=", "<>"), ("<", "<=", ">", ">=")]
_LEVELS += [("<<", ">>"), ("+", "-"), ("*", "/"), ("**",)]
MEMBER = re.compile(r"(f|i|u|b)(\d+)$")


class Expressions:
    """A recursive descent parser. Its methods give functions of a state: a dict of name -> Value."""

    @staticmethod
    def call(name: str, arguments: list[Value], ieee: bool) -> Value:
        raise NotImplementedError

    def __init__(self, text: str):
        self.tokens, at = [], 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            at = match.end()
            if match.lastgroup:
                self.tokens.append((match.lastgroup, match[0]))
        self.at = 0

    def peek(self, offset: int = 0) -> str:
        return self.tokens[self.at + offset][1] if self.at + offset < len(self.tokens) else ""

    def take(self, wanted: str | None = None) -> str:
        text = self.peek()
        if wanted is not None and text != wanted:
            raise NotEvaluable(f"wanted {wanted!r}, found {text!r}")
        self.at += 1
        return text

    def index(self):
        self.take("[")
        high = self.expression()
        low = high
        if self.peek() == ":":
            self.take()
            low = self.expression()
        self.take("]")
        return lambda state: (high(state).number, low(state).number)

    def expression(self):
        condition = self.level(0)
        if self.peek() != "?":
            return condition
        self.take()
        yes = self.expression()
        self.take(":")
        no = self.expression()
        return lambda state: yes(state) if condition(state).truth() else no(state)

    def level(self, n: int):
        if n == len(_LEVELS):
            return self.unary()
        left = self.level(n + 1)
        while self.peek() in _LEVELS[n]:
            left = self.binary(self.take(), left, self.level(n + 1))
        return left

    @staticmethod
    def binary(op, left, right):
        if op == "||":
            return lambda state: left(state) if left(state).truth() else right(state)
        if op == "&&":
            return lambda state: right(state) if left(state).truth() else left(state)
        if op in ("==", "!=", "<>", "<", "<=", ">", ">="):
            return lambda state: compare(op, left(state), right(state))
        if op in ("<<", ">>"):

            def shift(state):
                value, amount = left(state), right(state).number
                number = value.number << amount if op == "<<" else value.number >> amount
                return Value(value.kind, value.width, number)

            return shift
        return lambda state: arithmetic(op, left(state), right(state))

    def unary(self):
        op = self.peek()
        if op not in ("-", "+", "!", "~"):
            return self.postfix(self.primary())
        self.take()
        if self.peek() == "0.0" and op in "+-":
            self.take()
            return _constant(SignedZero("f", 64, float(f"{op}0")))
        inner = self.unary()
        if op == "!":
            return lambda state: Value("u", 1, int(not inner(state).truth()))
        if op == "~":
            return lambda state: Value((v := inner(state)).kind, v.width, ~v.number)
        if op == "+":
            return inner
        return lambda state: Value((v := inner(state)).kind, v.width, -v.number, v.signalling)

    def postfix(self, value):
        while self.peek() in (".", "["):
            if self.peek() == ".":
                self.take()
                match = MEMBER.match(name := self.take())
                if not match:
                    if name != "IEEE":
                        raise NotEvaluable(f"member {name}")
                    continue
                value = self.with_member(value, match[1], int(match[2]))
            else:
                value = self.with_index(value, self.index())
        return value

    @staticmethod
    def with_member(value, kind, width):
        def member(state):
            found = value(state)
            if kind == "f" and found.kind == "f" and found.width != width:
                return Value("f", width, found.number, found.signalling)
            return found.member(kind, width)

        return member

    @staticmethod
    def with_index(value, place):
        def index(state):
            found = value(state)
            return found[place(state)[0]] if isinstance(found, list) else found.part(*place(state))

        return index

    def primary(self):
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        self.at += 1
        if kind == "number":
            return _constant(_number(text))
        if kind == "sized":
            return self.sized(text)
        if text == "(":
            inner = self.expression()
            self.take(")")
            return inner
        if text == "{":
            high = self.expression()
            self.take(",")
            low = self.expression()
            self.take("}")

            def joined(state):
                upper, lower = high(state), low(state)
                return Value("u", upper.width + lower.width, upper.bits() << lower.width | lower.bits())

            return joined
        if kind != "name":
            raise NotEvaluable(f"expression at {text!r}")
        if text in ("INF", "NAN", "PI"):
            return _constant(Value("f", 64, {"INF": math.inf, "NAN": math.nan, "PI": math.pi}[text]))
        if self.peek() == "(":
            arguments = self.arguments()

            def call(state):
                values = [a(state) for a in arguments]
                if text in state:
                    return state[text](state, values)
                return self.call(text, values, state["WAVE_MODE"].truth())

            return call

        def variable(state):
            if text not in state:
                raise NotEvaluable(f"name {text}")
            return state[text]

        return variable

    def arguments(self):
        self.take("(")
        found = [self.expression()]
        while self.peek() == ",":
            self.take()
            found.append(self.expression())
        self.take(")")
        return found

    def sized(self, text):
        width, rest = text.split("'")
        width = int(width)
        if rest[0].isdigit():
            if "." in rest:
                return _constant(Value("f", width, float(rest)))
            return _constant(Value("u" if rest.endswith("U") else "i", width, _number(rest).number))
        (inner,) = self.arguments()
        kind = {"F": "f", "I": "i", "U": "u", "B": "u"}[rest]

        def cast(state):
            value = inner(state)
            if kind == "f":
                if value.kind == "f":
                    return Value("f", width, value.number, value.signalling)
                return value.member("f", width)
            if value.kind == "f":
                raise NotEvaluable("cast of a float to an integer")
            return Value(kind, width, value.number)

        return cast


def _constant(value: Value):
    return lambda state: value


def _number(text: str) -> Value:
    if "." in text:
        return Value("f", 32 if text.endswith("F") else 64, float(text.rstrip("F")))
    digits = text.rstrip("UL")
    return Value("u" if "U" in text else "i", 64 if "LL" in text else 32, int(digits, 0))
