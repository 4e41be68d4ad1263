"""Which candidate becomes the step: the decisions of KV-Rescue's Algorithm 1, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.engine.events import Finish
from kvcore.search.results import ABORTED_PREFIX, BLANK, CAPPED
from kvcore.search.trajectory import SOURCES, Candidate


@dataclass(frozen=True)
class Choice:
    """What becomes the next step.

    Attributes:
        tokens: the ids to commit, in the vocabulary of the candidate's source.
        whole: all of the candidate, so that its cache may be taken over.
        flag: as ``Step.flag``.
    """

    candidate: Candidate
    tokens: tuple[int, ...]
    whole: bool
    flag: str


def pool(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that the scorer is asked about, in the same order (KV-Rescue, eq. 7)."""
    return [candidate for candidate in candidates if candidate.offered]


def choose(candidates: Sequence[Candidate], ranks: Sequence[float]) -> int:
    """Place of the candidate with the highest rank (KV-Rescue, Algorithm 1, line 8).

    Equal ranks: base before helper, which saves feeding the step to the base model, then the lower
    index. REQUIRES: at least one candidate, one rank each, none NaN.
    """
    if not candidates or len(candidates) != len(ranks):
        raise ValueError(f"ranks: expected {len(candidates)} >= 1 numbers, got {len(ranks)}")
    if any(math.isnan(rank) for rank in ranks):
        raise ValueError(f"ranks: expected numbers, got NaN in {list(ranks)}")

    def worse_is_larger(i: int) -> tuple[float, int, int]:
        return -ranks[i], SOURCES.index(candidates[i].source), candidates[i].index

    return min(range(len(candidates)), key=worse_is_larger)


def take(candidate: Candidate) -> Choice:
    """A candidate as a whole. Flags it if a limit ended it instead of a separator."""
    capped = candidate.ended.finish is Finish.LENGTH
    return Choice(candidate, tuple(candidate.ended.tokens), True, CAPPED if capped else "")


def fallback(candidates: Sequence[Candidate]) -> Choice | None:
    """The step when no candidate may be offered to the scorer; None if none has a token.

    1. A blank candidate, base before helper, then the lower index: it is the model's own text and
       not degenerate.
    2. Else the longest prefix of one aborted candidate at which no test had fired: its first
       ``fired_at - 1`` tokens, at least one, so that the trajectory grows; all tokens if it ended
       without firing (NaN logits). The candidate is the one with the smallest ``max_entropy``
       (never tested counts as largest; ended by NaN comes last); ties: base first, lower index.
    """
    for candidate in candidates:
        if not candidate.aborted and candidate.ended.tokens:
            return Choice(candidate, tuple(candidate.ended.tokens), True, BLANK)

    def key(candidate: Candidate) -> tuple[bool, float, int, int]:
        entropy = candidate.ended.max_entropy
        return (
            candidate.ended.finish is Finish.NAN,
            math.inf if math.isnan(entropy) else entropy,
            SOURCES.index(candidate.source),
            candidate.index,
        )

    usable = [c for c in candidates if c.aborted and c.ended.tokens]
    if not usable:
        return None
    best = min(usable, key=key)
    tokens = best.ended.tokens
    count = len(tokens) if best.ended.fired_at == 0 else max(1, best.ended.fired_at - 1)
    return Choice(best, tuple(tokens[:count]), False, ABORTED_PREFIX)
