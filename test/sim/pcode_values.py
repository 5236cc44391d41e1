"""Values, arithmetic and functions of the ISA guide's pseudo-code; see pcode.py."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

FORMATS = {16: (11, -14, 15, "<e"), 32: (24, -126, 127, "<f"), 64: (53, -1022, 1023, "<d")}


class NotEvaluable(Exception):
    """The pseudo-code uses something this evaluator does not know."""


def round_exact(value: Fraction, width: int) -> float:
    """To the nearest number of the format, ties to even, with denormals; too large gives infinity."""
    precision, lowest, highest, _ = FORMATS[width]
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
            self.number = number if width not in FORMATS or not math.isfinite(number) else _narrow(number, width)
        else:
            number &= (1 << width) - 1
            self.number = number - (1 << width) if kind == "i" and number >> (width - 1) else number

    def bits(self) -> int:
        if self.kind != "f":
            return self.number & ((1 << self.width) - 1)
        raw = int.from_bytes(struct.pack(FORMATS[self.width][3], self.number), "little")
        return raw ^ (3 << (FORMATS[self.width][0] - 3)) if self.signalling else raw

    def bits_as(self, kind: tuple[str, int]) -> int:
        """For a wider field: an integer is extended by its own sign."""
        return self.bits() if self.kind == "f" else self.number

    def member(self, kind: str, width: int) -> Value:
        raw = self.bits() & ((1 << width) - 1)
        if kind != "f":
            return Value(kind, width, raw)
        if width not in FORMATS:
            raise NotEvaluable(f"f{width}")
        number = struct.unpack(FORMATS[width][3], raw.to_bytes(width // 8, "little"))[0]
        quiet = raw >> (FORMATS[width][0] - 2) & 1
        return Value("f", width, number, math.isnan(number) and not quiet)

    def truth(self) -> bool:
        return self.number != 0

    def part(self, high: int, low: int) -> Value:
        if high < low:
            digits = f"{self.bits() >> high & ((1 << (low - high + 1)) - 1):0{low - high + 1}b}"
            return Value("u", low - high + 1, int(digits[::-1], 2))
        return Value("u", high - low + 1, self.bits() >> low)


class SignedZero(Value):
    """The literals +0.0 and -0.0, which only compare equal to zeros of that sign; 0.0 does to both."""


def _narrow(number: float, width: int) -> float:
    if width == 64 or number == 0:
        return number
    return round_exact(Fraction(number), width)


def _divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def arithmetic(op: str, a: Value, b: Value) -> Value:
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


def compare(op: str, a: Value, b: Value) -> Value:
    x, y = a.number, b.number
    if op == "==" and isinstance(b, SignedZero):
        return Value("u", 1, int(x == 0 and math.copysign(1, x) == math.copysign(1, y)))
    result = {"==": x == y, "!=": x != y, "<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y, "<>": x < y or x > y}[op]
    return Value("u", 1, int(result))


def saturate(value: Value, kind: str, width: int) -> Value:
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind == "i" else (0, (1 << width) - 1)
    x = value.number
    if value.kind == "f":
        x = 0 if math.isnan(x) else (high if x > 0 else low) if math.isinf(x) else math.trunc(x)
    return Value(kind, width, min(max(x, low), high))


def norm(value: Value, kind: str) -> Value:
    x = 0.0 if math.isnan(value.number) else min(max(value.number, -1.0 if kind == "i" else 0.0), 1.0)
    return Value(kind, 16, round(Fraction(x) * (32767 if kind == "i" else 65535)))


def _exponent(v: Value) -> Value:
    precision = FORMATS[v.width][0]
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


FUNCTIONS = {
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
