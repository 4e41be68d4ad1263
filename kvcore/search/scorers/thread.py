"""Scorers of one's own at work: called in threads that nobody has to wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence, Set

from kvcore.search.failures import ScorerError, shown, told
from kvcore.search.scorers.base import (
    Done,
    Score,
    Scorer,
    ScorerContext,
    ScoreRequest,
    SearchScorer,
    Unjudged,
)


class ThreadScorer(SearchScorer):
    """Calls ``scorer.score`` in up to ``scorer.max_concurrency`` threads, in the order of asking.

    The threads are daemons: neither ``close`` nor the end of the process waits for a call that does
    not return. A source of the search's ports: ``wake`` is called, in a worker, when scores have
    come.
    """

    def __init__(self, scorer: Scorer, wake: Callable[[], None]) -> None:
        self.name = scorer_name(scorer)
        self._scorer = scorer
        self._wake = wake
        self._limit = max(1, int(getattr(scorer, "max_concurrency", 1)))
        self._threads = 0
        self._closed = False
        self._asked: queue.SimpleQueue[tuple[int, tuple[ScoreRequest, ...]] | None]
        self._asked = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[int, list[Score] | ScorerError]]
        self._finished = queue.SimpleQueue()
        self._waiting: dict[int, tuple[int, Done]] = {}  # ticket: problem, done
        self._tickets = 0

    def submit(self, problem: int, requests: Sequence[ScoreRequest], done: Done) -> None:
        """Raises RuntimeError if no thread can be started."""
        if self._threads < self._limit:
            name = f"kvcore-scorer-{self._threads}"
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._threads += 1
            except RuntimeError:
                if self._threads == 0:
                    raise
        ticket = self._tickets
        self._tickets += 1
        self._waiting[ticket] = (problem, done)
        self._asked.put((ticket, tuple(requests)))

    def end(self, problem: int) -> None:
        self._waiting = {t: w for t, w in self._waiting.items() if w[0] != problem}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> bool:
        handed = False
        while not self._finished.empty():
            ticket, outcome = self._finished.get()
            _, done = self._waiting.pop(ticket, (0, None))
            if done is not None:
                handed = True
                done(outcome)
        return handed

    def close(self) -> None:
        """Drops the calls that have not begun; does not wait for those that have."""
        self._closed = True
        self._waiting.clear()
        for _ in range(self._threads):
            self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None and not self._closed:
            ticket, requests = asked
            self._finished.put((ticket, self._outcome(requests)))
            self._wake()

    def _outcome(self, requests: tuple[ScoreRequest, ...]) -> list[Score] | ScorerError:
        """Whatever is raised, SystemExit included, is the outcome."""
        try:
            return checked_scores(self.name, self._scorer.score(requests), len(requests))
        except BaseException as error:
            return ScorerError(self.name, told(error))


def checked_scores(name: str, values: Sequence[float], count: int) -> list[Score] | ScorerError:
    """Scores of a user's return value, which may be NaN, or the error that it is. Iterating it may
    raise.
    """
    unordered = (str, bytes, bytearray, Mapping, Set)
    try:
        listed = None if isinstance(values, unordered) else list(values)
    except TypeError:
        listed = None
    if listed is None:
        return ScorerError(name, f"expected {count} numbers, got {type(values).__name__}")
    if len(listed) != count:
        return ScorerError(name, f"expected {count} scores, got {len(listed)}")
    try:
        numeric = [float(value) for value in listed if not isinstance(value, (str, bytes))]
    except Exception:  # whatever a user's class raises when it is asked for a number
        numeric = []
    if len(numeric) != count:
        return ScorerError(name, f"expected numbers, got {shown(listed)}")
    return [Score(value=value, rank=value) for value in numeric]


def scorer_name(scorer: object) -> str:
    """``scorer.name`` if it is a string, else the class name."""
    name = getattr(scorer, "name", None)
    return name if isinstance(name, str) and name else type(scorer).__name__


def open_scorer(scorer: Scorer | None, context: ScorerContext) -> SearchScorer:
    """Puts any scorer to work; None where a step has one candidate.

    Raises:
        TypeError: it has no ``score`` method.
        ValueError: it needs something this search does not have.
    """
    if scorer is None:
        return Unjudged()
    if isinstance(scorer, SearchScorer):
        return scorer.open(context)
    if not callable(getattr(scorer, "score", None)):
        raise TypeError(f"scorer: expected an object with a score method, got {scorer!r}")
    opened = ThreadScorer(scorer, context.ports.wake)
    context.ports.watch(opened)
    return opened
