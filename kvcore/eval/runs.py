"""What a run is: a description that can be pickled, compared and written down.

Free of torch, so that what is wrong with it is said before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvcore.config import (
    EngineConfig,
    EvictionConfig,
    SearchConfig,
    check_template_args,
    require,
)
from kvcore.eval.datasets import Problem
from kvcore.eval.grading import grade_answer

if TYPE_CHECKING:
    from kvcore.eval.records import Grader

METHODS = ("full", "best-of-n", "helper", "rescue")
SCORERS = ("loglik", "random", "prm")
PrmRead = Literal["extra0", "newline_last"]
PRM_READS: tuple[PrmRead, ...] = get_args(PrmRead)


@dataclass(frozen=True)
class ScorerSpec:
    """What chooses among the candidates of a step.

    Attributes:
        kind: "loglik": likelihood under the helper with a full cache, under the base model where a
            run has no helper; "random"; "prm": a process reward model.
        path: the reward model, named like every model of a run; None for other kinds.
        read: where a reward model's score is read, a ``mode`` of ``PrmScorer``; None takes its
            default, and stands with other kinds.
    """

    kind: str
    path: str | Path | None = None
    read: PrmRead | None = None

    def __post_init__(self) -> None:
        require(self.read in (None, *PRM_READS), "prm_read", f"one of {PRM_READS}", self.read)
        ok = self.read is None or self.kind == "prm"
        require(ok, "prm_read", "nothing without a process reward model", self.read)
        require(self.kind in SCORERS, "scorer", "loglik, random or prm:DIR", self.kind)
        ok = (self.path is not None and str(self.path) != "") == (self.kind == "prm")
        require(ok, "scorer", "a model with prm, and with prm only", str(self))

    @classmethod
    def parse(cls, text: str) -> ScorerSpec:
        """``loglik``, ``random``, ``prm:DIR``, or an embedded model, ``demo:NAME``."""
        kind, separator, path = text.partition(":")
        if separator and kind == "demo":
            return cls("prm", text)
        reads = kind == "prm"
        ok = kind in SCORERS and (separator != "") == (path != "") == reads
        require(ok, "scorer", "loglik, random or prm:DIR", text)
        return cls(kind, path or None)

    def __str__(self) -> str:
        return self.kind if self.path is None else f"{self.kind}:{self.path}"


@dataclass(frozen=True)
class Run:
    """Problems, models, and how the problems are solved.

    Models are named as ``kvcore.models.load_model`` takes them. Every outcome is a function of
    these fields and of the problem alone, whatever other problems the run has.

    Attributes:
        method: "full": best-of-N of the base model with a full cache; "best-of-n": the same with
            its cache evicted; "helper": best-of-N of the helper, full cache; "rescue": KV-Rescue,
            the base model's cache evicted.
        base: None only with method "helper".
        helper: None only where the method does not need one.
        scorer: None only if a step has one candidate in all.
        eviction: of the base model; not looked at where the cache is full.
        search: whatever the method, ``detector`` is that of the run; without a helper
            ``n_helper`` is not looked at.
        engine: size of each engine. ``context_len`` is not looked at: engines take what their
            models may have to read before a solution ends.
        system_prompt: None takes the search's own.
        template_args: keywords of every chat template.
        dtype: None takes each checkpoint's.
        grade: says what a text came to; a function that can be pickled.
    """

    base: str | Path | None
    helper: str | Path | None
    scorer: ScorerSpec | None
    problems: tuple[Problem, ...]
    method: str
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    system_prompt: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    grade: Grader = grade_answer

    def __post_init__(self) -> None:
        require(self.method in METHODS, "method", f"one of {', '.join(METHODS)}", self.method)
        needed = {"helper": ("helper",), "rescue": ("base", "helper")}.get(self.method, ("base",))
        for role in needed:
            given = getattr(self, role)
            require(given is not None, role, f"a model with method {self.method!r}", given)
        require(len(self.problems) > 0, "problems", "at least one problem", self.problems)
        choices = sum(self.search.candidates(helper=self.method == "rescue"))
        ok = self.scorer is not None or choices == 1
        require(ok, "scorer", f"one that chooses among {choices} candidates", self.scorer)
        check_template_args(self.template_args)

    @property
    def evicts(self) -> bool:
        """Whether the cache of the model that solves is evicted."""
        return self.method in ("best-of-n", "rescue") and self.eviction.evicts

    @property
    def questions(self) -> tuple[str, ...]:
        return tuple(problem.question for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """What decides every outcome, as JSON values; the problems and the engines' size do not."""
        return {
            "method": self.method,
            "base": None if self.base is None else str(self.base),
            "helper": None if self.helper is None else str(self.helper),
            "scorer": None if self.scorer is None else str(self.scorer),
            "prm_read": None if self.scorer is None else self.scorer.read,
            "system_prompt": self.system_prompt,
            "template_args": dict(self.template_args),
            "dtype": self.dtype,
            "eviction": (self.eviction if self.evicts else EvictionConfig()).as_dict(),
            "search": self.search.to_json(),
        }
