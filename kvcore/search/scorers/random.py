"""Random scores: the control that any other scorer must beat."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.native import _C
from kvcore.search.scorers.base import ScoreRequest

_SOURCES = {"base": 0, "helper": 1}


class RandomScorer:
    """Uniform scores in [0, 1), a function of (seed, problem, step, source, index) alone."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def score(self, requests: Sequence[ScoreRequest]) -> list[float]:
        """A number in [0, 1) for each request."""
        return [self._score(request) for request in requests]

    def _score(self, request: ScoreRequest) -> float:
        key = self.seed
        for word in (request.problem, request.step, _SOURCES[request.source], request.index):
            key = _C.hash_key(key, word)
        return (key >> 11) / 2.0**53
