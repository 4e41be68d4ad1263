"""Random eviction: the control that every scorer must beat."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcore import ops
from kvcore.cache import KVCache
from kvcore.policies.base import Policy


class RandomPolicy(Policy):
    """A token's score is a pure function of (seed, layer, head, position)."""

    name = "random"

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        return ops.score_random(
            cache.store,
            cache.rows(seqs),
            (cache.shape.layers, cache.shape.kv_heads),
            cache.longest_lane(seqs),
            seed=self.config.seed,
            protect=self.config.protect,
        )
