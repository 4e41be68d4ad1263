"""Where an exception ends one problem, and where it ends the search."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from kvcore.search.failures import ProblemFailed, shown, told
from kvcore.search.results import TraceEvent
from kvcore.search.scorers.base import Score, ScorerError
from kvcore.search.trajectory import Trajectory


class Guard:
    """Stands around all that works on one problem.

    Args:
        emit: gets every trace event. What it raises ends the search.
        fail: ends one problem with a reason.
    Attributes:
        broken: what ``emit`` raised.
    """

    def __init__(
        self, emit: Callable[[TraceEvent], None], fail: Callable[[Trajectory, str], None]
    ) -> None:
        self._emit = emit
        self._fail = fail
        self.broken: Exception | None = None

    def tell(self, event: TraceEvent) -> None:
        try:
            self._emit(event)
        except Exception as error:
            self.broken = error
            raise

    @contextlib.contextmanager
    def fate_of(self, trajectory: Trajectory) -> Iterator[None]:
        """An exception inside is this problem's end and does not get out, unless ``emit`` raised
        it.
        """
        try:
            yield
        except Exception as error:
            if self.broken is not None:
                raise self.broken from None
            if not trajectory.retired:
                reason = str(error) if isinstance(error, ProblemFailed) else told(error)
                self._fail(trajectory, reason)

    @contextlib.contextmanager
    def named(self, who: str) -> Iterator[None]:
        """An exception inside becomes a ProblemFailed that names ``who``."""
        try:
            yield
        except Exception as error:
            if self.broken is not None or isinstance(error, ProblemFailed):
                raise
            # Errors of this library name argument, expected and got: their type adds nothing.
            reason = str(error) if type(error) in (ValueError, ScorerError) else told(error)
            reason = reason.removeprefix(f"{who}: ") or type(error).__name__
            raise ProblemFailed(f"{who}: {reason}") from error


def checked_outcome(who: str, outcome: object, count: int) -> Sequence[Score]:
    """Scores that a backend may return for ``count`` requests. Raises ProblemFailed."""
    if isinstance(outcome, ScorerError):
        raise ProblemFailed(str(outcome))
    scores = outcome if isinstance(outcome, (list, tuple)) else []
    if len(scores) != count or not all(isinstance(score, Score) for score in scores):
        raise ProblemFailed(f"{who}: expected {count} scores, got {shown(outcome)}")
    ranks = [score.rank for score in scores if not score.overflow]
    if not all(isinstance(rank, (int, float)) for rank in ranks):
        raise ProblemFailed(f"{who}: expected numbers as ranks, got {shown(ranks)}")
    if any(math.isnan(rank) for rank in ranks):
        raise ProblemFailed(f"{who}: returned NaN among its scores {ranks}")
    return scores
