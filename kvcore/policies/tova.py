"""TOVA: attention of the newest query, one choice for all heads of a layer (arXiv 2401.06104)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcore import ops
from kvcore.cache import KVCache
from kvcore.policies.base import Policy


class Tova(Policy):
    """Softmax over all entries, averaged over all query heads of the layer."""

    name = "tova"
    observes = True

    @property
    def window(self) -> int:
        return 1

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        return ops.score_tova(
            cache.store,
            cache.rows(seqs),
            (cache.shape.layers, cache.shape.kv_heads),
            cache.longest_lane(seqs),
            protect=self.config.protect,
            scale=cache.scale,
        )
