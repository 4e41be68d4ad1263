"""The flags of eviction, for any command: made from the settings themselves and from the registry
of policies, so that a new setting or policy has its flags without an edit here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import typer

from kvcore.cli.errors import UsageError, bad_value_is
from kvcore.config import EvictionConfig
from kvcore.policies.cadences import CADENCES, DEFAULT_CADENCE
from kvcore.policies.registry import make_policy, own_settings, policies, readers
from kvcore.policies.settings import DEFAULT_POLICY, FULL

_SHARED = "seed"  # a policy's is the command's own


@dataclasses.dataclass(frozen=True)
class EvictionFlags:
    """What the eviction flags of a command line said.

    Attributes:
        given: values by name of the setting, of the flags that were used.
        flags: the flag of every setting.
    """

    given: Mapping[str, Any]
    flags: Mapping[str, str]

    def config(self, *, seed: int | None = None) -> EvictionConfig:
        """The settings that were asked for, checked against their policy. Loads no torch.

        Args:
            seed: of the command; a policy that draws takes it.
        Raises:
            UsageError: names the flag.
        """
        given = dict(self.given)
        chosen = given.get("policy", DEFAULT_POLICY if "budget" in given else FULL)
        if seed is not None and chosen in readers(_SHARED):
            given[_SHARED] = seed
        with bad_value_is(UsageError, **self.flags):
            config = EvictionConfig(**given)
            make_policy(config)
        return config


def with_eviction(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a typer command the flags of eviction, in place of its parameter ``eviction``, which it
    gets as ``EvictionFlags``:

        @app.command()
        @with_eviction
        def generate(eviction: EvictionFlags, seed: Annotated[int, ...] = 0, ...) -> None:
            def run() -> None:
                config = eviction.config(seed=seed)  # raises UsageError
            run_command(run, debug=debug)

    Flags: --evict, --budget and the other settings of ``EvictionConfig`` that have a help text, and
    one for every setting of every policy. A policy's setting whose flag the command has already is
    called --evict-NAME, except ``seed``, which the command hands over.
    """
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
    ]
    taken = {flag for parameter in own for flag in _flags_of(parameter)}
    options = {**_common_options(), **_policy_options(taken)}
    place = [parameter.name for parameter in own].index("eviction")
    added = [option.parameter() for option in options.values()]
    parameters = [*own[:place], *added, *own[place + 1 :]]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        asked = {name: values.pop(option.variable) for name, option in options.items()}
        given = {name: value for name, value in asked.items() if value is not None}
        flags = {name: option.flag for name, option in options.items()}
        command(**values, eviction=EvictionFlags(given, flags))

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


@dataclasses.dataclass(frozen=True)
class _Option:
    """A flag that gives None unless it is used; a bool is a switch away from ``default``."""

    flag: str
    kind: Any
    help: str
    metavar: str | None = None
    default: bool = False

    @property
    def variable(self) -> str:
        return "evict_" + self.flag.strip("-").replace("-", "_")

    def parameter(self) -> inspect.Parameter:
        switch = f"{self.flag}/--no-{self.flag[2:]}" if self.default else self.flag
        declared = switch if self.kind is bool else self.flag
        option = typer.Option(declared, metavar=self.metavar, help=self.help)
        return inspect.Parameter(
            self.variable,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[self.kind | None, option],
        )


def flag_of(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def _flags_of(parameter: inspect.Parameter) -> set[str]:
    """Flags that a parameter of a command already has."""
    found = {flag_of(parameter.name)}
    for info in getattr(parameter.annotation, "__metadata__", ()):
        declared = (getattr(info, "default", None), *(getattr(info, "param_decls", None) or ()))
        for text in declared:
            found |= set(text.split("/")) if isinstance(text, str) else set()
    return found


def _common_options() -> dict[str, _Option]:
    """Flags of the settings that all policies have in common."""
    *names, last = [*policies(), FULL]
    listed = f"{', '.join(names)} or {last}"
    help = f"Policy: {listed}; {DEFAULT_POLICY} if --budget is given, else {FULL}."
    options = {"policy": _Option("--evict", str, help, metavar="NAME")}
    kinds = {"str": str, "bool": bool, "int": int}
    for field in dataclasses.fields(EvictionConfig):
        if text := field.metadata.get("help"):
            if field.metadata.get("by_cadence"):
                text = f"{text} ({_defaults_by_cadence(field.name)})."
            kind = kinds[str(field.type).partition(" ")[0]]
            metavar = field.metadata.get("metavar")
            options[field.name] = _Option(flag_of(field.name), kind, text, metavar)
    return options


def _defaults_by_cadence(setting: str) -> str:
    """ "default 128; with sawtooth 8", or "sawtooth only, default 128"."""
    values = {name: getattr(cadence, setting) for name, cadence in CADENCES.items()}
    usual = values.pop(DEFAULT_CADENCE)
    others = [f"{name} {{}}{value}" for name, value in values.items() if value is not None]
    if usual is None:
        return ", ".join(others).format("only, default ")
    return f"default {usual}; with {', '.join(others).format('')}"


def _policy_options(taken: set[str]) -> dict[str, _Option]:
    """Flags of the settings that policies have of their own."""
    fields: dict[str, dict[str, dataclasses.Field[Any]]] = {}  # by setting, then by its readers
    for policy in policies().values():
        for name, field in own_settings(policy).items():
            fields.setdefault(name, {})[policy.name] = field
    options: dict[str, _Option] = {}
    for name, read in fields.items():
        first, flag = next(iter(read.values())), flag_of(name)
        kind = type(first.default)
        if (name == _SHARED and flag in taken) or kind not in (bool, int, float, str):
            continue  # the command's own, or for Python alone
        default = f" (default {first.default}"
        default += "".join(
            f"; {reader} {field.default}"
            for reader, field in read.items()
            if field.default != first.default
        )
        help = f"{', '.join(read)}: {first.metadata.get('help', name)}"
        help += "." if kind is bool else f"{default})."
        flag = f"--evict-{flag[2:]}" if flag in taken else flag
        options[name] = _Option(flag, kind, help, default=first.default is True)
    return options
