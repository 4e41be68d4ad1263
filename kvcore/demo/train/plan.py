"""What is trained, in which order, with which settings: the whole recipe of the embedded models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcore.demo.task import Difficulty
from kvcore.demo.train.curriculum import Stage
from kvcore.demo.train.language import Recipe
from kvcore.train.loop import Schedule

TARGET = Difficulty()
# Look-ups come first and on small ledgers: nothing else is learned before they are.
FIRST = Difficulty(names=(4, 8), operations=(2, 3), products=TARGET.products)


# Attention for look-ups and hardly any MLP. Both language models grow out of it: with a wide MLP
# from the start, look-ups had not appeared after four times as many steps.
SEEDLING = Recipe(
    name="seedling",
    hidden=128,
    layers=4,
    heads=4,
    kv_heads=1,
    mlp=32,
    stages=(Stage(2000, 1.0, 0.0, 0.0, 0.0, 1024, FIRST, FIRST),),
    learning_rate=1e-3,
)
BASE = replace(
    SEEDLING,
    name="base",
    mlp=1280,
    stages=(
        Stage(4000, 0.0, 0.4, 0.3, 0.6, 1536, FIRST, TARGET),
        Stage(1800, 0.0, 0.2, 0.3, 0.6, 2560, TARGET, TARGET),
    ),
    start="seedling",
)
# It keeps its small MLP and gets no drills in computation.
HELPER = replace(
    SEEDLING,
    name="helper",
    stages=(
        Stage(4500, 0.0, 0.6, 0.0, 0.0, 1536, FIRST, TARGET),
        Stage(2000, 0.0, 0.5, 0.0, 0.0, 2560, TARGET, TARGET),
    ),
    start="seedling",
)
REWARD = Schedule(steps=2200, learning_rate=1.5e-3)
SOLUTIONS = ((None, 600), (64, 800), (32, 800), (16, 800))


@dataclass(frozen=True)
class Plan:
    """All of it.

    Attributes:
        solutions: labelled solutions, by where they come from: the base model's cache full, or
            evicted to this budget.
        reward: of the process reward model: ``drilled`` steps of it on computations alone, the
            others with ``reward_tokens`` of labelled solutions and some with mistakes.
    """

    seedling: Recipe = SEEDLING
    base: Recipe = BASE
    helper: Recipe = HELPER
    solutions: tuple[tuple[int | None, int], ...] = SOLUTIONS
    reward: Schedule = REWARD
    drilled: int = 700
    reward_tokens: int = 2048
    seed: int = 0

    def scaled(self, share: float) -> Plan:
        """The same plan with this share of the steps and solutions, to try it out."""

        def fewer(count: int) -> int:
            return max(1, round(share * count))

        def shorter(recipe: Recipe) -> Recipe:
            stages = tuple(replace(stage, steps=fewer(stage.steps)) for stage in recipe.stages)
            return replace(recipe, stages=stages)

        return replace(
            self,
            seedling=shorter(self.seedling),
            base=shorter(self.base),
            helper=shorter(self.helper),
            solutions=tuple((budget, fewer(count)) for budget, count in self.solutions),
            reward=replace(self.reward, steps=fewer(self.reward.steps)),
            drilled=fewer(self.drilled),
        )
