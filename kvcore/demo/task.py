"""The demo's task: read values out of a ledger and chain them with arithmetic modulo 100.

A prompt lists named two-digit values, then operations that start from one of them::

    oak=17; elm=25; fig=11? A oak=, B * elm=, C + fig=, D answer.

Its solution alternates two kinds of steps, separated by a blank line, and ends with the answer::

    A oak=17 | B * elm=25: 17 * 25 | 17 * 25 = 25 | C + fig=11: 25 + 11 | 25 + 11 = 36 | D answer 36

A *look-up* step needs facts from far back in the prompt, the operation and the value, which an
evicted cache may have lost (information gap). A *computation* step needs only what was just
written, but products modulo 100 are hard for a model with hardly any MLP (capability gap).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvcore.config import require, require_int

MODULUS = 100  # of the results
VALUES = range(10, 30)  # of the ledger
STEP_END = "\n\n"
OPERATORS = ("*", "+", "-")
LETTERS = "ABCDEFGHIJKLMNOP"
_NAMES = """
    ant ape ash bat bay bee box bud cat cod cow cub dew doe dog eel elk elm emu fig fir fox gem gnu
    hay hen hip ivy jay jet kid koi lid log map mud nut oak oat owl pea pig rat ray rye sea sow sun
    tea tin urn yak
"""
NAMES = tuple(_NAMES.split())
_FIRST = re.compile(r"A [a-z]+=(?P<value>\d\d)")
_LOOK_UP = re.compile(
    rf"(?P<letter>[{LETTERS}]) [*+-] [a-z]+=\d\d: "
    r"(?P<left>\d\d) (?P<operator>[*+-]) (?P<right>\d\d)"
)
_COMPUTATION = re.compile(r"\d\d [*+-] \d\d = (?P<result>\d\d)")
SPLITS = ("train", "calibration", "test")


@dataclass(frozen=True)
class Difficulty:
    """Ranges, both ends included, that a problem's size is drawn from.

    Attributes:
        names: entries of the ledger.
        operations: operations, the first look-up included.
        products: of the operations after the first, this share is a product in expectation.
    """

    names: tuple[int, int] = (20, 32)
    operations: tuple[int, int] = (6, 12)
    products: float = 0.4

    def __post_init__(self) -> None:
        for field, (low, high), least, most in (
            ("names", self.names, 1, len(NAMES)),
            ("operations", self.operations, 1, len(LETTERS) - 1),
        ):
            require_int(low, field, least, most)
            require_int(high, field, low, most)
        require(0 <= self.products <= 1, "products", "a number in [0, 1]", self.products)


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        ledger: (name, value in ``VALUES``) in the order of the prompt; names differ.
        operations: (operator, name); the first operator is not used.
    """

    ledger: tuple[tuple[str, int], ...]
    operations: tuple[tuple[str, str], ...]

    @property
    def question(self) -> str:
        """The prompt without its final blank line, which the chat template adds."""
        ledger = "; ".join(f"{name}={value:02d}" for name, value in self.ledger)
        first, *rest = zip(LETTERS, self.operations, strict=False)
        chain = [f"{first[0]} {first[1][1]}="]
        chain += [f"{letter} {operator} {name}=" for letter, (operator, name) in rest]
        return f"{ledger}? {', '.join(chain)}, {self._last} answer."

    @property
    def _last(self) -> str:
        """Letter of the answer."""
        return LETTERS[len(self.operations)]

    @property
    def prompt(self) -> str:
        return self.question + STEP_END

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps of the solution, each with its separator, the last without."""
        values = dict(self.ledger)
        result = values[self.operations[0][1]]
        steps = [first_step(self.operations[0][1], result)]
        for letter, (operator, name) in zip(LETTERS[1:], self.operations[1:], strict=False):
            value = values[name]
            steps.append(look_up_step(letter, operator, name, value, result))
            steps.append(computation_step(result, operator, value))
            result = compute(result, operator, value)
        return (*steps, f"{self._last} answer {result:02d}")

    @property
    def solution(self) -> str:
        return "".join(self.steps)

    @property
    def answer(self) -> str:
        return self.steps[-1][-2:]

    @property
    def split(self) -> str:
        """The set this problem belongs to: a function of its text alone, so sets never overlap."""
        digest = hashlib.blake2b(self.question.encode(), digest_size=2).digest()
        return {0: "test", 1: "calibration"}.get(digest[0] % 8, "train")

    def expected(self, committed: Sequence[str]) -> str:
        """The right next step after ``committed`` ones, which may hold mistakes.

        A step is right if it follows from the prompt and from the numbers written before it, right
        or wrong. A committed step that is of neither kind changes nothing.
        """
        values = dict(self.ledger)
        place, result, pending = 0, 0, None
        for text in committed:
            if found := _FIRST.fullmatch(text.strip()):
                place, result, pending = 1, int(found["value"]), None
            elif found := _LOOK_UP.fullmatch(text.strip()):
                place = LETTERS.index(found["letter"]) + 1
                pending = int(found["left"]), found["operator"], int(found["right"])
            elif found := _COMPUTATION.fullmatch(text.strip()):
                result, pending = int(found["result"]), None
        if pending is not None:
            return computation_step(*pending)
        if place >= len(self.operations):
            return f"{self._last} answer {result:02d}"
        operator, name = self.operations[place]
        if place == 0:
            return first_step(name, values[name])
        return look_up_step(LETTERS[place], operator, name, values[name], result)

    def is_solved_by(self, text: str) -> bool:
        """True if the last line of ``text`` is the right answer."""
        return text.rsplit(STEP_END, 1)[-1].strip() == self.steps[-1]


def parse_problem(question: str) -> Problem:
    """The problem of a question. Raises ValueError if it is none."""
    ledger, found, chain = question.partition("? ")
    values = re.findall(r"([a-z]+)=(\d\d)", ledger)
    operations = re.findall(r"[A-Z] (?:([*+-]) )?([a-z]+)=", chain)
    problem = Problem(
        tuple((name, int(value)) for name, value in values),
        tuple((operator or "*", name) for operator, name in operations),
    )
    if not found or not operations or problem.question != question:
        raise ValueError(f"question: expected one of the demo's task, got {question[:60]!r}")
    return problem


def compute(left: int, operator: str, right: int) -> int:
    """``left operator right`` modulo 100."""
    result = {"*": left * right, "+": left + right, "-": left - right}[operator]
    return result % MODULUS


def first_step(name: str, value: int) -> str:
    return f"{LETTERS[0]} {name}={value:02d}{STEP_END}"


def look_up_step(letter: str, operator: str, name: str, value: int, left: int) -> str:
    return f"{letter} {operator} {name}={value:02d}: {left:02d} {operator} {value:02d}{STEP_END}"


def computation_step(left: int, operator: str, right: int) -> str:
    return f"{left:02d} {operator} {right:02d} = {compute(left, operator, right):02d}{STEP_END}"


def draw_problem(random: Random, difficulty: Difficulty) -> Problem:
    """A problem of any split."""
    names = random.sample(NAMES, random.randint(*difficulty.names))
    ledger = tuple((name, random.choice(VALUES)) for name in names)
    operations = tuple(
        (
            "*" if random.random() < difficulty.products else random.choice("+-"),
            random.choice(names),
        )
        for _ in range(random.randint(*difficulty.operations))
    )
    return Problem(ledger, operations)


def problems(split: str, seed: int, difficulty: Difficulty | None = None) -> Iterator[Problem]:
    """Endless problems of one split, a function of the arguments.

    Raises:
        ValueError: unknown split.
    """
    require(split in SPLITS, "split", f"one of {', '.join(SPLITS)}", split)
    difficulty = difficulty or Difficulty()
    random = Random(f"{split} {seed}")
    while True:
        problem = draw_problem(random, difficulty)
        if problem.split == split:
            yield problem
