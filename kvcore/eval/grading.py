"""Whether an answer equals the gold answer.

Numbers are compared exactly, with their units; everything else goes to math-verify, which decides
under a time limit.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

from kvcore.eval.extract import extract_answer
from kvcore.eval.quantity import Quantity, parse_quantity, plain

if TYPE_CHECKING:
    from kvcore.eval.datasets import Problem

# math-verify on longer strings costs seconds, and no benchmark has an answer near this long.
MAX_ANSWER_CHARS = 1000
_TIMEOUT_SECONDS = 5
# A process that must import sympy first, and then parses twice and compares once.
_PROCESS_TIMEOUT_SECONDS = 30

# math-verify's parser recurses; no benchmark has an answer near this deep.
_MAX_DEPTH = 50


def parse_gsm8k_gold(answer: str) -> str:
    """The number after ``####`` of a GSM8K answer, thousands separators dropped.

    Raises:
        ValueError: there is no ``####`` or nothing after it.
    """
    _, mark, gold = answer.rpartition("####")
    gold = gold.strip().replace(",", "")
    if not mark or not gold:
        raise ValueError(f"answer: expected '#### <number>' at its end, got {answer[-40:]!r}")
    return gold


def _symbolic(answer: str, gold: str, timeout: int | None) -> bool:
    """math-verify's verdict.

    REQUIRES: the main thread, unless ``timeout`` is None (limits are signals).
    """
    import math_verify

    # It reports a timeout or a parse failure as a log line; the verdict already says so.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parsed = []
    try:
        for side in (gold, answer):
            found = math_verify.parse(f"\\boxed{{{side}}}", parsing_timeout=timeout)
            if not found:
                return False
            parsed.append(found)
        return bool(math_verify.verify(parsed[0], parsed[1], timeout_seconds=timeout))
    except (ArithmeticError, RecursionError, ValueError):
        return False  # a number or a nesting beyond what sympy can hold equals no sane answer


def _compare_from_stdin() -> None:
    """Body of the process of ``_symbolic_elsewhere``: JSON pair in, JSON verdict out."""
    answer, gold = json.load(sys.stdin)
    print(json.dumps(_symbolic(answer, gold, _TIMEOUT_SECONDS)))


def _symbolic_elsewhere(answer: str, gold: str) -> bool:
    """``_symbolic`` in a process of its own: no signal can interrupt sympy in another thread."""
    program = "from kvcore.eval.grading import _compare_from_stdin as run; run()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps([answer, gold]).encode(),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=_PROCESS_TIMEOUT_SECONDS,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode != 0:
        raise RuntimeError(f"the grading process failed: {done.stderr.decode(errors='replace')}")
    return bool(json.loads(done.stdout))


def _too_deep(answer: str) -> bool:
    depth = deepest = 0
    for char in answer:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
    return deepest > _MAX_DEPTH


def _verdict(answer: Quantity, gold: Quantity) -> bool | None:
    """Whether two numbers with units are the same; None if that cannot be said of them."""
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if gold.unit and not answer.unit and not gold.may_lack_unit:
        return None
    if answer.value is None or gold.value is None:
        return None
    if answer.value == gold.value:
        return True
    # One of them may be written as the share that the other gives in percent.
    if answer.percent == gold.percent:
        return False
    share, other = (answer, gold) if gold.percent else (gold, answer)
    assert share.value is not None and other.value is not None
    return share.value * 100 == other.value


def answers_equal(answer: str, gold: str) -> bool:
    """Whether two answers have the same value. Never takes longer than about half a minute.

    Numbers are compared exactly: 1/3 is not 0.333. Words after an answer's number are a unit and
    need not be in the gold answer; if the gold answer has some as well, they must be the same (3
    hours is not 3 minutes), and a bare answer may leave out a unit of measure only (5 is not 5 PM).

    Safe in any thread; outside the main thread a comparison that is not of two numbers or of equal
    strings costs a process.
    """
    plain_answer, plain_gold = plain(answer), plain(gold)
    if plain_answer == plain_gold:
        return True
    verdict = _verdict(parse_quantity(plain_answer), parse_quantity(plain_gold))
    if verdict is not None:
        return verdict
    if max(len(answer), len(gold)) > MAX_ANSWER_CHARS:
        return False
    if _too_deep(plain_answer) or _too_deep(plain_gold):
        return False
    if threading.current_thread() is threading.main_thread():
        return _symbolic(plain_answer, plain_gold, _TIMEOUT_SECONDS)
    return _symbolic_elsewhere(plain_answer, plain_gold)


def is_correct(text: str, gold: str) -> bool:
    """Whether the answer that ``extract_answer`` finds in ``text`` equals ``gold``."""
    answer = extract_answer(text)
    return answer is not None and answers_equal(answer, gold)


class Grade(NamedTuple):
    """What a text came to: the answer in it, and whether it is right (None: nobody can say)."""

    answer: str | None
    correct: bool | None


def grade_answer(problem: Problem, text: str) -> Grade:
    """The answer that ``extract_answer`` finds, against the problem's gold answer if it has one."""
    answer = extract_answer(text)
    if not problem.gold:
        return Grade(answer, None)
    return Grade(answer, answer is not None and answers_equal(answer, problem.gold))
