"""Steps with mistakes made on purpose, for the process reward model.

Base and helper make few kinds of mistakes, and each of them seldom; here every kind is frequent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from random import Random
from typing import Any

from kvcore.demo.task import (
    LETTERS,
    MODULUS,
    OPERATORS,
    VALUES,
    Difficulty,
    Problem,
    computation_step,
    look_up_step,
)
from kvcore.demo.train.curriculum import IGNORED, Example, training_problem
from kvcore.demo.vocabulary import SEPARATOR, encode, make_tokenizer, token_id
from kvcore.search.scorers.prm import step_ids

_DRILLED = 16  # steps of a drill
_SPOILED = 0.3  # of the steps of a solution


def judge_step(step: Sequence[int], expected: Sequence[int]) -> list[int]:
    """Labels of a step's ids, its separator last: 1 up to the first that is not as expected."""
    labels = []
    right = True
    for i, token in enumerate(step):
        right = right and i < len(expected) and token == expected[i]
        labels.append(int(right))
    return labels


@cache
def _tokenizer() -> Any:
    return make_tokenizer()


@lru_cache(maxsize=100_000)
def closed(step: str) -> tuple[int, ...]:
    """Ids of a step as the reward model reads it."""
    return tuple(step_ids(_tokenizer(), step, token_id(SEPARATOR)))


def spoil_digits(random: Random, step: str) -> str:
    """``step``, its result wrong, mostly in one digit. REQUIRES: it ends with two digits."""
    spoiled = step
    while spoiled == step:
        digits = [random.choice("0123456789"), step[-1]]
        if random.random() < 0.3:
            digits[1] = random.choice("0123456789")
        spoiled = step[:-2] + "".join(digits)
    return spoiled


def judging_drill(random: Random) -> Example:
    """Computation steps, half of them with a wrong result."""
    row = Example([], [])
    for _ in range(_DRILLED):
        left, right = random.randrange(MODULUS), random.choice(VALUES)
        operator = "*" if random.random() < 0.7 else random.choice("+-")
        expected = computation_step(left, operator, right).strip()
        step = spoil_digits(random, expected) if random.random() < 0.5 else expected
        row.ids.extend(closed(step))
        row.labels.extend(judge_step(closed(step), closed(expected)))
    return row


def spoil(random: Random, problem: Problem, expected: str) -> str:
    """A step that could stand for ``expected`` in a solution of ``problem``, but is wrong.

    A computation or answer has a wrong result. A look-up belongs to another operation or reads
    another name or value, and is consistent otherwise; or the answer comes before its time.
    """
    if " = " in expected or " answer " in expected or expected.startswith(LETTERS[0]):
        return spoil_digits(random, expected)
    spoiled = expected
    while spoiled == expected:
        spoiled = _vary_look_up(random, problem, expected)
    return spoiled


def _vary_look_up(random: Random, problem: Problem, expected: str) -> str:
    values = dict(problem.ledger)
    head, _, operands = expected.partition(": ")
    letter, operator, entry = head.split()
    name, left = entry[:-3], int(operands[:2])
    kind = random.random()
    if kind < 0.15:
        return f"{letter} answer {left:02d}"
    if kind < 0.3:
        letter, (operator, name) = random.choice(
            list(zip(LETTERS[1:], problem.operations[1:], strict=False))
        )
    elif kind < 0.5:
        operator = random.choice(OPERATORS)
    elif kind < 0.75:
        name = random.choice(list(values))
    elif kind < 0.9:
        values[name] = random.choice(VALUES)
    else:
        left = random.randrange(MODULUS)
    return look_up_step(letter, operator, name, values[name], left).strip()


def spoiled_solution(random: Random, difficulty: Difficulty) -> Example:
    """A solution of a training problem in which some steps are wrong.

    Every other step follows from those before it, wrong ones included.
    """
    problem = training_problem(random, difficulty)
    steps: list[str] = []
    while not (steps and " answer " in steps[-1]):
        expected = problem.expected(steps).strip()
        is_spoiled = random.random() < _SPOILED
        steps.append(spoil(random, problem, expected) if is_spoiled else expected)
    return judged_solution(problem, steps)


def judged_solution(problem: Problem, steps: Sequence[str]) -> Example:
    """A conversation as the reward model reads it, labelled."""
    row = Example(encode(problem.prompt), [])
    row.labels.extend([IGNORED] * len(row.ids))
    for i, step in enumerate(steps):
        row.ids.extend(closed(step))
        row.labels.extend(judge_step(closed(step), closed(problem.expected(steps[:i]))))
    return row
