"""SnapKV at decode time: attention of the last queries alone (arXiv 2404.14469)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcore import ops
from kvcore.cache import KVCache
from kvcore.policies.base import Policy


class SnapKV(Policy):
    """R-KV's importance without its redundancy: what the R-KV code runs as ``snapkv``."""

    name = "snapkv"
    observes = True

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        return ops.score_rkv(
            cache.store,
            cache.rows(seqs),
            (cache.shape.layers, cache.shape.kv_heads),
            cache.longest_lane(seqs),
            protect=self.config.protect,
            kernel=self.config.kernel,
            mix=1.0,
            threshold=self.config.threshold,
            pool_first=self.config.pool_first,
        )
