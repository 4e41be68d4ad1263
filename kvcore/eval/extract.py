"""The answer in a solution's text: the last box, else the last number.

Every function here takes time linear in the text.
"""

from __future__ import annotations

import re

# Digits in groups of three, or plain. A group may be set off by a comma, bare or in braces, or by a
# space: a plain one, a no-break or thin one, or one of LaTeX's.
_SEPARATOR = r"(?:(?:,|\{,\})(?:\\!)?|\\[,;: ]|[ \u00a0\u2009\u202f])"
NUMBER = (
    rf"(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+(?![\w.]))?"
    r"|\.\d+(?:[eE][+-]?\d+(?![\w.]))?"
)
_SCALED = rf"(?:{NUMBER})\s*(?:\\times|\\cdot|\u00d7)\s*10\s*\^\s*(?:\{{\s*[-+]?\d+\s*\}}|[-+]?\d+)"
_FRACTION = (
    rf"(?:\d+[ ~]|\d+\s*(?=\\))?(?:(?<!/)(?:{NUMBER})\s*/\s*\d+(?!\d*[/.]?\d)"
    r"|\\[dt]?frac\s*(?:\d\s*\d|\{\s*[-+]?\d+\s*\}\s*\{\s*\d+\s*\}))"
)
# A minus right after a digit, a letter or a closing bracket is a subtraction.
_LAST_NUMBER = re.compile(rf"(?:(?<![\w)\]}}])-)?(?<![\d.])(?:{_FRACTION}|{_SCALED}|(?:{NUMBER}))")
_GROUPED = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)")
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# Longest first: ** opens before *.
_MARKS = ("***", "**", "*", "___", "__", "_", "```", "``", "`")


def last_box(text: str) -> str | None:
    """Content of the last ``\\boxed{...}`` (or ``\\fbox``) whose braces balance, else None.

    ``\\{`` and ``\\}`` are signs and open and close nothing.
    """
    opened: list[int] = []  # where the content of a box begins; -1 for another group
    begin = end = -1
    for token in _BOX_OR_BRACE.finditer(text):
        if token[0] == "{":
            opened.append(-1)
        elif token[0] == "}":
            start = opened.pop() if opened else -1
            if start > begin:
                begin, end = start, token.start()
        elif token[0][-1] == "{" and len(token[0]) > 2:
            opened.append(token.end())
    return None if begin < 0 else text[begin:end]


def strip_markdown(answer: str) -> str:
    """``answer`` without the emphasis and code marks that enclose all of it, and spaces around."""
    answer = answer.strip()
    while True:
        for mark in _MARKS:
            inner = answer[len(mark) : -len(mark)]
            if answer.startswith(mark) and answer.endswith(mark) and inner.strip(mark[0] + " "):
                answer = inner.strip()
                break
        else:
            return answer


def join_thousands(answer: str) -> str:
    """``answer`` with its groups of three digits joined: 1,234 and 1\\,234 become 1234."""
    return _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), answer)


def extract_answer(text: str) -> str | None:
    """The last complete ``\\boxed{...}``'s content, else the last number as written, else None.

    Markdown marks around a box's content do not belong to it. A fraction (``3/4``) and a mixed
    number are one number. An empty box counts as no answer, not as a reason to look at the numbers
    before it.
    """
    boxed = last_box(text)
    if boxed is not None:
        return strip_markdown(boxed) or None
    last = None
    for number in _LAST_NUMBER.finditer(text.replace("\u2212", "-")):
        last = number[0]
    return last
