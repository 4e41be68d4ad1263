"""StreamingLLM: the first entries and the newest (arXiv 2309.17453)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.checks import require_int
from kvcore.policies.base import Policy, spare_newest

if TYPE_CHECKING:
    from torch import Tensor

    from kvcore.cache import KVCache
    from kvcore.policies.settings import EvictionConfig

SINKS = 4
_ABOVE_ALL = float(2**24)  # positions below it are exact floats


class StreamingLLM(Policy):
    """Keeps the first ``SINKS`` entries, which are part of the budget, and otherwise the newest.

    Keys keep the rotation of their positions in the text. The original rotates them again, to their
    places in the cache.
    """

    name = "streamingllm"
    summary = "the first 4 entries, part of the budget, and the newest (StreamingLLM)"
    order = 6

    def __init__(self, config: EvictionConfig) -> None:
        super().__init__(config)
        require_int(config.budget, "budget", SINKS)

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        position = cache.positions(seqs)
        score = position.float()
        score[position < SINKS] = _ABOVE_ALL
        return spare_newest(score, position, self.protect)
