"""A run's description: picklable, complete, and what its engines and records come to."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models

from kvcore.config import EngineConfig, EvictionConfig, SamplingParams, SearchConfig
from kvcore.eval import Grade, Problem, Results, Run, ScorerSpec
from kvcore.eval.records import Record
from kvcore.eval.solving import Models, Solving, kept, make_engines, solve_missing
from kvcore.search import LoglikScorer, PrmScorer, RandomScorer

PROBLEMS = tuple(Problem(f"p{i}", f"{i} + 1?", str(i + 1)) for i in range(3))


def longest_first(problem: Problem, text: str) -> Grade:
    return Grade(text[:3], problem.id == "p0")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "base": tiny_models.save_model(root / "base", seed=1),
        "helper": tiny_models.save_model(root / "helper", seed=2),
        "prm": tiny_models.save_prm(root / "prm", seed=3),
    }


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.fixture(scope="module")
def make(folders: dict[str, Path]) -> Callable[..., Run]:
    def make(method: str = "rescue", **changes: Any) -> Run:
        run = Run(
            base=folders["base"],
            helper=folders["helper"],
            scorer=ScorerSpec("loglik"),
            problems=PROBLEMS,
            method=method,
            eviction=EvictionConfig("rkv", budget=8, protect=8, cadence="steady"),
            search=SearchConfig(
                n=1, sampling=SamplingParams(max_new_tokens=8), max_steps=2, max_tokens=160
            ),
            engine=EngineConfig(max_seqs=24, kv_bytes=8 << 20),
            dtype="float32",
        )
        return replace(run, **changes)

    return make


def same(record: Record) -> Record:
    """Without what differs from run to run: times, and scores by the rounding of their batch."""
    steps = tuple(replace(step, score=None) for step in record.steps)
    return replace(record, seconds=0.0, steps=steps)


def scores(records: dict[str, Record]) -> list[float | None]:
    return [step.score for one in sorted(records) for step in records[one].steps]


def test_a_run_can_be_pickled_and_told_as_json(make: Callable[..., Run]) -> None:
    run = make(grade=longest_first, template_args={"a": [1, None]})
    again = pickle.loads(pickle.dumps(run))
    assert again == run and again.grade is longest_first
    assert json.loads(json.dumps(run.as_json())) == json.loads(json.dumps(again.as_json()))


def test_everything_that_decides_an_outcome_is_in_the_json(make: Callable[..., Run]) -> None:
    run = make()
    changes = {
        "method": "helper",
        "base": "other",
        "helper": "other",
        "scorer": ScorerSpec("random"),
        "eviction": replace(run.eviction, budget=9),
        "search": replace(run.search, seed=1),
        "system_prompt": "think",
        "template_args": {"x": 1},
        "dtype": "bfloat16",
    }
    for name, value in changes.items():
        assert replace(run, **{name: value}).as_json() != run.as_json(), name
    sizes = {"engine": EngineConfig(), "problems": PROBLEMS[:1]}
    assert replace(run, **sizes).as_json() == run.as_json()
    full = replace(run, method="full")
    assert replace(full, eviction=EvictionConfig()).as_json() == full.as_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "beam"}, r"method: expected one of full, best-of-n, .*, got 'beam'"),
        ({"scorer": None}, r"scorer: expected one that chooses among 2 candidates, got None"),
        ({"helper": None}, r"helper: expected a model with method 'rescue', got None"),
        ({"base": None}, r"base: expected a model with method 'rescue', got None"),
        ({"method": "helper", "helper": None}, r"helper: expected a model with method 'helper'"),
        ({"method": "full", "base": None}, r"base: expected a model with method 'full'"),
        ({"problems": ()}, r"problems: expected at least one problem"),
        ({"template_args": {"messages": 1}}, r"template_args: 'messages' is set by kvcore"),
    ],
)
def test_a_run_that_cannot_be_is_refused(
    make: Callable[..., Run], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize("text", ["loglik", "random", "prm:some/where", "demo:prm", "prm:demo:prm"])
def test_a_scorer_is_described_by_a_word(text: str) -> None:
    spec = ScorerSpec.parse(text)
    assert ScorerSpec.parse(str(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize("text", ["", "best", "prm", "prm:", "loglik:x", "random:", "PRM:x"])
def test_another_scorer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^scorer: expected loglik, random or prm:DIR, got "):
        ScorerSpec.parse(text)


@pytest.mark.parametrize(
    ("method", "solver", "evicts", "helped"),
    [
        ("full", "base", False, False),
        ("best-of-n", "base", True, False),
        ("helper", "helper", False, False),
        ("rescue", "base", True, True),
    ],
)
def test_a_method_says_who_solves_and_whose_cache_is_evicted(
    make: Callable[..., Run],
    models: Models,
    method: str,
    solver: str,
    evicts: bool,
    helped: bool,
) -> None:
    run = make(method)
    language = {
        role: models.language(getattr(run, role), run.dtype, role) for role in ("base", "helper")
    }
    engines = make_engines(run, models)
    assert engines.solver.model is language[solver]
    assert engines.solver.eviction.evicts == run.evicts == evicts
    assert (engines.helper is not None) == helped
    if engines.helper is not None:
        assert engines.helper.model is language["helper"]
        assert not engines.helper.eviction.evicts


def test_likelihoods_are_read_from_a_full_cache(make: Callable[..., Run], models: Models) -> None:
    def judge(run: Run) -> Any:
        engines = make_engines(run, models)
        assert isinstance(engines.scorer, LoglikScorer)
        engine = engines.scorer.engine
        return engine, engines.solver

    helper = models.language(make().helper or "", "float32", "helper")
    assert judge(make("rescue"))[0] is None  # the helper's engine of the search
    for method in ("full", "best-of-n", "helper"):
        engine, solver = judge(make(method))
        assert engine.model is helper and not engine.eviction.evicts
        assert (engine is solver) == (method == "helper")
    engine, solver = judge(make("full", helper=None))
    assert engine is solver
    engine, solver = judge(make("best-of-n", helper=None))
    assert engine is not solver and engine.model is solver.model
    assert solver.eviction.evicts and not engine.eviction.evicts


def test_other_scorers_are_made_as_described(
    make: Callable[..., Run], models: Models, folders: dict[str, Path]
) -> None:
    engines = make_engines(make(scorer=ScorerSpec("random")), models)
    assert isinstance(engines.scorer, RandomScorer)
    engines = make_engines(make(scorer=ScorerSpec("prm", folders["prm"])), models)
    assert isinstance(engines.scorer, PrmScorer)
    with pytest.raises(ValueError, match=r"^scorer: "):
        make_engines(make(scorer=ScorerSpec("prm", folders["base"])), models)
    with pytest.raises(ValueError, match=r"^helper: "):
        make_engines(make(helper="no/where"), models)


def test_embedded_models_go_by_their_names() -> None:
    run = Run(
        base="demo:base",
        helper="demo:helper",
        scorer=ScorerSpec.parse("demo:prm"),
        problems=PROBLEMS,
        method="rescue",
        engine=EngineConfig(max_seqs=24, kv_bytes=32 << 20),
    )
    engines = make_engines(run, Models())
    assert isinstance(engines.scorer, PrmScorer) and engines.scorer.engine.model.has_head
    assert engines.helper is not None
    assert engines.helper.model.model.config.intermediate_size < (
        engines.solver.model.model.config.intermediate_size
    )


def test_a_run_cut_anywhere_and_continued_gives_the_same_records(
    make: Callable[..., Run], models: Models, tmp_path: Path
) -> None:
    run = make(grade=longest_first)
    solving = Solving(run, make_engines(run, models))
    whole = {record.id: record for record in solving.records()}
    wanted = {one: same(record) for one, record in whole.items()}
    assert [record.id for record in solving.ended()] == ["p0", "p1", "p2"]
    assert all(record.candidates.base and record.candidates.helper for record in wanted.values())
    assert wanted["p0"].correct is True and wanted["p1"].correct is False

    def stop(record: Record) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "r.jsonl"
    for solved in (1, 2):
        with Results(path, {}) as results, pytest.raises(KeyboardInterrupt):
            solve_missing(run, results, "x", models, on_record=stop)
        assert path.read_bytes().count(b"\n") == 1 + solved
    with Results(path, {}) as results:
        found = solve_missing(run, results, "x", models)
    assert list(found) == ["p0", "p1", "p2"]
    assert {one: same(record) for one, record in found.items()} == wanted
    assert scores(found) == pytest.approx(scores(whole), abs=1e-4)
    with Results(path, {}) as results:  # nothing is left to solve: no model is asked for
        again = solve_missing(run, results, "x", Models())
        assert again == found
        other = replace(run, base=Path("moved") / run.base.name)  # type: ignore[union-attr]
        assert kept(other, results, "x") == found
        assert kept(run, results, "y") == {}


def test_what_was_kept_belongs_to_its_run(
    make: Callable[..., Run], models: Models, tmp_path: Path
) -> None:
    run = make(problems=PROBLEMS[:1], search=replace(make().search, max_steps=1))
    with Results(tmp_path / "r.jsonl", {}) as results:
        solve_missing(run, results, "x", models)
        seeded = replace(run, search=replace(run.search, seed=1))
        with pytest.raises(ValueError, match=r"x/p0 holds results of other settings.*search\.seed"):
            solve_missing(seeded, results, "x", models)
        asked = replace(run, problems=(replace(PROBLEMS[0], question="9?"),))
        with pytest.raises(ValueError, match=r"x/p0: expected 9\?, got '0 \+ 1\?'"):
            solve_missing(asked, results, "x", models)
        twice = replace(run, problems=(PROBLEMS[0], PROBLEMS[0]))
        with pytest.raises(ValueError, match="problems: expected ids that differ, got 'p0'"):
            solve_missing(twice, results, "x", models)
        results.put("x/p0", {**results["x/p0"], "version": 9})
        with pytest.raises(ValueError, match="version: expected 1, got 9"):
            kept(run, results, "x")


def test_a_problem_that_failed_is_tried_again(
    make: Callable[..., Run], models: Models, tmp_path: Path
) -> None:
    long = Problem("long", "x" * 400, "")
    run = make(problems=(PROBLEMS[0], long), search=replace(make().search, max_steps=1))
    path = tmp_path / "r.jsonl"
    tried: list[str] = []
    for _ in range(2):
        tried.clear()
        with Results(path, {}) as results:
            found = solve_missing(
                run, results, "x", models, on_record=lambda record: tried.append(record.id)
            )
            assert list(results) == ["x/p0"]
        assert found["p0"].error is None and "prompt tokens" in str(found["long"].error)
    assert tried == ["long"]
