"""The demo's comparison: ways to solve the same problems, with the same models and scorer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvcore.config import SearchConfig, require, require_int
from kvcore.demo.settings import engine_config, eviction_config, search_config
from kvcore.demo.task import Problem, parse_problem, problems
from kvcore.demo.weights import model_directory
from kvcore.eval import Grade, Run, ScorerSpec
from kvcore.eval import Problem as Question
from kvcore.eval.records import Record, early_exit_share
from kvcore.eval.solving import Models as Loaded
from kvcore.eval.solving import Solving, make_engines
from kvcore.policies import available, make_policy
from kvcore.search import TraceEvent, best_of_n_config

TITLES = {
    "full": "base, full KV",
    "evicted": "base, evicted",
    "helper": "helper alone",
    "rescue": "KV-Rescue",
    "rescue_half": "KV-Rescue",
}
METHODS = tuple(TITLES)
_RUNS = {"evicted": "best-of-n", "rescue_half": "rescue"}  # where a run calls it otherwise
_DTYPE = "float32"


def title(method: str, n: int) -> str:
    """The name of a row; of KV-Rescue with the candidates of base and helper."""
    base, helper = candidates(method, n)
    return f"{TITLES[method]} {base}+{helper}" if helper else TITLES[method]


def candidates(method: str, n: int) -> tuple[int, int]:
    """Candidates per step of the main model and of the one that helps it.

    "rescue_half" has ``n`` in total, of which the base model gets the odd one, but at least one of
    each.
    """
    if method == "rescue_half":
        return -(-n // 2), max(1, n // 2)
    return n, n if method == "rescue" else 0


@dataclass(frozen=True)
class Models:
    """The three embedded models: their folders, and those that are loaded."""

    base: Path
    helper: Path
    prm: Path
    loaded: Loaded = field(default_factory=Loaded, repr=False, compare=False)


def load_models(root: Path | None = None) -> Models:
    """The embedded models, computing in fp32. Raises DamagedWeights if a file is not whole."""
    base, helper, prm = (model_directory(name, root) for name in ("base", "helper", "prm"))
    models = Models(base, helper, prm)
    for folder in (models.base, models.helper):
        models.loaded.language(folder, _DTYPE, "demo")
    models.loaded.reward(models.prm, _DTYPE, "demo")
    return models


def grade(problem: Question, text: str) -> Grade:
    """What the task's own checker says of a solution."""
    last = text.rsplit("\n", 1)[-1].strip()
    answer = last.rpartition(" answer ")[2] if " answer " in last else None
    return Grade(answer, parse_problem(problem.question).is_solved_by(text))


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
        title: its name, with the candidates of base and helper where there are both.
        n, n_helper: candidates per step of the main model and of the one that helps it.
        right: for each problem, whether its answer is right.
        base_tokens, helper_tokens: generated, lost candidates included.
        steps: committed, over all problems; ``helper_steps`` of them came from the helper.
        aborted: candidates ended by the detector; ``early_exits`` is their share of the base
            model's candidates.
        unended: problems that reached a limit before an answer: runaway solutions.
        kv_bytes: keys and values of one base sequence at its peak, mean over the problems.
        seconds: wall time without loading.
    """

    method: str
    title: str
    n: int
    n_helper: int
    right: tuple[bool, ...]
    base_tokens: int
    helper_tokens: int
    steps: int
    helper_steps: int
    aborted: int
    early_exits: float
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
            "n": self.n,
            "n_helper": self.n_helper,
            "accuracy": self.accuracy,
            "base_tokens": self.base_tokens,
            "helper_tokens": self.helper_tokens,
            "steps": self.mean_steps,
            "helper_steps": self.helper_steps / len(self.right),
            "aborted": self.aborted,
            "early_exits": self.early_exits,
            "unended": self.unended,
            "kv_bytes": self.kv_bytes,
            "seconds": self.seconds,
        }


def recovered(rows: Sequence[Row], method: str = "rescue") -> float | None:
    """(A_kvr - A_evict) / (A_full - A_evict), A_kvr of the row ``method``.

    None if eviction lost nothing or a row is missing.
    """
    accuracy = {row.method: row.accuracy for row in rows}
    if not {"full", "evicted", method} <= accuracy.keys():
        return None
    lost = accuracy["full"] - accuracy["evicted"]
    return (accuracy[method] - accuracy["evicted"]) / lost if lost > 0 else None


def describe(
    method: str,
    models: Models,
    settings: Settings,
    chosen: Sequence[Problem],
    *,
    config: SearchConfig | None = None,
) -> Run:
    """The run of one row.

    Args:
        config: replaces the demo's own search settings (for ablations), but not how many
            candidates there are.
    """
    require(method in METHODS, "method", f"one of {', '.join(METHODS)}", method)
    n, n_helper = candidates(method, settings.n)
    config = replace(config or search_config(n, settings.seed), n=n, n_helper=n_helper)
    return Run(
        base=models.base,
        helper=models.helper,
        scorer=ScorerSpec("prm", models.prm),
        problems=tuple(Question(str(i), p.question, p.answer) for i, p in enumerate(chosen)),
        method=_RUNS.get(method, method),
        eviction=eviction_config(settings.policy, settings.budget),
        search=config if n_helper else best_of_n_config(config),
        engine=engine_config(),
        dtype=_DTYPE,
        grade=grade,
    )


def run_row(
    method: str,
    models: Models,
    settings: Settings,
    chosen: Sequence[Problem],
    *,
    config: SearchConfig | None = None,
    on_event: Callable[[TraceEvent], None] | None = None,
) -> tuple[Row, list[Record]]:
    """Solves ``chosen`` one way. Returns the row and the records in the order of the problems.

    Raises:
        RuntimeError: a problem could not be solved for a reason other than the models.
    """
    run = describe(method, models, settings, chosen, config=config)
    solving = Solving(run, make_engines(run, models.loaded), on_event=on_event)
    begin = time.monotonic()
    for record in solving.records():
        if record.error is not None:
            raise RuntimeError(f"{method}: problem {record.id}: {record.error}")
    seconds = time.monotonic() - begin
    records = solving.ended()
    return summarize(method, settings.n, records, seconds), records


def summarize(method: str, n: int, records: Sequence[Record], seconds: float) -> Row:
    """A row of records that stand in the order of their problems."""
    own = sum(record.tokens.base for record in records)
    alone = method == "helper"
    sources = [step.source for record in records for step in record.steps]
    base, helper = candidates(method, n)
    return Row(
        method=method,
        title=title(method, n),
        n=base,
        n_helper=helper,
        right=tuple(bool(record.correct) for record in records),
        base_tokens=0 if alone else own,
        helper_tokens=own if alone else sum(record.tokens.helper for record in records),
        steps=len(sources),
        helper_steps=len(sources) if alone else sources.count("helper"),
        aborted=sum(record.aborted.total for record in records),
        early_exits=early_exit_share(records) or 0.0,
        unended=sum(record.finish != "eos" for record in records),
        kv_bytes=sum(record.kv_bytes.peak for record in records) / len(records),
        seconds=seconds,
    )
