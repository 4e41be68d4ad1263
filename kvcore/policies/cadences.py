"""When lanes let go of entries, and how: one class for each cadence. Free of torch.

A cadence decides; ``Evictor``, which it is given, drops and elects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvcore.checks import INT32_MAX, require, require_int

if TYPE_CHECKING:
    from kvcore.policies.evictor import Evictor
    from kvcore.policies.settings import EvictionConfig


class Cadence(ABC):
    """When and how eviction happens.

    Attributes:
        name: as given to ``EvictionConfig``.
        protect, headroom: its defaults; a headroom of None means that it reads none.
        growth: the setting by which a lane outgrows ``budget`` before it lets go.
        overwrites: tokens may take the place of entries, so the cache keeps which they are.
    """

    name: ClassVar[str]
    protect: ClassVar[int]
    headroom: ClassVar[int | None]
    growth: ClassVar[str]
    overwrites: ClassVar[bool]

    @abstractmethod
    def check(self, config: EvictionConfig) -> None:
        """Raises ``ValueError``: settings that do not go with this cadence."""

    def trigger(self, config: EvictionConfig) -> int:
        """Mean length of a sequence's lanes, in slots, at which they let go."""
        return config.kept + int(getattr(config, self.growth))

    @abstractmethod
    def is_due(self, evictor: Evictor, handle: int, prompt_len: int) -> bool:
        """Whether this sequence, of which a piece has just been fed, has something to let go."""

    @abstractmethod
    def settle(self, evictor: Evictor, handles: Sequence[int], prompt_lens: Sequence[int]) -> int:
        """Evict from sequences that are due; returns slots dropped, summed over lanes."""


class Sawtooth(Cadence):
    """Lanes grow to ``budget + headroom`` slots and then drop to ``budget + protect`` at once."""

    name = "sawtooth"
    protect = 8
    headroom = 128
    growth = "headroom"
    overwrites = False

    def check(self, config: EvictionConfig) -> None:
        require_int(config.headroom, "headroom", 1, INT32_MAX)
        assert config.headroom is not None and config.protect is not None
        expected = f"more than protect ({config.protect})"
        require(config.headroom > config.protect, "headroom", expected, config.headroom)

    def is_due(self, evictor: Evictor, handle: int, prompt_len: int) -> bool:
        bound = self.trigger(evictor.config)
        if evictor.config.protect_prompt:
            bound += prompt_len
        return evictor.cache.store.total_slots(handle) >= bound * evictor.cache.shape.lanes

    def settle(self, evictor: Evictor, handles: Sequence[int], prompt_lens: Sequence[int]) -> int:
        return evictor.drop(handles, prompt_lens)


class Steady(Cadence):
    """Lanes grow to ``budget + protect`` slots; from then on every token takes the place of the
    entry with the lowest score, and nothing moves. A longer piece is appended and what is too much
    goes at once.
    """

    name = "steady"
    protect = 128
    headroom = None
    growth = "protect"
    overwrites = True

    def check(self, config: EvictionConfig) -> None:
        expected = "None with cadence 'steady', whose lanes grow by protect"
        require(config.headroom is None, "headroom", expected, config.headroom)
        expected = "'sawtooth' with adaptive head budgets"
        require(config.head_budgets == "uniform", "cadence", expected, self.name)

    def is_due(self, evictor: Evictor, handle: int, prompt_len: int) -> bool:
        return evictor.cache.store.max_lane_len(handle) >= min(evictor.limits)

    def settle(self, evictor: Evictor, handles: Sequence[int], prompt_lens: Sequence[int]) -> int:
        return evictor.exchange(handles, prompt_lens)


CADENCES = {cadence.name: cadence for cadence in (Sawtooth(), Steady())}
DEFAULT_CADENCE = Steady.name
