"""From a run's description to its records: loads models, makes engines, solves, grades, keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcore.config import EngineConfig, EvictionConfig, require
from kvcore.engine import Engine
from kvcore.eval.jsonl import Results, check_same
from kvcore.eval.records import Record
from kvcore.eval.runs import Run
from kvcore.models import LoadedModel, load_model, load_prm
from kvcore.search import (
    DEFAULT_SYSTEM_PROMPT,
    LoglikScorer,
    PrmScorer,
    Prompt,
    RandomScorer,
    Scorer,
    Search,
    Solution,
    TraceEvent,
)


class Models:
    """Loaded models by name; each is loaded once, when it is first asked for."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, str | None, bool], LoadedModel] = {}

    def language(self, source: str | Path, dtype: str | None, argument: str) -> LoadedModel:
        """Arguments and errors as ``load_model``."""
        return self._model(source, dtype, argument, reward=False)

    def reward(self, source: str | Path, dtype: str | None, argument: str) -> LoadedModel:
        """Arguments and errors as ``load_prm``."""
        return self._model(source, dtype, argument, reward=True)

    def _model(
        self, source: str | Path, dtype: str | None, argument: str, *, reward: bool
    ) -> LoadedModel:
        key = (str(source), dtype, reward)
        if key not in self._loaded:
            load = load_prm if reward else load_model
            self._loaded[key] = load(source, dtype=dtype, argument=argument)
        return self._loaded[key]


@dataclass(frozen=True)
class Engines:
    """What a run's search works with; ``solver`` writes the steps, alone or with ``helper``."""

    solver: Engine
    helper: Engine | None
    scorer: Scorer | None

    @property
    def generated_tokens(self) -> int:
        """By both models, so far."""
        engines = [self.solver] if self.helper is None else [self.solver, self.helper]
        return sum(engine.stats.generated_tokens for engine in engines)


def make_engines(run: Run, models: Models) -> Engines:
    """Loads what is not loaded yet. Raises ValueError, naming "base", "helper" or "scorer"."""
    role = "helper" if run.method == "helper" else "base"
    model = models.language(_source(run, role), run.dtype, role)
    eviction = run.eviction if run.evicts else EvictionConfig()
    solver = Engine(model, engine_config(run, model), eviction=eviction)
    helper = None
    if run.method == "rescue":
        small = models.language(_source(run, "helper"), run.dtype, "helper")
        helper = Engine(small, engine_config(run, small))
    return Engines(solver, helper, _scorer(run, models, solver))


def _source(run: Run, role: str) -> str | Path:
    source: str | Path | None = getattr(run, role)
    assert source is not None, role
    return source


def _scorer(run: Run, models: Models, solver: Engine) -> Scorer | None:
    if run.scorer is None:
        return None
    if run.scorer.kind == "random":
        return RandomScorer(run.search.seed)
    if run.scorer.path is not None:
        model = models.reward(run.scorer.path, run.dtype, "scorer")
        return PrmScorer(Engine(model, engine_config(run, model)), mode=run.scorer.read or "extra0")
    prompt = DEFAULT_SYSTEM_PROMPT if run.system_prompt is None else run.system_prompt
    if run.method == "rescue":
        return LoglikScorer(system_prompt=prompt)  # reads in the helper's own engine
    # Likelihoods from an evicted cache would judge by what was forgotten.
    role = "base" if run.helper is None else "helper"
    judge = models.language(_source(run, role), run.dtype, role)
    if judge is solver.model and not run.evicts:
        return LoglikScorer(solver, system_prompt=prompt)
    return LoglikScorer(Engine(judge, engine_config(run, judge)), system_prompt=prompt)


def engine_config(run: Run, model: LoadedModel) -> EngineConfig:
    """The model's own context, up to what a solution can make anybody read.

    A solution has at most ``max_tokens`` base tokens. The same text may have more tokens elsewhere
    (another tokenizer, another template, a separator for each step), but hardly more than four
    times as many. Tables are sized by the context: a context of a million costs memory in each row.
    """
    most = 4 * (run.search.max_tokens + run.search.sampling.max_new_tokens) + 4096
    return replace(run.engine, context_len=min(most, model.context_len))


class Solving:
    """One run under way.

    Args:
        engines: as ``make_engines`` makes them for this run; of this run alone.
        skip: ids of problems that are left out.
        on_event: called with every event of the search, in its thread.
    Attributes:
        search: of the run; problems go by their place in ``run.problems``.
    Raises:
        ValueError, TypeError: settings that do not fit each other or the engines.
    """

    def __init__(
        self,
        run: Run,
        engines: Engines,
        *,
        skip: Container[str] = (),
        on_event: Callable[[TraceEvent], None] | None = None,
    ) -> None:
        self.run = run
        self._settings = run.as_json()
        self._graded: dict[int, tuple[Solution, Record]] = {}
        self.engines = engines
        prompts = [
            Prompt(problem.question, key=key)
            for key, problem in enumerate(run.problems)
            if problem.id not in skip
        ]
        rescues = run.method == "rescue"
        self.search = Search(
            engines.solver,
            prompts,
            scorer=engines.scorer,
            helper=engines.helper,
            config=run.search if rescues else replace(run.search, n_helper=None),
            system_prompt=DEFAULT_SYSTEM_PROMPT if run.system_prompt is None else run.system_prompt,
            template_args=run.template_args,
            on_event=on_event,
        )

    def records(self) -> Iterator[Record]:
        """Solves; yields problems as they end. What raises is as of ``Search.run``."""
        for solution in self.search.run():
            yield self.record(solution)

    def ended(self) -> list[Record]:
        """All problems that have ended, interrupted ones too, in the order of the run."""
        return [self.record(s) for s in sorted(self.search.solutions, key=lambda s: s.problem)]

    def record(self, solution: Solution) -> Record:
        """The record of one of the run's solutions, which is graded once."""
        key = solution.problem
        if key not in self._graded or self._graded[key][0] is not solution:
            found = Record.of(
                self.run.problems[key],
                solution,
                grade=self.run.grade,
                settings=self._settings,
            )
            self._graded[key] = solution, found
        return self._graded[key][1]


def solve_missing(
    run: Run,
    results: Results,
    name: str,
    models: Models,
    *,
    on_record: Callable[[Record], None] | None = None,
) -> dict[str, Record]:
    """The records of all problems of a run by id; what ``results`` lacks is solved and put there.

    Every record is in the file before the next one is waited for. A problem that failed is not put
    there: it is tried again when the run is continued.

    Args:
        name: of the run among others in ``results``, whose keys are ``name/id``.
        on_record: called with every new record.
    Raises:
        ValueError: problems share an id, or what ``results`` holds is of other settings or of other
            questions; and as ``make_engines`` and ``Solving``.
    """
    ids = [problem.id for problem in run.problems]
    twice = next((one for one, count in Counter(ids).items() if count > 1), None)
    require(twice is None, "problems", "ids that differ", twice)
    found = kept(run, results, name)
    if len(found) < len(ids):
        solving = Solving(run, make_engines(run, models), skip=found)
        for record in solving.records():
            if record.error is None:
                results.put(f"{name}/{record.id}", record.to_json())
            found[record.id] = record
            if on_record is not None:
                on_record(record)
    return {one: found[one] for one in ids}


def kept(run: Run, results: Results, name: str) -> dict[str, Record]:
    """The records of a run that ``results`` holds, by id; raises as ``solve_missing``."""
    found = {}
    wanted = _by_name(run.as_json())
    for problem in run.problems:
        key = f"{name}/{problem.id}"
        if key not in results:
            continue
        where = f"{results.path}: {key}"
        record = Record.from_json(results[key], where)
        check_same(_by_name(record.settings), wanted, where)
        require(record.question == problem.question, where, problem.question, record.question)
        found[problem.id] = record
    return found


def _by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with models by their names alone: a folder may lie elsewhere by now."""
    names = {role: settings.get(role) for role in ("base", "helper")}
    short = {role: None if path is None else Path(path).name for role, path in names.items()}
    kind, separator, path = str(settings.get("scorer")).partition(":")
    return {**settings, **short, "scorer": f"{kind}{separator}{Path(path).name}"}
