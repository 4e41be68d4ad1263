"""Exact values of arithmetic on numbers: fractions, powers, products and sums, as text or LaTeX.

Nothing is rounded, and nesting costs no stack. Work is bounded: numbers beyond ``MAX_BITS``
bits and expressions that add up to much more have no value here.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_BITS = 1 << 17  # 39,000 digits
_MAX_TOTAL_BITS = 32 * MAX_BITS
_MAX_DIGITS = 39_000
# Python refuses to convert more digits at once than a limit that is at least this.
_CHUNK_DIGITS = 600

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)|(?P<frac>\\[dt]?frac)"
    r"|(?P<operator>\\times|\\cdot|\\div|\*\*|[-+*/^\u00d7\u00b7\u00f7])|(?P<open>[({])"
    r"|(?P<close>[)}]))"
)
_SPELLING = {"\\times": "*", "\\cdot": "*", "\u00d7": "*", "\u00b7": "*", "\\div": "/"}
_SPELLING |= {"\u00f7": "/", "**": "^"}
_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3, "^": 4}
_CLOSES = {"(": ")", "{": "}"}
_MIXED = re.compile(
    r"(-?)\s*(\d+)\s*(?:\s(\d+)\s*/\s*(\d+)"
    r"|\\[dt]?frac\s*(?:(\d)\s*(\d)|\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}))"
)


class _NoValueError(Exception):
    """The text is no arithmetic, divides by zero or is too large."""


def _digits(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise _NoValueError
    value = 0
    for begin in range(0, len(text), _CHUNK_DIGITS):
        chunk = text[begin : begin + _CHUNK_DIGITS]
        value = value * 10 ** len(chunk) + int(chunk)
    return value


def _decimal(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, part = mantissa.partition(".")
    if len(exponent) > 7:
        raise _NoValueError
    shift = int(exponent or "0") - len(part)
    if abs(shift) > _MAX_DIGITS:
        raise _NoValueError
    value = _digits(whole + part)
    return Fraction(value * 10**shift) if shift >= 0 else Fraction(value, 10**-shift)


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


class _Evaluator:
    """Operator precedence with explicit stacks; ``\\frac`` divides the next two operands."""

    def __init__(self) -> None:
        self.values: list[Fraction] = []
        self.pending: list[str] = []  # operators, open brackets, "frac" and "frac of"
        self.total_bits = 0

    def operand(self, value: Fraction) -> None:
        self.values.append(value)
        while self.pending and self.pending[-1] in ("frac", "frac of"):
            if self.pending[-1] == "frac":
                self.pending[-1] = "frac of"
                return
            self.pending.pop()
            self.apply("/")

    def apply(self, operator: str) -> None:
        right = self.values.pop()
        if operator == "negate":
            self.values.append(-right)
            return
        left = self.values.pop()
        size = _bits(left) + _bits(right)
        if operator == "^":
            if right.denominator != 1 or (left == 0 and right <= 0):
                raise _NoValueError
            if abs(right.numerator) * max(_bits(left) - 2, 1) > MAX_BITS:
                raise _NoValueError
            value = left**right.numerator
        elif operator == "/":
            if right == 0:
                raise _NoValueError
            value = left / right
        elif operator == "*":
            value = left * right
        else:
            value = left + (right if operator == "+" else -right)
        self.total_bits += size
        if _bits(value) > MAX_BITS or self.total_bits > _MAX_TOTAL_BITS:
            raise _NoValueError
        self.values.append(value)

    def binary(self, operator: str) -> None:
        strength = _STRENGTH[operator]
        while self.pending and (top := _STRENGTH.get(self.pending[-1], 0)) >= strength:
            if top == strength and operator == "^":  # from the right
                break
            self.apply(self.pending.pop())
        self.pending.append(operator)

    def close(self, bracket: str) -> None:
        while self.pending and self.pending[-1] in _STRENGTH:
            self.apply(self.pending.pop())
        if not self.pending or _CLOSES.get(self.pending.pop()) != bracket:
            raise _NoValueError
        self.operand(self.values.pop())

    def result(self) -> Fraction:
        while self.pending:
            operator = self.pending.pop()
            if operator not in _STRENGTH:
                raise _NoValueError
            self.apply(operator)
        (value,) = self.values
        return value


def _evaluate(text: str) -> Fraction:
    evaluator = _Evaluator()
    wants_operand, at, end = True, 0, len(text.rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None:
            raise _NoValueError
        at = token.end()
        in_frac = bool(evaluator.pending) and evaluator.pending[-1] in ("frac", "frac of")
        if in_frac and not token["number"] and token["open"] != "{":
            raise _NoValueError
        if operator := token["operator"]:
            operator = _SPELLING.get(operator, operator)
            if not wants_operand:
                evaluator.binary(operator)
                wants_operand = True
            elif operator == "-":
                evaluator.pending.append("negate")
            elif operator != "+":
                raise _NoValueError
            continue
        if token["close"]:
            if wants_operand:
                raise _NoValueError
            evaluator.close(token["close"])
        elif not wants_operand:  # side by side: a product, a list, a mixed number
            raise _NoValueError
        elif token["open"]:
            evaluator.pending.append(token["open"])
            continue
        elif token["frac"]:
            evaluator.pending.append("frac")
            continue
        elif in_frac:  # \frac12: one digit each
            at = token.start("number") + 1
            if not token["number"][0].isdecimal():
                raise _NoValueError
            evaluator.operand(Fraction(int(token["number"][0])))
        else:
            evaluator.operand(_decimal(token["number"]))
        wants_operand = bool(evaluator.pending) and evaluator.pending[-1] == "frac of"
    if wants_operand:
        raise _NoValueError
    return evaluator.result()


def _mixed(text: str) -> Fraction | None:
    found = _MIXED.fullmatch(text)
    if found is None:
        return None
    sign, whole, *parts = found.groups()
    over, under = (_digits(part) for part in parts if part is not None)
    if not 0 < over < under:
        raise _NoValueError
    value = _digits(whole) + Fraction(over, under)
    return -value if sign else value


def exact_value(text: str) -> Fraction | None:
    """The value of ``text`` as written, None if it is no arithmetic on numbers or too large.

    Understands decimals, exponents (``1e-30``), ``\\frac``, mixed numbers (``3 1/2``), brackets and
    braces, ``+ - * / ^ **`` and LaTeX's signs of them. Thousands separators must be gone.
    """
    try:
        mixed = _mixed(text.strip())
        return mixed if mixed is not None else _evaluate(text)
    except _NoValueError:
        return None
