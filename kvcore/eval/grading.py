"""The answer in a solution's text, and whether it equals the gold answer.

An answer is the content of the last complete ``\\boxed{...}``, else the last number. Numbers are
compared exactly; everything else goes to math-verify, which decides under a time limit.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from fractions import Fraction

# math-verify on longer strings costs seconds, and no benchmark has an answer near this long.
MAX_ANSWER_CHARS = 1000
_TIMEOUT_SECONDS = 5
# A process that must import sympy first, and then parses twice and compares once.
_PROCESS_TIMEOUT_SECONDS = 30

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
# A minus right after a digit, a letter or a closing bracket is a subtraction.
_LAST_NUMBER = re.compile(rf"(?:(?<![\w)\]}}])-)?(?<![\d.])(?:{_NUMBER})")
_WHOLE_NUMBER = re.compile(rf"([+-]?)\s*({_NUMBER})(?:\s*/\s*(\d+))?\.?")
_UNIT = re.compile(r"\s*(?:\\text\{[^{}]*\}|\s[A-Za-z][A-Za-z ]+)\.?$")


def _boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{...}`` whose braces balance."""
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[match.end() : end].strip()
    return None


def extract_answer(text: str) -> str | None:
    """The last complete ``\\boxed{...}``'s content, else the last number as written, else None.

    An empty box counts as no answer, not as a reason to look at the numbers before it.
    """
    boxed = _boxed(text)
    if boxed is not None:
        return boxed or None
    numbers = _LAST_NUMBER.findall(text.replace("\u2212", "-"))
    return numbers[-1] if numbers else None


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


def _plain(answer: str) -> str:
    """``answer`` without what never changes its value: dollar signs, thin spaces, a period."""
    answer = answer.replace("\u2212", "-").replace("{,}", ",").replace("\\%", "%")
    answer = re.sub(r"\\[!,;: ]|\\?\$|\\left|\\right", "", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    return answer.strip().removesuffix(".").strip()


def _number(answer: str) -> Fraction | None:
    """The exact value of a plain number, its unit or percent sign ignored; else None."""
    plain = _plain(answer)
    whole = _WHOLE_NUMBER.fullmatch(_UNIT.sub("", plain).removesuffix("%").strip())
    if whole is None:
        return None
    sign, digits, divisor = whole.groups()
    value = Fraction(digits.replace(",", ""))
    if divisor is not None:
        if int(divisor) == 0:
            return None
        value /= int(divisor)
    return -value if sign == "-" else value


def _symbolic(answer: str, gold: str, timeout: int | None) -> bool:
    """math-verify's verdict.

    REQUIRES: the main thread, unless ``timeout`` is None (limits are signals).
    """
    import math_verify

    # It reports a timeout or a parse failure as a log line; the verdict already says so.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parsed = []
    for side in (gold, answer):
        found = math_verify.parse(f"\\boxed{{{side}}}", parsing_timeout=timeout)
        if not found:
            return False
        parsed.append(found)
    return bool(math_verify.verify(parsed[0], parsed[1], timeout_seconds=timeout))


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


def answers_equal(answer: str, gold: str) -> bool:
    """Whether two answers have the same value. Never takes longer than about half a minute.

    Safe in any thread; outside the main thread a comparison that is not of two numbers or of equal
    strings costs a process.
    """
    if _plain(answer) == _plain(gold):
        return True
    value, gold_value = _number(answer), _number(gold)
    if value is not None and gold_value is not None:
        return value == gold_value
    if max(len(answer), len(gold)) > MAX_ANSWER_CHARS:
        return False
    if threading.current_thread() is threading.main_thread():
        return _symbolic(_plain(answer), _plain(gold), _TIMEOUT_SECONDS)
    return _symbolic_elsewhere(_plain(answer), _plain(gold))


def is_correct(text: str, gold: str) -> bool:
    """Whether the answer that ``extract_answer`` finds in ``text`` equals ``gold``."""
    answer = extract_answer(text)
    return answer is not None and answers_equal(answer, gold)
