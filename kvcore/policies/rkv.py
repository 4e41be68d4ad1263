"""R-KV: attention from the last queries against redundancy among keys (arXiv 2505.24133)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcore.checks import require
from kvcore.policies.base import (
    FusedRKV,
    Needs,
    Policy,
    PolicySettings,
    check_window,
    setting,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kvcore.cache import CacheShape, KVCache
    from kvcore.policies.settings import EvictionConfig


@dataclass(frozen=True)
class QuerySettings(PolicySettings):
    """How the attention of recent queries becomes a score.

    Attributes:
        window: observation queries (R-KV's alpha); at most ``protect``.
        kernel: width of the max-pool over neighbours, odd.
        pool_first: pool the attention of each query before the mean over queries, as in R-KV's
            eq. 4, instead of after it, as in its released code.
    """

    window: int = setting(8, "recent queries that vote, at most --protect", low=1)
    kernel: int = setting(7, "width of the max-pool over neighbours, odd", low=1)
    pool_first: bool = setting(False, "pool each query's attention before their mean")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.kernel % 2 == 1, "kernel", "an odd integer", self.kernel)


@dataclass(frozen=True)
class RKVSettings(QuerySettings):
    """As ``QuerySettings``, and how redundancy counts.

    Attributes:
        mix: R-KV's lambda, weight of attention; redundancy gets 1 - mix.
        threshold: cosine similarity above which keys count as similar.
    """

    mix: float = setting(0.1, "weight of attention; redundancy gets the rest", low=0, high=1)
    threshold: float = setting(0.5, "cosine above which keys count as similar", low=-1, high=1)


class RKV(Policy):
    """Exact R-KV as released, in float and per lane, with neighbours taken by position."""

    name = "rkv"
    summary = "what recent queries attend to and other keys do not repeat (R-KV)"
    settings_type: ClassVar[type[QuerySettings]] = RKVSettings
    order = 0

    def __init__(self, config: EvictionConfig) -> None:
        super().__init__(config)
        check_window(config, self.settings.window)

    @property
    def redundancy(self) -> tuple[float, float]:
        """Mix and threshold."""
        return self.settings.mix, self.settings.threshold

    def needs(self, shape: CacheShape) -> Needs:
        """The fused form is the exact one and nothing besides it."""
        mix, threshold = self.redundancy
        fused = None
        if threshold >= 0 and not self.settings.pool_first:
            fused = FusedRKV(self.protect, self.settings.kernel, mix, threshold)
        return Needs(window=self.settings.window, fused=fused)

    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        mix, threshold = self.redundancy
        return cache.score_rkv(
            seqs,
            protect=self.protect,
            kernel=self.settings.kernel,
            mix=mix,
            threshold=threshold,
            pool_first=self.settings.pool_first,
        )
