"""Answers without their spelling: plain text, and numbers with their units."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from kvcore.eval.extract import join_thousands, strip_markdown
from kvcore.eval.rational import exact_value

_MAX_UNIT_CHARS = 80
_TEXT = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|operatorname)"
_WHOLE_TEXT = re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}")
_PI = re.compile(r"\\text\{\s*pi\s*\}|(?<![\\A-Za-z])pi(?![A-Za-z])|\u03c0")
# What a unit is made of, at the end of an answer; a word of one letter could be a variable.
_UNIT_END = re.compile(
    rf"(?:{_TEXT}\{{([^{{}}]*)\}}(?:\^\{{?([23])\}}?)?"
    r"|(\^\{?\\circ\}?|\\degree|\u00b0)"
    r"|(?<![\\A-Za-z_])(?=[A-Za-z.]*[A-Za-z]{2}|[ap]\.\s?m\b)([A-Za-z][A-Za-z.]*(?:/[A-Za-z]+)?)"
    r"(?:\^\{?([23])\}?)?)$"
)
_CURRENCIES = {"\u20ac": "euro", "\u00a3": "pound", "\u00a5": "yen", "\u20b9": "rupee"}
# Words that count or calculate: with one of them the rest is no unit.
_NO_UNITS = {
    "pi", "half", "third", "quarter", "fourth", "squared", "cubed", "factorial", "sqrt", "plus",
    "minus", "times", "over", "mod", "more", "less", "than", "and", "or", "to", "of", "is",
    "not", "sin", "cos", "tan", "log", "ln", "exp", "infinity", "choose",
}  # fmt: skip
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
    "trillion": 10**12,
}  # fmt: skip
_SAME_UNIT = {
    "h": "hour", "hr": "hour", "min": "minute", "s": "second", "sec": "second", "deg": "degree",
    "ft": "foot", "feet": "foot", "in": "inch", "inche": "inch", "metre": "meter",
    "cm": "centimeter", "centimetre": "centimeter", "mm": "millimeter", "millimetre": "millimeter",
    "km": "kilometer", "kilometre": "kilometer", "kg": "kilogram", "mg": "milligram",
    "lb": "pound", "ml": "milliliter", "litre": "liter", "usd": "dollar", "eur": "euro",
    "sq": "square",
}  # fmt: skip
# Units that a bare answer may leave out where the gold answer has them.
_KNOWN_UNITS = {
    "second", "minute", "hour", "day", "week", "month", "year", "degree", "radian", "celsius",
    "fahrenheit", "inch", "foot", "yard", "mile", "meter", "centimeter", "millimeter",
    "kilometer", "gram", "kilogram", "milligram", "pound", "ounce", "ton", "liter", "milliliter",
    "gallon", "dollar", "cent", "euro", "yen", "rupee", "unit", "square", "cubic", "^2", "^3",
}  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """A number and what it counts.

    Attributes:
        value: exact; None where the part before the unit is no arithmetic on numbers.
        unit: its words in one spelling, () where the answer names none.
        percent: the value is written as one.
    """

    value: Fraction | None
    unit: tuple[str, ...]
    percent: bool

    @property
    def may_lack_unit(self) -> bool:
        """Whether an answer without the unit says the same."""
        return all(word in _KNOWN_UNITS for word in self.unit)


def plain(answer: str) -> str:
    """``answer`` without what never changes its value: marks, dollar signs, spaces, a period."""
    answer = strip_markdown(answer).replace("\u2212", "-").replace("\\%", "%")
    answer = re.sub(
        r"\\!|\\?\$|\\(?:left|right)(?![A-Za-z])\.?|\\displaystyle(?![A-Za-z])", "", answer
    )
    answer = re.sub(r"\\[dt]frac", r"\\frac", join_thousands(answer))
    answer = re.sub(r"\\[,;: ]|~|\s+", " ", answer).replace("{,}", ",")
    # Beside a sign a space says nothing; after a comma, between words and digits it does.
    answer = re.sub(r" +(?![\w ])|(?<![\w ,]) +", "", answer)
    answer = strip_markdown(answer).removesuffix(".").strip()
    while (whole := _WHOLE_TEXT.fullmatch(answer)) and whole[1].strip():
        answer = strip_markdown(whole[1])
    return _PI.sub(r"\\pi", answer)


def _words(text: str) -> list[str]:
    words = []
    for word in re.split(r"[\s/,]+", text.lower().replace(".", "")):
        single = word[:-1] if len(word) > 2 and word.endswith("s") else word
        words.append(_SAME_UNIT.get(word, _SAME_UNIT.get(single, single)))
    return [word for word in words if word and word != "per"]


def _split_unit(answer: str) -> tuple[str, list[str]]:
    """What stands before the unit, and the unit's words; no words where it could be a factor."""
    base = answer
    unit: list[str] = []
    while len(answer) - len(base) < _MAX_UNIT_CHARS:
        tail = base[-_MAX_UNIT_CHARS:]
        end = _UNIT_END.search(tail)
        if end is None:
            break
        text, text_power, degree, word, word_power = end.groups()
        glued = word is not None and end.start() > 0 and tail[end.start() - 1].isalnum()
        words = ["degree"] if degree else _words(text if text is not None else word)
        if glued and not all(w in _KNOWN_UNITS for w in words):
            break  # 2ab: letters are variables
        power = text_power or word_power
        unit = words + ([f"^{power}"] if power else []) + unit
        base = base[: len(base) - len(tail) + end.start()].rstrip()
    if not any(char.isdigit() for char in base) or _NO_UNITS.intersection(unit):
        return answer, []
    return base, unit


def parse_quantity(plain_answer: str) -> Quantity:
    """What ``plain`` has left, as a number and its unit.

    A word that counts (``million``) multiplies; one that calculates (``pi``, ``squared``) makes no
    unit. Never raises.
    """
    base = plain_answer
    unit: list[str] = []
    sign = re.match(r"([-+]?)([\u20ac\u00a3\u00a5\u20b9])", base)
    if sign:
        unit, base = [_CURRENCIES[sign[2]]], sign[1] + base[sign.end() :]
    elif base[-1:] in _CURRENCIES:
        unit, base = [_CURRENCIES[base[-1]]], base[:-1]
    base, words = _split_unit(base.rstrip())
    percent = bool(words) and words[0] == "percent"
    if base.endswith("%"):
        percent, base = True, base[:-1]
    elif percent:
        words = words[1:]
    value = exact_value(base) if any(char.isdigit() for char in base) else None
    while words and words[0] in _SCALES:
        value = None if value is None else value * _SCALES[words[0]]
        words = words[1:]
    # One spelling of an area and a volume.
    for name, power in (("square", "^2"), ("cubic", "^3")):
        if name in words:
            words = [word for word in words if word != name] + [power]
    return Quantity(value, tuple(words + unit), percent)
