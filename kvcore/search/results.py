"""What a search hands back: steps, solutions, and the events of its trace (schema version 1).

Texts are decoded UTF-8; bytes that are not valid (a character cut by a token limit) become U+FFFD
here and only here: everything that is decoded further travels as ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

SCHEMA_VERSION = 1

Source = Literal["base", "helper"]
FinishReason = Literal["eos", "max_steps", "max_tokens", "error", "interrupted"]

# Why a committed step is not an ordinary choice; "" for all others.
CAPPED = "capped"  # it reached max_new_tokens or the end of the context without a separator
BLANK = "blank"  # no candidate had text, and this one was taken without asking the scorer
ABORTED_PREFIX = "aborted_prefix"  # all candidates were degenerate: the tokens before one fired


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "to_json"):
        return value.to_json()
    return value


class _Json:
    """Adds ``to_json`` to a dataclass: plain values, NaN and infinities as None."""

    def to_json(self) -> dict[str, Any]:
        """Returns a new dict that ``json.dumps`` takes as it is."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Step(_Json):
    """One committed reasoning step.

    Attributes:
        source: whose candidate it was.
        index: which of that model's candidates.
        text: its text, special tokens excluded.
        tokens: its ids in the base vocabulary, an eos id included.
        score: what the scorer said; None when it was not asked (see ``flag``) or there is none.
        finish: value of ``kvcore.engine.events.Finish``.
        flag: "", "capped", "blank" or "aborted_prefix".
    """

    source: Source
    index: int
    text: str
    tokens: tuple[int, ...]
    score: float | None
    finish: str
    flag: str = ""

    @property
    def flagged(self) -> bool:
        return self.flag != ""


@dataclass(frozen=True)
class TokenCount(_Json):
    """Tokens that one model generated (losing and aborted candidates included) and was fed."""

    generated: int = 0
    processed: int = 0


@dataclass(frozen=True)
class Tokens(_Json):
    """Token counts of one problem, by model."""

    base: TokenCount = TokenCount()
    helper: TokenCount = TokenCount()
    scorer: TokenCount = TokenCount()


@dataclass(frozen=True)
class Aborted(_Json):
    """Candidates ended early, by the test that fired."""

    entropy: int = 0
    gzip: int = 0
    repetition: int = 0
    nan: int = 0

    @property
    def total(self) -> int:
        return self.entropy + self.gzip + self.repetition + self.nan


@dataclass(frozen=True)
class CandidateCount(_Json):
    """Candidates that ended, whatever became of them, by model."""

    base: int = 0
    helper: int = 0


@dataclass(frozen=True)
class KvBytes(_Json):
    """Bytes of keys and values of the base model.

    Attributes:
        peak: largest footprint of one base sequence of this problem, sampled every 16 tokens.
        full: what a full cache would hold at the end of the solution.
    """

    peak: int = 0
    full: int = 0


@dataclass(frozen=True)
class Solution(_Json):
    """One problem's outcome.

    Attributes:
        problem: the problem's key.
        question: as it was asked.
        text: all steps, special tokens excluded.
        token_ids: all steps in the base vocabulary, the prompt excluded.
        finish: "eos", "max_steps", "max_tokens", "error" (see ``error``) or "interrupted".
        aborted: candidates ended early, by the test that fired.
        evictions: base slots per lane that the committed trajectory no longer holds at the end.
        kv_bytes: of the base model, held and full.
        seconds: from its admission to its end.
        candidates: how many ended.
    """

    problem: int
    question: str
    text: str
    token_ids: tuple[int, ...]
    steps: tuple[Step, ...]
    tokens: Tokens
    aborted: Aborted
    finish: FinishReason
    error: str | None
    evictions: int
    kv_bytes: KvBytes
    seconds: float
    candidates: CandidateCount = CandidateCount()

    @property
    def early_exits(self) -> int:
        """Base candidates that the detector ended, out of ``candidates.base``."""
        return self.aborted.total - self.aborted.nan


@dataclass(frozen=True)
class TraceEvent(_Json):
    """Something worth keeping that happened in a search. ``to_json`` adds its name as "event"."""

    event: ClassVar[str] = ""

    def to_json(self) -> dict[str, Any]:
        return {"event": self.event, **super().to_json()}


@dataclass(frozen=True)
class Warned(TraceEvent):
    """What the user should know. May come at any time: before the first problem, while others are
    solved (why one ends early), and after the last (eviction never fired).
    """

    event: ClassVar[str] = "warning"
    message: str


@dataclass(frozen=True)
class ProblemStarted(TraceEvent):
    """A problem was admitted. Lengths in tokens; ``helper_prompt_tokens`` is 0 without a helper."""

    event: ClassVar[str] = "problem_start"
    problem: int
    question: str
    prompt_tokens: int
    helper_prompt_tokens: int


@dataclass(frozen=True)
class CandidateEnded(TraceEvent):
    """One candidate, told when its step is decided (or its problem ends before that).

    Attributes:
        step: from 0.
        index: among the candidates of ``source``.
        tokens: ids in the vocabulary of ``source``.
        score: None when it was not offered to the scorer.
        chosen: it became the step (as a whole, or its prefix before it fired).
        fired_at: token, counted from 1, at which the detector fired; 0 if it did not.
        max_entropy, min_gzip_ratio: of the detector; None if never tested.
        cache_slots, kv_bytes: its cache when it ended.
    """

    event: ClassVar[str] = "candidate"
    problem: int
    step: int
    source: Source
    index: int
    tokens: tuple[int, ...]
    text: str
    score: float | None
    chosen: bool
    aborted: bool
    finish: str
    fired_at: int
    max_entropy: float
    min_gzip_ratio: float
    mean_logprob: float
    n_tokens: int
    cache_slots: int
    kv_bytes: int


@dataclass(frozen=True)
class StepCommitted(TraceEvent):
    """A step is part of the trajectory, and both models hold it.

    Attributes:
        tokens: ids in the base vocabulary.
        score: None when the scorer was not asked.
        context: base tokens now, prompt included.
        base_slots, base_bytes, helper_slots, helper_bytes: caches of the trajectory now.
        evictions: base slots per lane that the trajectory no longer holds.
    """

    event: ClassVar[str] = "step"
    problem: int
    step: int
    source: Source
    index: int
    tokens: tuple[int, ...]
    text: str
    score: float | None
    finish: str
    flag: str
    context: int
    base_slots: int
    base_bytes: int
    helper_slots: int
    helper_bytes: int
    evictions: int


@dataclass(frozen=True)
class ProblemEnded(TraceEvent):
    """A problem's last event: its solution without the steps, which came before one by one."""

    event: ClassVar[str] = "problem_end"
    solution: Solution

    @property
    def problem(self) -> int:
        return self.solution.problem

    def to_json(self) -> dict[str, Any]:
        told = self.solution.to_json()
        steps = len(told.pop("steps"))
        return {"event": self.event, **told, "steps": steps}
