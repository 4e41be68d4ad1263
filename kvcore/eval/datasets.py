"""Problems from a JSONL file: GSM8K, MATH-500, AIME, AMC and OlympiadBench as published."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from kvcore.eval.grading import parse_gsm8k_gold

_QUESTION_FIELDS = ("question", "problem")
_ANSWER_FIELDS = ("answer", "final_answer")
_ID_FIELDS = ("id", "unique_id", "idx")
# Python may refuse to convert longer numbers (at the earliest from 640 digits on).
_MAX_INT_CHARS = 600
_MAX_DIGITS = 100_000


@dataclass(frozen=True)
class Problem:
    """A question and its gold answer.

    Attributes:
        id: as in the file, else the number of its line from 0.
        question: the text put to the model.
        gold: the answer to compare with; "" where the file gives none.
    """

    id: str
    question: str
    gold: str


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _parse_int(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= _MAX_INT_CHARS else Decimal(digits)


def _gold(value: Any, where: str) -> str:
    if isinstance(value, list) and value and not any(isinstance(v, list) for v in value):
        return ", ".join(_gold(v, where) for v in value)
    if isinstance(value, bool) or not isinstance(value, (str, int, Decimal)):
        raise ValueError(f"{where}: answer: expected a string or a number, got {_shown(value)}")
    if isinstance(value, Decimal):
        if abs(value.adjusted()) > _MAX_DIGITS:
            raise ValueError(
                f"{where}: answer: expected a number of at most {_MAX_DIGITS} digits, "
                f"got {_shown(str(value))}"
            )
        digits = format(value, "f")
        return digits.rstrip("0").removesuffix(".") if "." in digits else digits
    text = str(value).strip()
    if "####" not in text:
        return text
    try:
        return parse_gsm8k_gold(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _first(row: dict[str, Any], fields: tuple[str, ...]) -> Any:
    return next((row[name] for name in fields if row.get(name) is not None), None)


def parse_problem(line: str, index: int, where: str) -> Problem:
    """One line of a problem file.

    Raises:
        ValueError: not a JSON object, no question, an empty one, or an answer of another kind;
            begins with ``where``.
    """
    try:
        # Numbers are kept as written, however long: an answer is compared exactly.
        row = json.loads(line, parse_int=_parse_int, parse_float=Decimal)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected one JSON object per line ({error})") from None
    except InvalidOperation:
        raise ValueError(f"{where}: expected numbers of less than 10**18 digits") from None
    except RecursionError:
        raise ValueError(f"{where}: expected a JSON object, got one nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    question = _first(row, _QUESTION_FIELDS)
    if not isinstance(question, str) or not question.strip():
        names = " or ".join(repr(name) for name in _QUESTION_FIELDS)
        raise ValueError(f"{where}: expected a non-empty string in {names}, got {_shown(question)}")
    answer = _first(row, _ANSWER_FIELDS)
    identity = _first(row, _ID_FIELDS)
    return Problem(
        id=str(index if identity is None else identity),
        question=question,
        gold="" if answer is None else _gold(answer, where),
    )


def load_problems(path: str | Path, limit: int | None = None) -> list[Problem]:
    """The first ``limit`` problems of a JSONL file (all if None), in order; skips blank lines.

    Fields: ``question`` or ``problem``; ``answer`` or ``final_answer`` (GSM8K's ``####`` is
    understood).

    Raises:
        ValueError: the file cannot be read, a line is wrong (it is named), or there is none.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected an integer >= 1, got {limit!r}")
    problems: list[Problem] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(problems) == limit:
                    break
                if line.strip():
                    problems.append(parse_problem(line, len(problems), f"{path}, line {number}"))
    except OSError as error:
        raise ValueError(f"{path}: expected a readable JSONL file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text ({error.reason})") from None
    if not problems:
        raise ValueError(f"{path}: expected at least one problem, got none")
    return problems
