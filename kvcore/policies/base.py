"""What an eviction policy is, and the eviction that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvcore import ops
from kvcore.cache import KVCache
from kvcore.config import EvictionConfig, require


class Policy(ABC):
    """Scores cached slots; selection, eviction and freeing are common code (``evict``).

    Attributes:
        name: as given to ``EvictionConfig.policy``.
        observes: whether it reads the query ring.
    """

    name: ClassVar[str]
    observes: ClassVar[bool] = False

    def __init__(self, config: EvictionConfig) -> None:
        """Raises ``ValueError``: settings that this policy cannot work with."""
        self.config = config
        # An older query has not seen all of the entries it would score.
        expected = f"at most protect ({config.protect}) with policy {config.policy!r}"
        require(self.window <= config.protect, "window", expected, config.window)

    @property
    def window(self) -> int:
        """Queries that the cache keeps for it."""
        return self.config.window if self.observes else 0

    @abstractmethod
    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        """Score every live slot of these sequences; higher is kept.

        Returns:
            f32 [seqs, layers, kv_heads, slots]: +inf for the ``protect`` newest slots, -inf past a
            lane's end. slots is at least the longest lane.
        Raises:
            ValueError: the cache holds keys that are not finite.
        """


def evict(policy: Policy, cache: KVCache, seqs: Sequence[int], prompt_lens: Sequence[int]) -> int:
    """Drop the lowest scored slots of each lane so that ``budget`` scored and ``protect`` newest
    stay.

    Args:
        seqs: store handles. Lanes already within their limit lose nothing.
        prompt_lens: tokens of each sequence's prompt; with ``protect_prompt`` those still cached
            are kept besides.
    Returns:
        Slots dropped, summed over lanes.
    Raises:
        ValueError: from ``Policy.score``, or scope "global" and lanes of a sequence that hold
            different positions; nothing has changed.
        OutOfBlocks: shared blocks could not be copied; nothing has changed.
    """
    config = policy.config
    assert config.budget is not None
    score = policy.score(cache, seqs)
    if config.scope == "global":
        score = _mean_over_lanes(score, cache.positions(seqs))
    keep = torch.full(score.shape[:3], config.budget + config.protect, dtype=torch.int32)
    if config.protect_prompt:
        position = cache.positions(seqs)
        ends = torch.tensor(list(prompt_lens), dtype=torch.int32).view(-1, 1, 1, 1)
        prompt = (position >= 0) & (position < ends)
        width = position.shape[-1]
        score[..., :width].masked_fill_(prompt, torch.inf)
        keep += prompt.sum(-1, dtype=torch.int32)
    rows = cache.rows(seqs)
    drop, drop_count = ops.select_slots(cache.store, rows, score, keep)
    return cache.store.evict(seqs, drop, drop_count)


def _mean_over_lanes(score: Tensor, position: Tensor) -> Tensor:
    """Give every lane of a sequence the mean score of its lanes, slot by slot.

    Lanes that always dropped the same positions hold them in the same slots.
    Source: the one kept set of R-KV's vLLM port, a mean over heads and a sum over layers.
    """
    same = bool((position == position[:, :1, :1]).all())
    require(same, "scope", "lanes that hold the same positions for 'global'", "different ones")
    lanes = score.flatten(1, 2).unbind(1)
    total = torch.zeros_like(lanes[0])
    for lane in lanes:  # in a fixed order: the sum must not depend on who is evicted together
        total += lane
    return (total / len(lanes))[:, None, None].expand(score.shape).contiguous()
