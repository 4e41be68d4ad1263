"""Knorm: keys of small norm are kept (arXiv 2406.11430)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.policies.base import Policy

if TYPE_CHECKING:
    from torch import Tensor

    from kvcore.cache import KVCache


class KNorm(Policy):
    """Score -|k|."""

    name = "knorm"
    summary = "keys of small norm (Knorm)"
    order = 4

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        return cache.score_keys(seqs, kind="norm", protect=self.protect)
