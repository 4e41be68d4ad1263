"""Knorm: keys of small norm are kept (arXiv 2406.11430)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcore import ops
from kvcore.cache import KVCache
from kvcore.policies.base import Policy


class KNorm(Policy):
    """Score -|k|."""

    name = "knorm"

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        return ops.score_keys(
            cache.store,
            cache.rows(seqs),
            (cache.shape.layers, cache.shape.kv_heads),
            cache.longest_lane(seqs),
            kind="norm",
            protect=self.config.protect,
        )
