"""Random eviction: the control that every scorer must beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcore.checks import INT64_MAX
from kvcore.policies.base import Policy, PolicySettings, setting

if TYPE_CHECKING:
    from torch import Tensor

    from kvcore.cache import KVCache


@dataclass(frozen=True)
class RandomSettings(PolicySettings):
    """``seed`` of the choice."""

    seed: int = setting(0, "of the choice", low=0, high=INT64_MAX)


class RandomPolicy(Policy):
    """A token's score is a pure function of (seed, layer, head, position)."""

    name = "random"
    summary = "a random choice, the control"
    settings_type = RandomSettings
    order = 7
    settings: RandomSettings

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        return cache.score_random(seqs, seed=self.settings.seed, protect=self.protect)
