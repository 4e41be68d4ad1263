"""KeyDiff: keys unlike the lane's mean direction are kept (arXiv 2504.15364)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcore import ops
from kvcore.cache import KVCache
from kvcore.policies.base import Policy


class KeyDiff(Policy):
    """Score -cos(k, mean of unit keys)."""

    name = "keydiff"

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        return ops.score_keys(
            cache.store,
            cache.rows(seqs),
            (cache.shape.layers, cache.shape.kv_heads),
            cache.longest_lane(seqs),
            kind="difference",
            protect=self.config.protect,
        )
