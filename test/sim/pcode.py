"""Evaluates the ISA guide's pseudo-code for one lane: an independent source of expectations.

The strings are those of `tinygrad.runtime.autogen.amd.cdna.str_pcode.PCODE`. The language: assignments to (parts of)
registers, if/elsif/else/endif, for loops, lambdas; C-like expressions with typed members (`S0.f32`), slices
(`S1[4 : 0]`), casts (`64'U(x)`), sized literals (`16'1.0`), concatenation (`{ a, b }`). What is not known raises
`NotEvaluable`.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from fractions import Fraction

from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

_FORMATS = {16: (11, -14, 15, "<e"), 32: (24, -126, 127, "<f"), 64: (53, -1022, 1023, "<d")}
_TOKEN = re.compile(
    r"\s+|//[^\n]*|(?P<sized>\d+'(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)?)U?|\d+'[FIUB]+)|(?P<number>0x[0-9a-fA-F]+(?:ULL|LL|U)?"
    r"|\d+\.\d+F?|\d+(?:ULL|LL|U)?)|(?P<name>[A-Za-z_]\w*)|(?P<op>\*\*|<<|>>|<=|>=|==|!=|<>|&&|\|\||[-+*/]=|\|=|.)"
)
_LEVELS = [("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!=", "<>"), ("<", "<=", ">", ">=")]
_LEVELS += [("<<", ">>"), ("+", "-"), ("*", "/"), ("**",)]
_MEMBER = re.compile(r"(f|i|u|b)(\d+)$")


class NotEvaluable(Exception):
    """The pseudo-code uses something this evaluator does not know."""


def round_exact(value: Fraction, width: int) -> float:
    """To the nearest number of the format, ties to even, with denormals; too large gives infinity."""
    precision, lowest, highest, _ = _FORMATS[width]
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent += 0 if size >= Fraction(2) ** exponent else -1
    step = Fraction(2) ** (max(exponent, lowest) - precision + 1)
    rounded = round(size / step) * step
    result = math.inf if rounded >= Fraction(2) ** (highest + 1) else float(rounded)
    return -result if value < 0 else result


class Value:
    """kind f, i, u or b (bits), of `width` bits. number: int, or float. signalling: a NaN that is not quiet."""

    __slots__ = ("kind", "number", "signalling", "width")

    def __init__(self, kind: str, width: int, number, signalling: bool = False):
        self.kind, self.width, self.signalling = kind, width, signalling
        if kind == "f":
            self.number = number if width not in _FORMATS or not math.isfinite(number) else _narrow(number, width)
        else:
            number &= (1 << width) - 1
            self.number = number - (1 << width) if kind == "i" and number >> (width - 1) else number

    def bits(self) -> int:
        if self.kind != "f":
            return self.number & ((1 << self.width) - 1)
        raw = int.from_bytes(struct.pack(_FORMATS[self.width][3], self.number), "little")
        return raw ^ (3 << (_FORMATS[self.width][0] - 3)) if self.signalling else raw

    def member(self, kind: str, width: int) -> Value:
        raw = self.bits() & ((1 << width) - 1)
        if kind != "f":
            return Value(kind, width, raw)
        if width not in _FORMATS:
            raise NotEvaluable(f"f{width}")
        number = struct.unpack(_FORMATS[width][3], raw.to_bytes(width // 8, "little"))[0]
        quiet = raw >> (_FORMATS[width][0] - 2) & 1
        return Value("f", width, number, math.isnan(number) and not quiet)

    def truth(self) -> bool:
        return self.number != 0

    def part(self, high: int, low: int) -> Value:
        if high < low:
            digits = f"{self.bits() >> high & ((1 << (low - high + 1)) - 1):0{low - high + 1}b}"
            return Value("u", low - high + 1, int(digits[::-1], 2))
        return Value("u", high - low + 1, self.bits() >> low)


class _SignedZero(Value):
    """The literals +0.0 and -0.0, which only compare equal to zeros of that sign; 0.0 does to both."""


def _narrow(number: float, width: int) -> float:
    if width == 64 or number == 0:
        return number
    return round_exact(Fraction(number), width)


def _divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def _arithmetic(op: str, a: Value, b: Value) -> Value:
    if a.kind == "f" or b.kind == "f":
        width = max(v.width for v in (a, b) if v.kind == "f")
        x, y = float(a.number), float(b.number)
        if op == "**":
            return Value("f", width, x**y)
        plain = {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "/": lambda: _divide(x, y)}[op]
        exact = {"+": lambda: Fraction(x) + Fraction(y), "-": lambda: Fraction(x) - Fraction(y)}
        exact |= {"*": lambda: Fraction(x) * Fraction(y), "/": lambda: Fraction(x) / Fraction(y or math.nan)}
        try:
            number = exact[op]()
        except (ValueError, OverflowError):
            number = Fraction(0)
        # Zeros, infinities and NaN follow the rules of float arithmetic.
        return Value("f", width, round_exact(number, width) if number else plain())
    width, kind = max(a.width, b.width, 32), "i" if a.kind == b.kind == "i" else "u"
    x, y = a.number, b.number
    number = {"+": x + y, "-": x - y, "*": x * y, "|": x | y, "^": x ^ y, "&": x & y}.get(op)
    if number is None:
        raise NotEvaluable(f"integer {op}")
    return Value(kind, width, number)


def _compare(op: str, a: Value, b: Value) -> Value:
    x, y = a.number, b.number
    if op == "==" and isinstance(b, _SignedZero):
        return Value("u", 1, int(x == 0 and math.copysign(1, x) == math.copysign(1, y)))
    result = {"==": x == y, "!=": x != y, "<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y, "<>": x < y or x > y}[op]
    return Value("u", 1, int(result))


def _saturate(value: Value, kind: str, width: int) -> Value:
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind == "i" else (0, (1 << width) - 1)
    x = value.number
    if value.kind == "f":
        x = 0 if math.isnan(x) else (high if x > 0 else low) if math.isinf(x) else math.trunc(x)
    return Value(kind, width, min(max(x, low), high))


def _norm(value: Value, kind: str) -> Value:
    x = 0.0 if math.isnan(value.number) else min(max(value.number, -1.0 if kind == "i" else 0.0), 1.0)
    return Value(kind, 16, round(Fraction(x) * (32767 if kind == "i" else 65535)))


def _exponent(v: Value) -> Value:
    precision = _FORMATS[v.width][0]
    return Value("i", 32, v.bits() >> (precision - 1) & ((1 << (v.width - precision)) - 1))


def _mathematics(function, v: Value) -> Value:
    try:
        return Value("f", v.width, function(v.number))
    except (ValueError, OverflowError):
        raise NotEvaluable("outside of the function's domain") from None


def _whole(function):
    def apply(v: Value) -> Value:
        x = v.number
        return Value("f", v.width, math.copysign(float(function(x)), x) if math.isfinite(x) else x)

    return apply


def _fma(a: Value, b: Value, c: Value) -> Value:
    x, y, z = a.number, b.number, c.number
    if not all(map(math.isfinite, (x, y, z))) or (exact := Fraction(x) * Fraction(y) + Fraction(z)) == 0:
        return Value("f", a.width, x * y + z)
    return Value("f", a.width, round_exact(exact, a.width))


_FUNCTIONS = {
    "fma": _fma,
    "trunc": _whole(math.trunc),
    "floor": lambda v: Value("f", v.width, float(math.floor(v.number)) if math.isfinite(v.number) else v.number),
    "fract": lambda v: Value("f", v.width, v.number - math.floor(v.number) if math.isfinite(v.number) else math.nan),
    "isEven": lambda v: Value("u", 1, int(math.isfinite(v.number) and math.floor(v.number) % 2 == 0)),
    "isNAN": lambda v: Value("u", 1, int(math.isnan(v.number))),
    "isSignalNAN": lambda v: Value("u", 1, int(v.signalling)),
    "isQuietNAN": lambda v: Value("u", 1, int(math.isnan(v.number) and not v.signalling)),
    "cvtToQuietNAN": lambda v: Value("f", v.width, v.number),
    "abs": lambda v: Value("f", v.width, abs(v.number)) if v.kind == "f" else Value(v.kind, v.width, abs(v.number)),
    "sign": lambda v: Value("u", 1, v.bits() >> (v.width - 1)),
    "exponent": _exponent,
    "mantissa": lambda v: Value("f", v.width, math.frexp(v.number)[0]),
    "sqrt": lambda v: _mathematics(math.sqrt, v),
    "log2": lambda v: _mathematics(math.log2, v),
    "pow": lambda a, b: _mathematics(math.exp2 if hasattr(math, "exp2") else lambda x: 2.0**x, b),
    "signext_from_bit": lambda v, n: Value("i", v.width, Value("i", n.number, v.number).number if n.number else 0),
}
_CONVERSION = re.compile(r"([fiu])(\d+)_to_([fiu])(\d+)$")


def _call(name: str, arguments: list[Value], ieee: bool) -> Value:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](*arguments)
    if match := _CONVERSION.match(name):
        kind, width = match[3], int(match[4])
        (value,) = arguments
        return (
            Value("f", width, float(value.number), value.signalling) if kind == "f" else _saturate(value, kind, width)
        )
    if name in ("f32_to_snorm", "f16_to_snorm", "f32_to_unorm", "f16_to_unorm"):
        return _norm(arguments[0], "i" if "snorm" in name else "u")
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


class _Parser:
    """Builds closures over a state (dict of name -> Value)."""

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
            target(state, _arithmetic(op[0], old, value(state)))

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
                match = _MEMBER.match(self.take())
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
            return lambda state: _compare(op, left(state), right(state))
        if op in ("<<", ">>"):

            def shift(state):
                value, amount = left(state), right(state).number
                number = value.number << amount if op == "<<" else value.number >> amount
                return Value(value.kind, value.width, number)

            return shift
        return lambda state: _arithmetic(op, left(state), right(state))

    def unary(self):
        op = self.peek()
        if op not in ("-", "+", "!", "~"):
            return self.postfix(self.primary())
        self.take()
        if self.peek() == "0.0" and op in "+-":
            self.take()
            return _constant(_SignedZero("f", 64, float(f"{op}0")))
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
                match = _MEMBER.match(name := self.take())
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
                return _call(text, values, state["WAVE_MODE"].truth())

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


def _bits_as(self: Value, kind: tuple[str, int]) -> int:
    # An integer written to a wider field is extended by its own sign.
    return self.bits() if self.kind == "f" else self.number


Value.bits_as = _bits_as


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
