"""Records of problems: to JSON and back, and what makes one."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest
from support.cli_tools import SOLUTION

from kvcore.eval import Grade, Problem
from kvcore.eval.records import VERSION, ByModel, Record, early_exit_share
from kvcore.search.results import Aborted, CandidateCount, KvBytes

PROBLEM = Problem("p7", "q?", "42")


def make(**changes: Any) -> Record:
    record = Record.of(PROBLEM, SOLUTION, settings={"n": [1, None]})
    return replace(record, **changes)


EDGES = [
    {},
    {"answer": None, "gold": None, "correct": None},
    {"correct": False, "finish": "error", "error": "line\nbreak"},
    {"text": "", "steps": (), "seconds": 0.0},
    {"text": "\ud83d \u2028 \x00", "id": ""},
    {"evictions": 2**62, "kv_bytes": KvBytes(2**60, 2**61)},
    {"tokens": ByModel(1, 2, 3), "fed": ByModel(4, 5, 6), "candidates": CandidateCount(7, 8)},
    {"settings": {}, "versions": {}},
]


@pytest.mark.parametrize("changes", EDGES)
def test_a_record_comes_back_from_json_as_it_was(changes: dict[str, Any]) -> None:
    record = make(**changes)
    told = record.to_json()
    assert told["version"] == VERSION
    assert Record.from_json(json.loads(json.dumps(told, allow_nan=False))) == record


def test_a_record_holds_what_the_solution_and_the_grader_say() -> None:
    record = make()
    assert (record.id, record.gold, record.answer, record.correct) == ("p7", "42", "42", True)
    assert (record.finish, record.error, record.text) == ("eos", None, SOLUTION.text)
    assert record.tokens == ByModel(30, 20, 60)
    assert record.fed == ByModel(4, 5, 60)
    assert record.aborted == SOLUTION.aborted and record.kv_bytes == SOLUTION.kv_bytes
    assert [step.tokens for step in record.steps] == [3, 2]
    assert [step.source for step in record.steps] == ["base", "helper"]
    assert record.settings == {"n": [1, None]}
    assert set(record.versions) == {"kvcore", "torch", "transformers", "python"}


def test_a_score_that_json_cannot_hold_is_none() -> None:
    step = replace(SOLUTION.steps[0], score=math.nan)
    record = Record.of(PROBLEM, replace(SOLUTION, steps=(step,)))
    assert record.steps[0].score is None


def test_a_problem_without_gold_has_no_grade_and_another_grader_is_asked() -> None:
    record = Record.of(Problem("0", "q?", ""), SOLUTION)
    assert (record.answer, record.gold, record.correct) == ("42", None, None)
    record = Record.of(PROBLEM, SOLUTION, grade=lambda problem, text: Grade(problem.id, False))
    assert (record.answer, record.correct) == ("p7", False)


def test_a_grader_that_raises_makes_an_error_of_its_own_problem() -> None:
    def fail(problem: Problem, text: str) -> Grade:
        raise RecursionError("deep")

    record = Record.of(PROBLEM, SOLUTION, grade=fail)
    assert (record.finish, record.error) == ("error", "grading: RecursionError: deep")
    assert record.correct is None and record.text == SOLUTION.text
    first = replace(SOLUTION, finish="error", error="scorer: gone")
    assert Record.of(PROBLEM, first, grade=fail).error == "scorer: gone"


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5])
def test_another_version_is_refused_by_name(version: object) -> None:
    told = {**make().to_json(), "version": version}
    with pytest.raises(ValueError, match=r"^file, line 3: version: expected 1, got "):
        Record.from_json(told, "file, line 3")


def test_fields_of_a_later_reader_are_left_out_and_defaults_filled_in() -> None:
    told = {**make().to_json(), "tomorrow": 1}
    told["kv_bytes"]["shared"] = 5
    assert Record.from_json(told) == make()
    for name in ("candidates", "fed", "settings", "versions"):
        del told[name]
    plain = make(candidates=CandidateCount(), fed=ByModel(), settings={}, versions={})
    assert Record.from_json(told) == plain


@pytest.mark.parametrize("name", [f.name for f in fields(Record)][:14])
def test_a_missing_field_is_named(name: str) -> None:
    told = make().to_json()
    del told[name]
    with pytest.raises(ValueError, match=f"expected a field '{name}'"):
        Record.from_json(told)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("id", 3),
        ("correct", "yes"),
        ("correct", 1),
        ("evictions", True),
        ("evictions", 1.5),
        ("evictions", None),
        ("seconds", "1"),
        ("seconds", math.nan),
        ("steps", {}),
        ("steps", [1]),
        ("tokens", [1, 2]),
        ("tokens", {"base": "1"}),
        ("settings", []),
        ("text", None),
    ],
)
def test_a_field_of_another_kind_is_named(name: str, bad: object) -> None:
    with pytest.raises(ValueError, match=f"^record: {name}.*: expected .*, got "):
        Record.from_json({**make().to_json(), name: bad})


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_what_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^record: expected an object"):
        Record.from_json(value)


def test_the_share_of_early_exits_counts_base_candidates_and_no_nan() -> None:
    one = make(
        aborted=Aborted(entropy=1, gzip=2, repetition=3, nan=4), candidates=CandidateCount(20, 9)
    )
    two = make(aborted=Aborted(), candidates=CandidateCount(10, 9))
    assert early_exit_share([one, two]) == pytest.approx(6 / 30)
    assert early_exit_share([make(candidates=CandidateCount(0, 5))]) is None
    assert early_exit_share([]) is None
