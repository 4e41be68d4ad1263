"""Which policies there are: one for each module of this package that defines one, and those that
other distributions announce under the entry point group ``kvcore.policies``. Free of torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kvcore.policies
from kvcore.policies.base import Policy

if TYPE_CHECKING:
    from kvcore.policies.settings import EvictionConfig

FULL = "full"  # keeps everything
GROUP = "kvcore.policies"
# Modules of the package that define no policy.
_COMMON = frozenset(("base", "cadences", "evictor", "registry", "selection", "settings"))


@dataclass(frozen=True)
class PluginFailure:
    """A policy of another distribution that cannot be used.

    Attributes:
        name: of its entry point.
        source: where it should come from: module and distribution.
        error: why it cannot be used.
    """

    name: str
    source: str
    error: str

    def __str__(self) -> str:
        return f"{self.name} ({self.source}): {self.error}"


def policies() -> dict[str, type[Policy]]:
    """The classes of all policies that can be used, by name; those of kvcore come first."""
    found = [*_built_in().values(), *_plugins()[0].values()]
    return {p.name: p for p in sorted(found, key=lambda p: (p.order, p.name))}


def available() -> tuple[str, ...]:
    """Names that ``EvictionConfig`` takes for a policy; "full" keeps everything."""
    return (FULL, *policies())


def failures() -> tuple[PluginFailure, ...]:
    """What other distributions announce and cannot be used; the others work all the same."""
    return _plugins()[1]


def find(name: str) -> type[Policy]:
    """The class of a policy.

    Raises:
        ValueError: no policy has that name, or it is another distribution's that cannot be used:
            the message says why.
    """
    if name in _built_in():
        return _built_in()[name]
    plugins, failed = _plugins()
    if name in plugins:
        return plugins[name]
    why = "".join(f"; {failure}" for failure in failed if failure.name == name)
    raise ValueError(f"policy: expected one of {', '.join(available())}, got {name!r}{why}")


def readers(setting: str) -> tuple[str, ...]:
    """Names of the policies that read a setting of their own of that name."""
    return tuple(name for name, policy in policies().items() if setting in own_settings(policy))


def own_settings(policy: type[Policy]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a policy's settings class, by name."""
    return {field.name: field for field in dataclasses.fields(policy.settings_type)}


def make_policy(config: EvictionConfig) -> Policy | None:
    """The policy that ``config`` names; None for "full".

    Raises:
        ValueError: it cannot work with these settings.
    """
    return find(config.policy)(config) if config.evicts else None


@functools.cache
def _built_in() -> dict[str, type[Policy]]:
    found: dict[str, type[Policy]] = {}
    for module in pkgutil.iter_modules(kvcore.policies.__path__):
        if module.name in _COMMON:
            continue
        loaded = importlib.import_module(f"{kvcore.policies.__name__}.{module.name}")
        for value in vars(loaded).values():
            if _is_policy(value) and value.__module__ == loaded.__name__:
                assert value.name not in found, f"two policies of the name {value.name}"
                found[value.name] = value
    return found


def _is_policy(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Policy) and not inspect.isabstract(value)


def _plugins() -> tuple[dict[str, type[Policy]], tuple[PluginFailure, ...]]:
    """Policies of other distributions, by name, and those that cannot be used."""
    found: dict[str, type[Policy]] = {}
    failed: list[PluginFailure] = []
    try:
        points = list(importlib.metadata.entry_points(group=GROUP))
    except Exception as error:  # some distribution's metadata cannot be read
        return {}, (PluginFailure("*", f"entry points {GROUP}", _told(error)),)
    sources: dict[str, list[str]] = {name: [_source(p)] for name, p in _built_in().items()}
    for point in points:
        sources.setdefault(point.name, []).append(_source(point))
    for point in points:
        others = [source for source in sources[point.name] if source != _source(point)]
        loaded: type[Policy] | str
        if point.name == FULL:
            loaded = f"name: expected another, {FULL!r} evicts nothing"
        elif others:
            loaded = f"name: expected another, this is also that of {', '.join(others)}"
        else:
            loaded = _load(point)
        if isinstance(loaded, str):
            failed.append(PluginFailure(point.name, _source(point), loaded))
        else:
            found[point.name] = loaded
    return found, tuple(failed)


def _source(where: type[Policy] | importlib.metadata.EntryPoint) -> str:
    if isinstance(where, importlib.metadata.EntryPoint):
        dist = "unknown distribution" if where.dist is None else where.dist.name
        return f"{where.value} of {dist}"
    return f"{where.__module__}:{where.__qualname__} of kvcore"


@functools.cache
def _load(point: importlib.metadata.EntryPoint) -> type[Policy] | str:
    """The class behind an entry point, or why it cannot be used."""
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        return _told(error)
    if not _is_policy(loaded):
        return f"expected a subclass of kvcore.policies.Policy with a score, got {loaded!r}"
    policy: type[Policy] = loaded
    name = getattr(policy, "name", None)
    if name != point.name:
        return f"name: expected {point.name!r}, as its entry point says, got {name!r}"
    kind = policy.settings_type
    if not (dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        return f"settings_type: expected a frozen dataclass, got {kind!r}"
    return _bad_setting(policy) or policy


def _bad_setting(policy: type[Policy]) -> str | None:
    """Why a settings class cannot stand beside the common settings and those of kvcore."""
    from kvcore.policies.settings import EvictionConfig

    common = {field.name for field in dataclasses.fields(EvictionConfig)}
    for name, field in own_settings(policy).items():
        if name in common:
            return f"setting {name!r}: expected another name, that one is common to all policies"
        if field.default is dataclasses.MISSING:
            return f"setting {name!r}: expected a default"
        for other in _built_in().values():
            theirs = own_settings(other).get(name)
            if theirs is not None and type(theirs.default) is not type(field.default):
                kind = type(theirs.default).__name__
                return f"setting {name!r}: expected one of type {kind}, as {other.name!r} has it"
    return None


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
