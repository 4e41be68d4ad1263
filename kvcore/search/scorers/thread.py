"""Scorers of one's own at work: called in threads that nobody has to wait for."""

from __future__ import annotations

import math
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

_Task = Callable[[], None]


class Workers:
    """Runs tasks in up to ``limit`` threads, in the order given.

    The threads are daemons: neither ``close`` nor the end of the process waits for a task that does
    not return. Started when there is something to do.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def run(self, task: _Task) -> None:
        """Queues a task, which must not raise. Raises RuntimeError if no thread can be started."""
        if len(self._threads) < self._limit:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:
                if not self._threads:
                    raise
        self._tasks.put(task)

    def close(self) -> None:
        """Drops the tasks that have not begun; does not wait for those that have."""
        self._closed.set()
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None or self._closed.is_set():
                return
            task()
            del task  # what it holds may go while the thread waits


class ThreadScorer(SearchScorer):
    """Calls ``scorer.score`` in worker threads, which nothing waits for when the search ends.

    A source of the search's ports: ``wake`` is called, in a worker, when scores have come.
    """

    def __init__(self, scorer: Scorer, wake: Callable[[], None]) -> None:
        self.name = scorer_name(scorer)
        self._scorer = scorer
        self._wake = wake
        limit = max(1, int(getattr(scorer, "max_concurrency", 1)))
        self._workers = Workers(limit, "kvcore-scorer")
        self._finished: queue.SimpleQueue[tuple[int, list[Score] | ScorerError]]
        self._finished = queue.SimpleQueue()
        self._waiting: dict[int, tuple[int, Done]] = {}  # ticket: problem, done
        self._tickets = 0

    def submit(self, problem: int, requests: Sequence[ScoreRequest], done: Done) -> None:
        ticket, given = self._tickets, tuple(requests)
        self._tickets += 1
        self._waiting[ticket] = (problem, done)
        self._workers.run(lambda: self._answer(ticket, given))

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
        # A call that runs cannot be stopped; it is not waited for.
        self._waiting.clear()
        self._workers.close()

    def _answer(self, ticket: int, requests: tuple[ScoreRequest, ...]) -> None:
        """Runs in a worker. Whatever is raised there, SystemExit included, is the outcome."""
        outcome: list[Score] | ScorerError
        try:
            outcome = checked_scores(self.name, self._scorer.score(requests), len(requests))
        except BaseException as error:
            outcome = ScorerError(self.name, told(error))
        self._finished.put((ticket, outcome))
        self._wake()


def checked_scores(name: str, values: Sequence[float], count: int) -> list[Score] | ScorerError:
    """Scores of a user's return value, or the error that it is. Iterating it may raise."""
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
    if any(math.isnan(value) for value in numeric):
        return ScorerError(name, f"returned NaN among its scores {numeric}")
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
