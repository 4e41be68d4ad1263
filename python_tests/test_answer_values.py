"""Answers mean their values: exact numbers, their units, and no text that stops the grading."""

from __future__ import annotations

import random
import threading
import time
from fractions import Fraction

import pytest

from kvcore.eval import extract_answer, is_correct
from kvcore.eval.grading import answers_equal
from kvcore.eval.rational import exact_value


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\left\{ x>2 \right.}", r"\left\{ x>2 \right."),
        (r"\boxed{7}, so \boxed{\left\{ x>2 \right.}", r"\left\{ x>2 \right."),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{3} and \boxed{\}", "3"),
        (r"\boxed{\begin{matrix}1\\{2}\end{matrix}}", r"\begin{matrix}1\\{2}\end{matrix}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{3}", "3"),
        (r"\boxed{**73**}", "73"),
        (r"\boxed{ *73* }", "73"),
        (r"\boxed{__73__}", "73"),
        (r"\boxed{`73`}", "73"),
        (r"\boxed{**}", "**"),
        (r"\boxed{z^*}", "z^*"),
        (r"**\boxed{73}**", "73"),
    ],
)
def test_p26_the_last_box_is_taken_whole_and_without_markdown(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 3/4.", "3/4"),
        ("It is -3/4", "-3/4"),
        ("so \\frac{3}{4}.", "\\frac{3}{4}"),
        ("It takes 3 1/2 hours", "3 1/2"),
        ("1/2 + 1/4 = 3/4", "3/4"),
        ("on 3/4/2020", "2020"),
        ("$1{,}234$", "1{,}234"),
        ("$1\\,234$", "1\\,234"),
        ("1\u202f234 Euro", "1\u202f234"),
        ("about 1.5e-3", "1.5e-3"),
        ("**1,234**", "1,234"),
        ("1 2 3", "3"),
        ("10,200", "10,200"),
    ],
)
def test_fraction_or_grouped_number_outside_a_box_is_one_number(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "spelling", ["1,234", "1{,}234", "1\\,234", "1\\ 234", "1 234", "1,\\!234"]
)
def test_thousands_separators_change_nothing(spelling: str) -> None:
    assert answers_equal(spelling, "1234")
    assert answers_equal("1234", spelling)
    assert is_correct(f"\\boxed{{{spelling}}}", "1234")
    assert is_correct(f"It is {spelling}.", "1234")
    assert not answers_equal(spelling, "234")


@pytest.mark.parametrize("pair", ["1,2", "12,34", "1234,567", "1, 234"])
def test_other_commas_separate_numbers(pair: str) -> None:
    assert not answers_equal(pair, pair.replace(",", "").replace(" ", ""))


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        # Without words in the gold answer those of the answer are its unit.
        ("3 hours", "3", True),
        ("5 PM", "5", True),
        ("18 red apples", "18", True),
        # With words on both sides they must agree.
        ("3 hours", "3 minutes", False),
        ("3 hours", "3 hrs", True),
        ("5 PM", "5 AM", False),
        ("5 p.m.", "5 PM", True),
        ("12:30 PM", "12:30 AM", False),
        ("\\text{5 PM}", "\\text{5 AM}", False),
        ("3\\text{ hours}", "3\\text{ minutes}", False),
        ("7 days", "1 week", False),
        ("5 cents", "5 dollars", False),
        ("60 km/h", "60 kilometers per hour", True),
        ("864 square inches", "864 \\mbox{ inches}^2", True),
        ("15\\text{ cm}", "15\\text{ cm}^2", False),
        # A bare answer may leave out a measure, not what changes the value.
        ("864", "864 \\mbox{ inches}^2", True),
        ("3", "3 minutes", True),
        ("5", "5 PM", False),
        # Factors are no units.
        ("2 pi", "2", False),
        ("2\\text{ pi}", "2", False),
        ("2", "2 pi", False),
        ("2 pi", "2\\pi", True),
        ("5 more than x", "5", False),
        ("5 x", "5", False),
        ("5 squared", "5", False),
        ("5 million dollars", "5000000", True),
        ("5 million", "5", False),
        # Percent, currency, degrees.
        ("50 percent", "50\\%", True),
        ("0.5", "50\\%", True),
        ("0.4", "50\\%", False),
        ("\u20ac5", "5", True),
        ("\u20ac5", "\u00a35", False),
        ("5 euros", "\u20ac5", True),
        ("90^\\circ", "90", True),
        ("90\u00b0", "90 degrees", True),
        ("90^{\\circ}", "90 radians", False),
    ],
)
def test_words_are_dropped_only_as_units(answer: str, gold: str, same: bool) -> None:
    assert answers_equal(answer, gold) is same


NINES = "9" * 5000


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("1/3", "0." + "3" * 30, False),
        ("\\frac{1}{3}", "0." + "3" * 30, False),
        ("1e-30", "0", False),
        ("1e-30", "10^{-30}", True),
        ("10^{-30}", "2\\cdot 10^{-30}", False),
        ("0." + "0" * 40 + "1", "0", False),
        ("10^{400}", "1" + "0" * 400, True),
        ("10**400", "10^{400}+1", False),
        ("\\frac{1}{10^{400}}", "\\frac{2}{10^{400}}", False),
        ("\\frac{10^{400}}{2}", "5\\times 10^{399}", True),
        (NINES, NINES + ".0", True),
        (NINES, NINES[:-1] + "8", False),
        (NINES, "5", False),
        ("1/" + NINES, "1/" + NINES[:-1] + "8", False),
        ("3\\frac{1}{2}", "7/2", True),
        ("3 1/2", "31/2", False),
        ("\\frac{\\frac12}{3}", "1/6", True),
        ("-2^2", "-4", True),
        ("5/0", "5", False),
        ("(" * 3000 + "1" + ")" * 3000, "1", True),
        ("1e9999999", "1", False),
    ],
)
def test_rationals_are_compared_exactly(answer: str, gold: str, same: bool) -> None:
    assert answers_equal(answer, gold) is same


def test_values_of_random_arithmetic_equal_pythons() -> None:
    rng = random.Random(3)

    def expression(depth: int) -> tuple[str, Fraction]:
        if depth == 0 or rng.random() < 0.2:
            number = rng.randrange(0, 30)
            return str(number), Fraction(number)
        (a, x), (b, y) = expression(depth - 1), expression(depth - 1)
        kind = rng.choice("+-*/^f")
        if kind == "^":
            power = rng.randrange(0, 4)
            return f"({a})^{{{power}}}", x**power
        if kind in "/f" and y == 0:
            kind = "+"
        if kind == "f":
            return f"\\frac{{{a}}}{{{b}}}", x / y
        value = {"+": x + y, "-": x - y, "*": x * y}[kind] if kind != "/" else x / y
        return f"({a}){kind}({b})", value

    for _ in range(300):
        text, value = expression(4)
        if "(0)^{0}" in text or (got := exact_value(text)) is None:
            continue
        assert got == value, text


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 20000,
        "\\boxed{" + "{" * 100_000,
        "\\boxed{" + "(" * 900 + "x" + ")" * 900 + "}",
        "\\boxed{" + "\\sqrt{" * 150 + "2" + "}" * 150 + "}",
        "1 " * 50_000,
        "1,234" * 30_000,
        "/1" * 50_000,
        "1/" * 50_000,
        "\\frac" * 20_000,
        "\\boxed{1" + " " * 100_000 + "a}",
        "\\boxed{" + "a " * 50_000 + "}",
        "\\boxed{" + "*" * 100_000 + "}",
        "7" * 200_000,
        "\\boxed{2^{99999999}}",
    ],
)
def test_no_text_holds_up_the_grading(text: str) -> None:
    begin = time.process_time()
    assert not is_correct(text, "3")
    assert time.process_time() - begin < 20  # quadratic time would be minutes


def test_grading_never_raises() -> None:
    rng = random.Random(11)
    pieces = [
        *"0123456789.,/+-*^_{}()[]$%!:\\ \n~`'\"abxe=<>|&#",
        "\\boxed{", "\\frac", "\\left\\{", "\\right.", "\\text{", "**", "1,234", "\\{", "\\}",
        "\\,", "\u2212", "\u20ac", "\u00b0", "\u00b2", "\u0663", "\ud800", "\x00", " hours", " PM",
        "pi", "1e", "10^", "9" * 700, "\\sqrt", "\\%", "^\\circ", "\\infty", "\\pm",
    ]  # fmt: skip
    verdicts = []
    for i in range(400):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 14)))
        boxed = f"\\boxed{{{text}}}" if i % 2 else text
        extract_answer(boxed)
        verdicts.append(is_correct(boxed, text if i % 3 == 0 else "12"))
    assert any(verdicts)
    assert not all(verdicts)


def test_exact_comparisons_need_no_process() -> None:
    verdicts: list[bool] = []
    thread = threading.Thread(target=lambda: verdicts.append(answers_equal(NINES, "10^{5000}-1")))
    thread.start()
    thread.join()
    assert verdicts == [True]
