"""Training sequences of the language models: whole problems and three kinds of drills.

Every batch is a function of (recipe, seed, step), so a training that was killed goes on exactly
where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kvcore.demo.task import (
    LETTERS,
    MODULUS,
    NAMES,
    VALUES,
    Difficulty,
    Problem,
    computation_step,
    draw_problem,
    first_step,
    look_up_step,
)
from kvcore.demo.vocabulary import EOS, PAD, encode, token_id

IGNORED = -100  # label of a token that is not predicted
_LOOK_UPS = 16
_COMPUTATIONS = 16


@dataclass(frozen=True)
class Stage:
    """A stretch of the training. Difficulty grows evenly from its first step to its last.

    Attributes:
        steps: optimizer steps.
        look_ups: share of sequences that are look-ups of names in a ledger.
        chains: share that are the look-up steps of a problem, in random order.
        computations: share that are computation steps alone; the rest are whole problems.
        products: share of products among the drilled computations.
        tokens: of a batch, padding included.
        first, last: difficulty at both ends.
    """

    steps: int
    look_ups: float
    chains: float
    computations: float
    products: float
    tokens: int
    first: Difficulty
    last: Difficulty

    def difficulty(self, progress: float) -> Difficulty:
        """``progress`` in [0, 1]."""

        def between(first: tuple[int, int], last: tuple[int, int]) -> tuple[int, int]:
            low, high = (round(a + progress * (b - a)) for a, b in zip(first, last, strict=True))
            return low, high

        return Difficulty(
            names=between(self.first.names, self.last.names),
            operations=between(self.first.operations, self.last.operations),
            products=self.last.products,
        )


@dataclass(frozen=True)
class Example:
    """One training sequence: ids, and as many labels (``IGNORED`` where nothing is learned)."""

    ids: list[int]
    labels: list[int]


def training_problem(random: Random, difficulty: Difficulty) -> Problem:
    """The next drawn problem that belongs to the training set."""
    while True:
        problem = draw_problem(random, difficulty)
        if problem.split == "train":
            return problem


def whole_problem(random: Random, difficulty: Difficulty) -> Example:
    problem = training_problem(random, difficulty)
    prompt, solution = encode(problem.prompt), [*encode(problem.solution), token_id(EOS)]
    return Example(prompt + solution, [IGNORED] * len(prompt) + solution)


def look_up_drill(random: Random, num_names: int) -> Example:
    """A ledger, then beginnings of look-up steps with random names; the values are predicted."""
    names = random.sample(NAMES, num_names)
    values = {name: random.choice(VALUES) for name in names}
    ids = encode("; ".join(f"{name}={value:02d}" for name, value in values.items()) + "? .\n\n")
    labels = [IGNORED] * len(ids)
    for name in random.choices(names, k=_LOOK_UPS):
        letter = random.choice(LETTERS)
        operator = " " if letter == LETTERS[0] else f" {random.choice('*+-')} "
        step = encode(f"{letter}{operator}{name}={values[name]:02d}\n\n")
        ids += step
        labels += [IGNORED] * (len(step) - 3) + step[-3:]
    return Example(ids, labels)


def chain_drill(random: Random, difficulty: Difficulty) -> Example:
    """A problem and its look-up steps in random order; all but the letters is predicted.

    What is left of the operator is a random number, which only shows at its second place: those two
    tokens are not predicted.
    """
    problem = training_problem(random, difficulty)
    values = dict(problem.ledger)
    ids = encode(problem.prompt)
    labels = [IGNORED] * len(ids)
    chain = list(zip(LETTERS, problem.operations, strict=False))
    for letter, (operator, name) in random.sample(chain, len(chain)):
        if letter == LETTERS[0]:
            step = encode(first_step(name, values[name]))
            labels += [IGNORED, *step[1:]]
        else:
            left = random.randrange(MODULUS)
            step = encode(look_up_step(letter, operator, name, values[name], left))
            at = step.index(token_id(": ")) + 1
            labels += [IGNORED, *step[1:at], IGNORED, IGNORED, *step[at + 2 :]]
        ids += step
    return Example(ids, labels)


def computation_drill(random: Random, products: float) -> Example:
    """Computation steps; only the results are predicted."""
    ids: list[int] = []
    labels: list[int] = []
    for _ in range(_COMPUTATIONS):
        operator = "*" if random.random() < products else random.choice("+-")
        operands = random.randrange(MODULUS), random.choice(VALUES)
        step = encode(computation_step(operands[0], operator, operands[1]))
        ids += step
        labels += [IGNORED] * (len(step) - 3) + step[-3:]
    return Example(ids, labels)


def draw_batch(stages: tuple[Stage, ...], seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Padded (ids, labels) of step ``step``, int64 [sequences, longest]."""
    before = step
    for stage in stages:
        if before < stage.steps:
            break
        before -= stage.steps
    else:
        raise ValueError(f"step: expected less than {step - before}, got {step}")
    random = Random(f"{seed} {step}")
    difficulty = stage.difficulty(before / stage.steps)
    rows: list[Example] = []
    longest = 0
    while True:
        kind = random.random()
        if kind < stage.computations:
            row = computation_drill(random, stage.products)
        elif kind < stage.computations + stage.look_ups:
            row = look_up_drill(random, random.randint(*difficulty.names))
        elif kind < stage.computations + stage.look_ups + stage.chains:
            row = chain_drill(random, difficulty)
        else:
            row = whole_problem(random, difficulty)
        longest = max(longest, len(row.ids))
        if rows and (len(rows) + 1) * longest > stage.tokens:
            return pad(rows)
        rows.append(row)


def pad(rows: list[Example]) -> tuple[Tensor, Tensor]:
    """Sequences filled up on the right, which causal attention never looks at."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), longest), token_id(PAD))
    labels = torch.full((len(rows), longest), IGNORED)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        labels[i, : len(row.labels)] = torch.tensor(row.labels)
    return ids, labels
