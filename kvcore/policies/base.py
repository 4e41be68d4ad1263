"""What an eviction policy is: a name, settings of its own, what it needs of the cache, a score.

Free of torch, like every module that defines a policy: settings are checked before it is loaded.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvcore.checks import INT32_MAX, require, require_bool, require_int, require_number

if TYPE_CHECKING:
    from torch import Tensor

    from kvcore.cache import CacheShape, KVCache, Plane
    from kvcore.policies.settings import EvictionConfig


def setting(default: Any, help: str, **limits: Any) -> Any:
    """A field of a policy's settings class.

    Args:
        default: its type is the setting's: bool, int or float.
        help: one line, which becomes the help text of the flag.
        limits: of an int or a float, ``low`` and ``high``: its ends, both allowed.
    """
    return dataclasses.field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class PolicySettings:
    """Settings that a policy reads, and nobody else. This one has none; others derive from it, as
    frozen dataclasses whose fields are ``setting(...)``.

    Each field is a keyword of ``EvictionConfig`` with that policy, and a flag of the command line.
    Raises:
        ValueError: a value of another type, or outside its limits; names the field.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, low = getattr(self, field.name), field.metadata.get("low")
            high = field.metadata.get("high")
            if isinstance(field.default, bool):
                require_bool(value, field.name)
            elif isinstance(field.default, int):
                low = -INT32_MAX - 1 if low is None else low
                require_int(value, field.name, low, INT32_MAX if high is None else high)
            elif isinstance(field.default, float):
                low = -math.inf if low is None else low
                require_number(value, field.name, low, math.inf if high is None else high)


@dataclass(frozen=True)
class FusedRKV:
    """R-KV's score, which attention itself can keep up to date in the lanes that it passes.

    Attributes:
        protect, kernel, mix, threshold: as in ``EvictionConfig``.
    """

    protect: int
    kernel: int
    mix: float
    threshold: float


@dataclass(frozen=True)
class Needs:
    """What a policy needs of the cache.

    Attributes:
        window: newest queries that are kept per query head; at most ``protect``, for an older query
            has not seen all of the entries that it would score.
        attention: what every slot adds up of the attention that it gets (``KVCache``).
        fused: the score, if attention can keep it; a cadence that cannot use it scores directly.
        planes: numbers of its own that the cache keeps of every slot.
    """

    window: int = 0
    attention: Literal["sum", "per_head"] | None = None
    fused: FusedRKV | None = None
    planes: tuple[Plane, ...] = ()


class Policy(ABC):
    """Scores cached slots; choosing, evicting and freeing are common code (``Evictor``).

    Attributes:
        name: as given to ``EvictionConfig``.
        summary: what it keeps, in one line.
        settings_type: frozen dataclass of the settings that it reads.
        order: place among the names, the smallest first.
        config: what was asked for; ``config.settings`` is a ``settings_type``.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    settings_type: ClassVar[type[Any]] = PolicySettings
    order: ClassVar[int] = 100

    def __init__(self, config: EvictionConfig) -> None:
        """Raises ``ValueError``: settings that this policy cannot work with."""
        self.config = config
        self.settings: Any = config.settings

    @property
    def protect(self) -> int:
        """Newest entries, which are not scored."""
        assert self.config.protect is not None
        return self.config.protect

    def needs(self, shape: CacheShape) -> Needs:
        """What the cache must provide for it; nothing besides keys, values and positions unless
        overridden.
        """
        return Needs()

    @abstractmethod
    def score(self, cache: KVCache, seqs: Sequence[int]) -> Tensor:
        """Score every live slot of these sequences; higher is kept.

        Returns:
            f32 [seqs, layers, kv_heads, slots]: +inf for the ``protect`` newest slots, -inf past a
            lane's end. slots is at least the longest lane.
        Raises:
            ValueError: the cache holds keys that are not finite.
        """


def check_window(config: EvictionConfig, window: int) -> None:
    """Raises ``ValueError`` if queries were older than entries that they score."""
    assert config.protect is not None
    expected = f"at most protect ({config.protect}) with policy {config.policy!r}"
    require(window <= config.protect, "window", expected, window)


def spare_newest(score: Tensor, position: Tensor, protect: int) -> Tensor:
    """``score`` [..., slots] with +inf for the ``protect`` newest of ``position`` and -inf past a
    lane's end, where positions are negative. Changes it in place.
    """
    count = min(protect, position.shape[-1])
    newest = position.topk(count, dim=-1).values[..., -1:]
    score[position >= newest] = math.inf
    score[position < 0] = -math.inf  # which short lanes count among their newest
    return score
