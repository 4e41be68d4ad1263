"""R-KV: attention from the last queries against redundancy among keys (arXiv 2505.24133)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcore import ops
from kvcore.cache import KVCache
from kvcore.policies.base import Policy


class RKV(Policy):
    """Exact R-KV as released, in float and per lane, with neighbours taken by position."""

    name = "rkv"
    observes = True

    @property
    def mix(self) -> float:
        return self.config.mix

    @property
    def is_fused(self) -> bool:
        """The exact form and nothing besides it; other settings score anew for every token."""
        config = self.config
        plain = config.scope == "lane" and not config.protect_prompt and not config.pool_first
        return config.is_steady and plain and config.threshold >= 0

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        return ops.score_rkv(
            cache.store,
            cache.rows(seqs),
            (cache.shape.layers, cache.shape.kv_heads),
            cache.longest_lane(seqs),
            protect=self.config.protect,
            kernel=self.config.kernel,
            mix=self.mix,
            threshold=self.config.threshold,
            pool_first=self.config.pool_first,
            scale=cache.scale,
        )
