"""What is asked of eviction: policy, sizes, cadence, the policy's own settings. Free of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.checks import (
    INT32_MAX,
    is_number,
    require,
    require_bool,
    require_int,
    require_one_of,
)
from kvcore.policies import registry
from kvcore.policies.cadences import CADENCES, DEFAULT_CADENCE, Cadence

DEFAULT_POLICY = "rkv"
FULL = registry.FULL
_UNSET: Any = ...  # stands in signatures for "the default of what else was chosen"


class UnknownSetting(TypeError, ValueError):
    """A keyword that no policy reads: to Python no such argument, to a reader no such setting."""


def _flag(help: str, **more: Any) -> Any:
    """A field that is a flag of the command line, with this text."""
    return field(metadata={"help": help, **more})


@dataclass(frozen=True, init=False, repr=False)
class EvictionConfig:
    """What each lane keeps: ``budget`` scored entries and the ``protect`` newest, never scored.

    In the "steady" cadence a lane grows to ``budget + protect`` slots; from then on every new token
    takes the place of the entry with the lowest score. In the "sawtooth" cadence a lane grows to
    ``budget + headroom`` slots, then drops all but ``budget + protect``, after the forward that
    filled it. ``released`` makes the setting in which R-KV was released.

    ``EvictionConfig(budget=128)`` means R-KV, ``EvictionConfig()`` evicts nothing (policy "full").
    Settings of the policy are keywords and attributes like the others, for instance
    ``EvictionConfig("rkv", budget=128, mix=0.2).mix``; ``kvcore.policies.policies()`` has the
    classes that list them. Immutable, hashable, for ``dataclasses.replace``, and made for records:
    ``EvictionConfig.from_dict(config.as_dict()) == config``.

    Attributes:
        policy: a name of ``kvcore.policies.available()``; "full" never evicts.
        budget: B, scored entries kept per lane; required unless policy is "full".
        protect: newest entries never scored; 128, in the sawtooth 8.
        cadence: "steady" or "sawtooth".
        headroom: slots above ``budget`` at which eviction fires; sawtooth only, 128.
        protect_prompt: keep the prompt besides ``budget``.
        scope: "lane": each lane keeps its own best; "global": all lanes of a sequence keep the
            same positions, by the mean of their scores.
        layer_budgets: B of every layer, in place of ``budget``, which then is their mean (see
            ``pyramid_budgets``).
        head_budgets: "uniform": every kv head of a layer keeps B; "adaptive": they share their B by
            score at every eviction (AdaKV, arXiv 2407.11550); sawtooth only.
        settings: of the policy, an instance of its ``settings_type``; None with "full", where
            ``protect``, ``cadence`` and ``headroom`` are None as well.
    Raises:
        ValueError: a value that cannot be, or one that nothing would read: it names the setting,
            what was expected and what came.
    Source: R-KV defaults; KV-Rescue, experiment setup (lambda 0.1).
    """

    policy: str
    budget: int | None = _flag("Scored entries kept per lane.")
    protect: int | None = _flag("Newest entries kept besides, never scored", by_cadence=True)
    cadence: str | None = _flag(
        "Exchange one entry for every token, or drop many when a cache has grown "
        f"(default {DEFAULT_CADENCE}).",
        metavar="|".join(CADENCES),
    )
    headroom: int | None = _flag("Eviction fires at budget + headroom entries", by_cadence=True)
    protect_prompt: bool = _flag("Keep the prompt besides the budget.")
    scope: str = _flag(
        "Each layer and head keeps its own best, or all keep the same tokens (default lane).",
        metavar="lane|global",
    )
    layer_budgets: tuple[int, ...] | None = field(default=None)
    head_budgets: str = _flag(
        "Heads keep the same number, or share their layer's by score (default uniform).",
        metavar="uniform|adaptive",
    )
    settings: Any = field(default=None)

    def __init__(
        self,
        policy: str = _UNSET,
        budget: int | None = None,
        *,
        protect: int | None = _UNSET,
        cadence: str | None = _UNSET,
        headroom: int | None = _UNSET,
        protect_prompt: bool = False,
        scope: str = "lane",
        layer_budgets: tuple[int, ...] | None = None,
        head_budgets: str = "uniform",
        settings: Any = None,
        **of_policy: Any,
    ) -> None:
        if policy is _UNSET:
            policy = FULL if budget is None else DEFAULT_POLICY
        require(isinstance(policy, str) and policy != "", "policy", "a name", policy)
        how = {"protect": protect, "cadence": cadence, "headroom": headroom}
        if set(how.values()) == {None}:  # replacing fields of a "full" one
            how = dict.fromkeys(how, _UNSET)
        put = {
            "policy": policy,
            "budget": budget,
            **how,
            "protect_prompt": protect_prompt,
            "scope": scope,
            "layer_budgets": layer_budgets,
            "head_budgets": head_budgets,
            "settings": settings,
        }
        if policy == FULL:
            _check_full(put, of_policy)
            put |= dict.fromkeys(how)
        else:
            put["settings"] = _own_settings(policy, settings, of_policy)
            _fill_in(put)
        for name, value in put.items():
            object.__setattr__(self, name, value)
        if self.evicts:
            self._check()

    @classmethod
    def released(cls, budget: int, policy: str = DEFAULT_POLICY, **settings: Any) -> EvictionConfig:
        """The setting in which the papers' code was released: sawtooth, protect 8, headroom 128.

        ``settings`` are further keywords of the class, and go before these.
        """
        released = {"cadence": "sawtooth", "protect": 8, "headroom": 128}
        return cls(policy, budget, **{**released, **settings})

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> EvictionConfig:
        """Of what ``as_dict`` or ``dataclasses.asdict`` gave, also by way of JSON.

        Raises:
            ValueError: as the class.
        """
        fields = dict(record)
        fields |= fields.pop("settings", None) or {}
        if fields.get("layer_budgets") is not None:
            fields["layer_budgets"] = tuple(fields["layer_budgets"])
        return cls(**fields)

    def as_dict(self) -> dict[str, Any]:
        """All settings by name, those of the policy among them, as values that JSON has."""
        common = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        own = common.pop("settings")
        if self.layer_budgets is not None:
            common["layer_budgets"] = list(self.layer_budgets)
        return common | ({} if own is None else dataclasses.asdict(own))

    def __repr__(self) -> str:
        """The call that makes it, without what is a default."""
        if not self.evicts:
            return "EvictionConfig()"
        cadence = self._cadence
        default = {
            "protect": cadence.protect,
            "cadence": DEFAULT_CADENCE,
            "headroom": cadence.headroom,
            "protect_prompt": False,
            "scope": "lane",
            "layer_budgets": None,
            "head_budgets": "uniform",
            **{f.name: f.default for f in dataclasses.fields(self.settings)},
        }
        given = [f"{self.policy!r}, budget={self.budget}"]
        given += [f"{n}={getattr(self, n)!r}" for n in default if getattr(self, n) != default[n]]
        return f"EvictionConfig({', '.join(given)})"

    def __getattr__(self, name: str) -> Any:
        """A setting of the policy."""
        own = self.__dict__.get("settings")
        if not name.startswith("_") and own is not None and name in _names(own):
            return getattr(own, name)
        policy = self.__dict__.get("policy")
        raise AttributeError(f"{name}: no setting of eviction with policy {policy!r}")

    @property
    def evicts(self) -> bool:
        """Whether anything is ever evicted: False with policy "full"."""
        return self.policy != FULL

    @property
    def is_steady(self) -> bool:
        """Whether every new token takes the place of an entry, once a lane is full."""
        return self.cadence == "steady"

    @property
    def kept(self) -> int:
        """``budget`` as a number; REQUIRES a policy that evicts."""
        assert self.budget is not None
        return self.budget

    @property
    def trigger(self) -> int:
        """Mean length of a sequence's lanes, in slots, at which eviction fires; REQUIRES a policy
        that evicts. With the steady cadence this is the longest that lanes stay.
        """
        return self._cadence.trigger(self)

    @property
    def growth(self) -> str:
        """The setting that makes up ``trigger`` with ``budget``; REQUIRES a policy that evicts."""
        return self._cadence.growth

    def budgets(self, layers: int) -> tuple[int, ...]:
        """B of each layer; REQUIRES a policy that evicts.

        Raises:
            ValueError: ``layer_budgets`` is for another number of layers.
        """
        if self.layer_budgets is None:
            return (self.kept,) * layers
        ok = len(self.layer_budgets) == layers
        require(ok, "layer_budgets", f"one for each of {layers} layers", self.layer_budgets)
        return self.layer_budgets

    @property
    def _cadence(self) -> Cadence:
        assert self.cadence is not None
        return CADENCES[self.cadence]

    def _check(self) -> None:
        require(self.budget is not None, "budget", f"an integer with policy {self.policy!r}", None)
        require_int(self.budget, "budget", 1, INT32_MAX)
        require_int(self.protect, "protect", 1, INT32_MAX)
        require_bool(self.protect_prompt, "protect_prompt")
        require_one_of(self.scope, "scope", ("lane", "global"))
        require_one_of(self.head_budgets, "head_budgets", ("uniform", "adaptive"))
        self._cadence.check(self)
        if self.layer_budgets is not None:
            self._check_layer_budgets(self.layer_budgets)
        if self.head_budgets == "adaptive":
            require(self.scope == "lane", "scope", "'lane' with adaptive head budgets", self.scope)

    def _check_layer_budgets(self, budgets: tuple[int, ...]) -> None:
        require(isinstance(budgets, tuple), "layer_budgets", "a tuple", budgets)
        for layer, budget in enumerate(budgets):
            require_int(budget, f"layer_budgets[{layer}]", 1, INT32_MAX)
        mean = sum(budgets) / max(1, len(budgets))
        expected = f"a mean of budget ({self.budget})"
        require(abs(mean - self.kept) < 1, "layer_budgets", expected, budgets)
        require(self.scope == "lane", "scope", "'lane' with layer_budgets", self.scope)


def eviction_notice(config: EvictionConfig, fired: int) -> str | None:
    """A line when eviction was asked for and fired 0 times, else None: it must not stay silent."""
    if not config.evicts or fired:
        return None
    return (
        f"eviction was asked for ({config.policy}, budget {config.budget}) and never fired: no "
        f"cache reached {config.trigger} entries (budget + {config.growth})"
        f"{' besides the prompt' if config.protect_prompt else ''}"
    )


def _check_full(put: Mapping[str, Any], of_policy: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if anything was asked for besides "full"."""
    require(put["budget"] is None, "budget", f"None with policy {FULL!r}", put["budget"])
    expected = f"only with a policy that evicts (not {FULL!r})"
    for name, value in of_policy.items():
        _known(name, registry.readers(name))
        require(False, name, expected, value)
    default = {"policy": FULL, "protect_prompt": False, "scope": "lane", "head_budgets": "uniform"}
    for name, value in put.items():
        require(value in (None, _UNSET, default.get(name)), name, expected, value)


def _own_settings(policy: str, settings: Any, given: Mapping[str, Any]) -> Any:
    """Settings of ``policy``: ``settings`` or its defaults, changed by ``given``.

    Raises:
        ValueError: it reads no such setting, or cannot have that value.
    """
    kind = registry.find(policy).settings_type
    if settings is None:
        settings = kind()
    expected = f"a {kind.__name__} with policy {policy!r}"
    require(type(settings) is kind, "settings", expected, settings)
    own = _names(settings)
    for name, value in given.items():
        if name not in own:
            _known(name, registry.readers(name))
            reads = f"which reads {', '.join(own)}" if own else "which reads no settings of its own"
            require(False, name, f"nothing with policy {policy!r}, {reads}", value)
    return dataclasses.replace(settings, **given)


def _known(name: str, readers: tuple[str, ...]) -> None:
    """Raises ``UnknownSetting`` for a name that nobody reads."""
    if not readers:
        raise UnknownSetting(f"{name}: no setting of eviction, nor of any policy")


def _names(settings: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(settings))


def _fill_in(put: dict[str, Any]) -> None:
    """Puts the cadence's defaults where nothing was given.

    Raises:
        ValueError: no such cadence.
    """
    if put["cadence"] is _UNSET:
        put["cadence"] = DEFAULT_CADENCE
    require_one_of(put["cadence"], "cadence", tuple(CADENCES))
    cadence = CADENCES[put["cadence"]]
    for name in ("protect", "headroom"):
        if put[name] is _UNSET:
            put[name] = getattr(cadence, name)


def pyramid_budgets(budget: int, layers: int, steepness: float = 20.0) -> tuple[int, ...]:
    """Budgets that fall evenly from the first layer to the last, with mean ``budget``.

    Args:
        steepness: the last layer gets ``budget / steepness``; the first gets as much more than
            ``budget`` as the last gets less.
    Source: PyramidKV (arXiv 2406.02069), whose beta this is.
    Raises:
        ValueError: a value that cannot be.
    """
    require_int(budget, "budget", 1)
    require_int(layers, "layers", 1)
    require(is_number(steepness) and steepness >= 1, "steepness", "a number >= 1", steepness)
    last = budget / steepness
    first = 2 * budget - last
    step = (first - last) / max(1, layers - 1)
    exact = [first - step * layer for layer in range(layers)] if layers > 1 else [float(budget)]
    budgets = [max(1, math.floor(x)) for x in exact]
    for layer in range(max(0, budget * layers - sum(budgets))):  # what rounding took
        budgets[layer % layers] += 1
    return tuple(budgets)
