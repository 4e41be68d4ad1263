"""H2O: what has got the most attention is kept (arXiv 2306.14048)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.policies.base import Needs, Policy, spare_newest

if TYPE_CHECKING:
    from torch import Tensor

    from kvcore.cache import CacheShape, KVCache


class H2O(Policy):
    """Attention summed over all tokens that saw an entry, its own included, while it was cached.

    Old entries had more time to collect. Where the original adds up per query head and masks, this
    takes the mean over the query heads of a kv head and frees.
    """

    name = "h2o"
    summary = "what has got the most attention so far, from all tokens (H2O)"
    order = 2

    def needs(self, shape: CacheShape) -> Needs:
        return Needs(attention="sum")

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        score = cache.attention_stats(seqs).squeeze(-2)
        bad = (score.isnan() | (score == math.inf)).nonzero()
        if len(bad):
            seq, layer, head, _ = bad[0].tolist()
            row = int(cache.rows(seqs)[seq])
            raise ValueError(
                f"h2o: expected finite attention, got NaN or infinity in row {row}, layer {layer}, "
                f"kv head {head}"
            )
        return spare_newest(score, cache.positions(seqs), self.protect)
