"""Labelled solutions for the process reward model: real steps of base and helper.

The models solve training problems together, with a full and with an evicted cache. The task's own
checker labels every step; now and then a wrong one is committed on purpose, so that the reward
model sees what comes after a mistake.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from kvcore.config import EvictionConfig, SearchConfig
from kvcore.demo.settings import MAX_TOKENS, SAMPLING, engine_config
from kvcore.demo.task import Problem, problems
from kvcore.engine import Engine
from kvcore.files import write_whole
from kvcore.models import LoadedModel
from kvcore.search import Prompt, ScoreRequest, Search

_WRONG_SHARE = 0.3  # of the steps, a candidate is committed without a look at its label


@dataclass(frozen=True)
class Labelled:
    """A solution's steps, stripped, and whether each is right where it stands."""

    question: str
    steps: tuple[str, ...]
    right: tuple[bool, ...]


class Checker:
    """A scorer that knows the task. Prefers right steps, except for a random share of steps."""

    name = "checker"

    def __init__(self, problems: dict[str, Problem], seed: int) -> None:
        self._problems = problems
        self._seed = seed

    def score(self, requests: Sequence[ScoreRequest]) -> list[float]:
        first = requests[0]
        random = Random(f"{self._seed} {first.question} {first.step}")
        expected = self._problems[first.question].expected(first.prefix).strip()
        careless = random.random() < _WRONG_SHARE
        return [
            random.random() + (not careless and request.text.strip() == expected)
            for request in requests
        ]


def label_solution(problem: Problem, steps: Sequence[str]) -> Labelled:
    """Labels ``steps``, each against the right one after those before it."""
    right = tuple(
        step.strip() == problem.expected(steps[:i]).strip() for i, step in enumerate(steps)
    )
    return Labelled(problem.question, tuple(step.strip() for step in steps), right)


def sample_labels(
    base: LoadedModel, helper: LoadedModel, eviction: EvictionConfig, count: int, seed: int
) -> Iterator[Labelled]:
    """``count`` labelled solutions of training problems, as they finish.

    Args:
        eviction: of the base model's cache; policy "full" for none.
    """
    chosen = list(islice(problems("train", seed), count))
    by_question = {problem.question: problem for problem in chosen}
    longest = max(2 * len(problem.operations) + 6 for problem in chosen)
    search = Search(
        Engine(base, engine_config(), eviction=eviction),
        [Prompt(problem.question) for problem in chosen],
        helper=Engine(helper, engine_config()),
        scorer=Checker(by_question, seed),
        config=SearchConfig(
            n=2,
            sampling=SAMPLING,
            max_steps=longest,
            max_tokens=MAX_TOKENS,
            detector=None,
            seed=seed,
        ),
    )
    for solution in search.run():
        if solution.error is None and solution.steps:
            texts = [step.text for step in solution.steps]
            yield label_solution(by_question[solution.question], texts)


def write_labels(path: Path, labelled: Sequence[Labelled]) -> None:
    """One JSON object per line. The file appears whole or not at all."""
    lines = [
        json.dumps({"question": x.question, "steps": x.steps, "right": x.right}) for x in labelled
    ]
    write_whole(path, "\n".join(lines) + "\n")


def read_labels(path: Path) -> list[Labelled]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Labelled(r["question"], tuple(r["steps"]), tuple(r["right"])) for r in rows]
