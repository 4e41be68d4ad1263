"""Answers are found and compared as benchmarks mean them; bad problem files say what is wrong."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from kvcore.eval import extract_answer, is_correct, load_problems
from kvcore.eval.grading import answers_equal, parse_gsm8k_gold

BENCHMARKS = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{18}.", "18"),
        ("\\boxed{1} and then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}} is more than 0.4", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
        ("\\boxed{3} then \\boxed{4", "3"),  # the last complete box
        ("only \\boxed{42", "42"),
        ("\\boxed{} after 3 tries", None),
        ("The answer is 1,234.50 dollars.", "1,234.50"),
        ("16 - 3 = 13", "13"),
        ("16-3", "3"),
        ("it drops to -3", "-3"),
        ("it drops to \u22123", "-3"),
        ("1, 2, 3", "3"),
        ("$.5", ".5"),
        ("no number here", None),
        ("", None),
    ],
)
def test_answer_is_last_box_else_last_number(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("18", "18", True),
        ("18.00", "18", True),
        ("\\$1,234", "1234", True),
        ("18 dollars", "18", True),
        ("18\\text{ cm}", "18", True),
        ("50\\%", "50", True),
        ("025", "25", True),
        ("1/2", "0.5", True),
        ("1/0", "1", False),
        ("-5", "5", False),
        ("0.1", "0.10000001", False),
        ("\\frac{1}{2}", "0.5", True),
        ("\\dfrac12", "\\frac{1}{2}", True),
        ("(3,\\pi/2)", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
        ("84, 69", "$69$,$84$", True),
        ("2n", "2m", False),
        ("x=5", "5", True),
        ("\\frac{\\frac{", "5", False),
        ("", "5", False),
        ("9" * 5000 + "x", "5", False),
    ],
)
def test_answers_are_compared_by_value(answer: str, gold: str, same: bool) -> None:
    assert answers_equal(answer, gold) is same


def test_grading_in_another_thread_gives_the_same_verdicts() -> None:
    pairs = [("\\frac{1}{2}", "\\frac{2}{4}"), ("x+1", "x+2"), ("\ud800", "y"), ("7", "7.0")]
    verdicts: list[bool] = []
    thread = threading.Thread(target=lambda: verdicts.extend(answers_equal(*p) for p in pairs))
    thread.start()
    thread.join()
    assert verdicts == [answers_equal(*p) for p in pairs] == [True, False, False, True]


def test_comparison_that_never_ends_is_a_wrong_answer() -> None:
    assert not is_correct("\\boxed{9^{9^{9}}}", "\\frac{1}{3}")


def test_text_without_an_answer_is_wrong() -> None:
    assert not is_correct("I do not know", "1")
    assert is_correct("It is $\\boxed{\\frac{2}{4}}$", "\\frac{1}{2}")


@pytest.mark.parametrize(("answer", "gold"), [("a\n#### 1,234", "1234"), ("#### -7 ", "-7")])
def test_gsm8k_gold_is_the_number_after_the_mark(answer: str, gold: str) -> None:
    assert parse_gsm8k_gold(answer) == gold


@pytest.mark.parametrize("answer", ["42", "", "text ####  "])
def test_gsm8k_answer_without_gold_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="answer: expected '#### <number>'"):
        parse_gsm8k_gold(answer)


def test_problems_keep_order_id_and_gold(tmp_path: Path) -> None:
    rows = [
        {"question": "a?", "answer": "so\n#### 1,000", "idx": 7},
        {"problem": "b?", "answer": 27.0},
        {"question": "c?", "final_answer": ["$69$", "$84$"], "id": 3},
        {"question": "d?"},
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("\n\n".join(json.dumps(r) for r in rows) + "\n")
    problems = load_problems(path)
    assert [p.id for p in problems] == ["7", "1", "3", "3"]
    assert [p.question for p in problems] == ["a?", "b?", "c?", "d?"]
    assert [p.gold for p in problems] == ["1000", "27", "$69$, $84$", ""]
    assert load_problems(path, 2) == problems[:2]


@pytest.mark.parametrize(
    ("number", "gold"),
    [
        ("9" * 5000, "9" * 5000),
        ("-" + "9" * 5000, "-" + "9" * 5000),
        ("1e400", "1" + "0" * 400),
        ("1e-7", "0.0000001"),
        ("0.1", "0.1"),
        ("27.50", "27.5"),
        ("100", "100"),
        ("12345678901234567890.25", "12345678901234567890.25"),
        ('["1", 2.0]', "1, 2"),
    ],
)
def test_numbers_of_a_problem_file_are_kept_as_written(
    tmp_path: Path, number: str, gold: str
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(f'{{"question": "a", "answer": {number}, "size": {"7" * 5000}}}\n')
    (problem,) = load_problems(path)
    assert problem.gold == gold
    assert is_correct(f"\\boxed{{{gold}}}", problem.gold)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected at least one problem"),
        ("\n \n", "expected at least one problem"),
        ('{"question": "a"}\n{', "line 2: expected one JSON object per line"),
        ("[1]", "line 1: expected a JSON object, got list"),
        ('{"question": ""}', "line 1: expected a non-empty string in 'question'"),
        ('{"question": 3}', "line 1: expected a non-empty string in 'question'"),
        ('{"text": "a"}', "line 1: expected a non-empty string in 'question'"),
        ('{"question": "a", "answer": {}}', "line 1: answer: expected a string or a number"),
        ('{"question": "a", "answer": "so ####"}', "line 1: answer: expected '#### <number>'"),
        ('{"question": "a", "answer": NaN}', "line 1: answer: expected a string or a number"),
        ('{"question": "a", "answer": [[1]]}', "line 1: answer: expected a string or a number"),
        ('{"question": "a", "answer": 1e999999}', "line 1: answer: expected a number of at most"),
        ('{"question": "a", "n": 1e' + "9" * 30 + "}", "line 1: expected numbers of less than"),
        ('{"question": ' + "9" * 5000 + "}", "line 1: expected a non-empty string in 'question'"),
        ('{"question": "a"}\n' + "[" * 100_000, "line 2: expected a JSON object, got one nested"),
        ('{"question": "a"}\n\ufeff{}', "line 2: expected one JSON object per line"),
    ],
)
def test_bad_problem_file_names_the_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_problems(path)
    assert str(path) in str(error.value)


def test_unreadable_problem_file_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a readable JSONL file"):
        load_problems(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="limit: expected an integer >= 1"):
        load_problems(tmp_path / "missing.jsonl", 0)
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    with pytest.raises(ValueError, match="expected UTF-8"):
        load_problems(tmp_path / "latin.jsonl")


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the benchmark files are not here")
@pytest.mark.parametrize("name", ["gsm8k", "math500", "aime24", "aime25", "amc23", "olympiadbench"])
def test_every_published_benchmark_loads_with_gold(name: str) -> None:
    problems = load_problems(BENCHMARKS / f"{name}.jsonl")
    assert all(p.gold for p in problems)
    assert all(is_correct(f"\\boxed{{{p.gold}}}", p.gold) for p in problems)
