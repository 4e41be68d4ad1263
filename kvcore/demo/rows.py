"""The demo's comparison: four ways to solve the same problems, with the same models and scorer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvcore.config import EvictionConfig, SearchConfig, require, require_int
from kvcore.demo.settings import engine_config, eviction_config, search_config
from kvcore.demo.task import Problem, problems
from kvcore.demo.weights import model_directory
from kvcore.engine import Engine
from kvcore.models import LoadedModel, load_model, load_prm
from kvcore.policies import available, make_policy
from kvcore.search import PrmScorer, Prompt, Search, Solution, TraceEvent, best_of_n_config

TITLES = {
    "full": "base, full KV",
    "evicted": "base, evicted",
    "helper": "helper alone",
    "rescue": "KV-Rescue",
}
METHODS = tuple(TITLES)


@dataclass(frozen=True)
class Models:
    """The three embedded models."""

    base: LoadedModel
    helper: LoadedModel
    prm: LoadedModel


def load_models(root: Path | None = None) -> Models:
    """The embedded models, computing in fp32. Raises DamagedWeights if a file is not whole."""
    base, helper = (
        load_model(model_directory(name, root), dtype="float32", argument="demo")
        for name in ("base", "helper")
    )
    prm = load_prm(model_directory("prm", root), dtype="float32", argument="demo")
    return Models(base, helper, prm)


@dataclass(frozen=True)
class Settings:
    """What is compared.

    Attributes:
        budget: scored entries that the base model keeps per lane.
        n: candidates per step, of each model.
        policy: what is evicted.
        problems: how many held-out problems every row solves.
        seed: of problems and sampling.
        split: the set of the problems.
    Raises:
        ValueError: a value that cannot be; names the field.
    """

    budget: int
    n: int
    policy: str
    problems: int
    seed: int
    split: str = "test"

    def __post_init__(self) -> None:
        require_int(self.problems, "problems", 1)
        require_int(self.n, "n", 1)
        require_int(self.seed, "seed", 0, 2**63 - 1)
        names = [name for name in available() if name != "full"]
        require(self.policy in names, "policy", f"one of {', '.join(names)}", self.policy)
        make_policy(eviction_config(self.policy, self.budget))

    def draw(self) -> list[Problem]:
        return list(islice(problems(self.split, self.seed), self.problems))


@dataclass(frozen=True)
class Row:
    """What one method came to.

    Attributes:
        right: for each problem, whether its answer is right.
        base_tokens, helper_tokens: generated, lost candidates included.
        steps: committed, over all problems; ``helper_steps`` of them came from the helper.
        aborted: candidates ended by the detector.
        unended: problems that reached a limit before an answer: runaway solutions.
        kv_bytes: keys and values of one base sequence at its peak, mean over the problems.
        seconds: wall time without loading.
    """

    method: str
    right: tuple[bool, ...]
    base_tokens: int
    helper_tokens: int
    steps: int
    helper_steps: int
    aborted: int
    unended: int
    kv_bytes: float
    seconds: float

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def mean_steps(self) -> float:
        return self.steps / len(self.right)

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "accuracy": self.accuracy,
            "base_tokens": self.base_tokens,
            "helper_tokens": self.helper_tokens,
            "steps": self.mean_steps,
            "helper_steps": self.helper_steps / len(self.right),
            "aborted": self.aborted,
            "unended": self.unended,
            "kv_bytes": self.kv_bytes,
            "seconds": self.seconds,
        }


def recovered(rows: Sequence[Row]) -> float | None:
    """(A_kvr - A_evict) / (A_full - A_evict); None if eviction lost nothing or a row is missing."""
    accuracy = {row.method: row.accuracy for row in rows}
    if not {"full", "evicted", "rescue"} <= accuracy.keys():
        return None
    lost = accuracy["full"] - accuracy["evicted"]
    return (accuracy["rescue"] - accuracy["evicted"]) / lost if lost > 0 else None


def make_search(
    method: str,
    models: Models,
    settings: Settings,
    chosen: Sequence[Problem],
    *,
    config: SearchConfig | None = None,
    on_event: Callable[[TraceEvent], None] | None = None,
) -> Search:
    """The search of one row.

    Args:
        config: replaces the demo's own search settings (for ablations).
    """
    require(method in METHODS, "method", f"one of {', '.join(METHODS)}", method)
    config = config or search_config(settings.n, settings.seed)
    if method != "rescue":
        config = best_of_n_config(config)
    elif config.n_helper is None:
        config = replace(config, n_helper=settings.n)
    evicts = method in ("evicted", "rescue")
    eviction = eviction_config(settings.policy, settings.budget) if evicts else EvictionConfig()
    base = models.helper if method == "helper" else models.base
    return Search(
        Engine(base, engine_config(), eviction=eviction, detector=config.detector),
        [Prompt(problem.question) for problem in chosen],
        helper=Engine(models.helper, engine_config()) if method == "rescue" else None,
        scorer=PrmScorer(Engine(models.prm, engine_config())),
        config=config,
        on_event=on_event,
    )


def run_row(
    method: str,
    models: Models,
    settings: Settings,
    chosen: Sequence[Problem],
    *,
    config: SearchConfig | None = None,
    on_event: Callable[[TraceEvent], None] | None = None,
) -> tuple[Row, list[Solution]]:
    """Solves ``chosen`` one way. Returns the row and the solutions in the order of the problems.

    Raises:
        RuntimeError: a problem could not be solved for a reason other than the models.
    """
    search = make_search(method, models, settings, chosen, config=config, on_event=on_event)
    begin = time.monotonic()
    solutions = sorted(search.run(), key=lambda solution: solution.problem)
    seconds = time.monotonic() - begin
    failed = [solution for solution in solutions if solution.error is not None]
    if failed:
        raise RuntimeError(f"{method}: problem {failed[0].problem}: {failed[0].error}")
    return summarize(method, chosen, solutions, seconds), solutions


def summarize(
    method: str, chosen: Sequence[Problem], solutions: Sequence[Solution], seconds: float
) -> Row:
    """A row of solutions that stand in the order of their problems."""
    own = sum(s.tokens.base.generated for s in solutions)
    alone = method == "helper"
    sources = [step.source for s in solutions for step in s.steps]
    return Row(
        method=method,
        right=tuple(p.is_solved_by(s.text) for p, s in zip(chosen, solutions, strict=True)),
        base_tokens=0 if alone else own,
        helper_tokens=own if alone else sum(s.tokens.helper.generated for s in solutions),
        steps=len(sources),
        helper_steps=len(sources) if alone else sources.count("helper"),
        aborted=sum(s.aborted.total for s in solutions),
        unended=sum(s.finish != "eos" for s in solutions),
        kv_bytes=sum(s.kv_bytes.peak for s in solutions) / len(solutions),
        seconds=seconds,
    )
