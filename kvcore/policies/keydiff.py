"""KeyDiff: keys unlike the lane's mean direction are kept (arXiv 2504.15364)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.policies.base import Policy

if TYPE_CHECKING:
    from torch import Tensor

    from kvcore.cache import KVCache


class KeyDiff(Policy):
    """Score -cos(k, mean of unit keys)."""

    name = "keydiff"
    summary = "keys unlike the mean direction of the lane's keys (KeyDiff)"
    order = 5

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        return cache.score_keys(seqs, kind="difference", protect=self.protect)
