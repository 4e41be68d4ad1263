"""TOVA: attention of the newest query, one choice for all heads of a layer (arXiv 2401.06104)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.policies.base import Needs, Policy

if TYPE_CHECKING:
    from torch import Tensor

    from kvcore.cache import CacheShape, KVCache


class Tova(Policy):
    """Softmax over all entries, averaged over all query heads of the layer."""

    name = "tova"
    summary = "what the newest query attends to, the same in all heads of a layer (TOVA)"
    order = 3

    def needs(self, shape: CacheShape) -> Needs:
        return Needs(window=1)

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        return cache.score_tova(seqs, protect=self.protect)
