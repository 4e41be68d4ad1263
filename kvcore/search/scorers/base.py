"""What a scorer is, and the two ways a search talks to one.

A scorer of one's own needs one method, ``score``. The search calls it in a worker thread, so that
other problems go on; it is called by one thread at a time unless it has an attribute
``max_concurrency`` above 1. Scorers that run on an engine of this library implement ``Backend``
instead: they advance together with the models and keep the committed steps cached.
"""

from __future__ import annotations

import math
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvcore.search.failures import shown, told
from kvcore.search.ports import EnginePort, Ports
from kvcore.search.prompt import DEFAULT_SYSTEM_PROMPT, Prompt, default_unless
from kvcore.search.results import Source
from kvcore.search.workers import Workers

if TYPE_CHECKING:
    from kvcore.engine import Engine
    from kvcore.models import LoadedModel


@dataclass(frozen=True)
class ScoreRequest:
    """One candidate step to score, in its context.

    Attributes:
        question: of the problem.
        prefix: texts of the committed steps, in order, each with its delimiter.
        text: of the candidate, special tokens excluded.
        ends: the candidate ends with an eos: it would end the solution.
        tokens: its ids in the vocabulary of its source.
        source: the model that wrote it.
        mean_logprob: nats per token under the model that wrote it.
        problem, step, index: the problem's key, the step's number, the place among its source's.
        data: the candidate's bytes, of which ``text`` is the decoding.
    """

    question: str
    prefix: tuple[str, ...]
    text: str
    ends: bool = False
    tokens: tuple[int, ...] = ()
    source: Source = "base"
    mean_logprob: float = math.nan
    problem: int = 0
    step: int = 0
    index: int = 0
    data: bytes = b""


class Scorer(Protocol):
    """Judges candidate steps: R(c, s) of KV-Rescue."""

    def score(self, requests: Sequence[ScoreRequest]) -> Sequence[float]:
        """Scores candidates of one problem's one step. Higher is better.

        Returns:
            One number per request, in order, none of them NaN.
        Raises:
            Exception: ends this problem with an error that names the scorer; others go on.
        """
        ...


@dataclass(frozen=True)
class Score:
    """A candidate's score.

    Attributes:
        value: reported; of a PRM the probability.
        rank: decides; of a PRM the difference of logits, which does not saturate.
        overflow: the candidate does not fit the scorer's context: it cannot be chosen.
    """

    value: float
    rank: float
    overflow: bool = False


OVERFLOW = Score(value=math.nan, rank=-math.inf, overflow=True)


class ScorerError(Exception):
    """A scorer failed; says which and why. Ends the problem it was asked about."""

    def __init__(self, scorer: str, reason: str) -> None:
        super().__init__(f"scorer {scorer!r}: {reason}")


Done = Callable[["list[Score] | ScorerError"], None]


@dataclass(frozen=True)
class ScorerContext:
    """Where a search runs its scorer: the ports of its engines, and how its models are prompted.

    Attributes:
        system_prompt: what the search gives its models; None for none.
        template_args: keywords of every chat template.
    """

    ports: Ports
    base: EnginePort | None = None
    helper: EnginePort | None = None
    system_prompt: str | None = DEFAULT_SYSTEM_PROMPT
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def system_prompt_for(self, own: str | None, tokenizer: Any) -> str | None:
        """The system prompt of a scorer's model: its own, or the search's if that is the default.

        ``default_unless`` decides about the default where there is no search.
        """
        chosen = self.system_prompt if own == DEFAULT_SYSTEM_PROMPT else own
        return default_unless(chosen, [tokenizer]) if self.base is None else chosen


class Backend:
    """A scorer at work in one search. Called from the search's thread only; never blocks.

    Per problem: ``begin``, then for each step ``submit`` (its ``done`` called once, later or at
    once), maybe ``claim``, and ``commit``; at last ``end``. Steps without an offered candidate are
    only committed. All sequences a backend makes go through the ports of its context.
    """

    name: str

    def rows(self, num_base: int, num_helper: int) -> tuple[Engine, int] | None:
        """The engine it runs on and the sequences it holds there for one problem, or None."""
        return None

    def begin(
        self, problem: int, prompt: Prompt, prefix: Sequence[str] = (), root: int | None = None
    ) -> None:
        """Makes ready for a problem.

        Args:
            prefix: steps already committed.
            root: the helper's sequence of the trajectory, for scorers that work on it.
        Raises:
            ValueError: the prompt does not fit the scorer's context.
        """

    def room(self, problem: int) -> int | None:
        """Tokens that the next step may have before the scorer's context is full; None: any."""
        return None

    def submit(self, problem: int, requests: Sequence[ScoreRequest], done: Done) -> None:
        """Starts scoring one step's candidates."""
        raise NotImplementedError

    def claim(self, problem: int, index: int) -> int | None:
        """A sequence of the helper that holds request ``index`` of the last submit, or None.

        The caller takes it over (adopts it), which saves feeding the step to the helper again.
        """
        return None

    def commit(self, problem: int, index: int | None, step: ScoreRequest) -> None:
        """Takes a committed step.

        Args:
            index: which request of the last submit it was; None if it was none of them as a whole.
            step: what was committed, as a request.
        """

    def end(self, problem: int) -> None:
        """Forgets a problem, also one whose scores are awaited: ``done`` is then not called."""

    @property
    def busy(self) -> bool:
        """True while scores are awaited that do not come through an engine."""
        return False

    def poll(self, timeout: float = 0.0) -> bool:
        """Hands out scores that came from elsewhere; waits up to ``timeout`` seconds for one."""
        return False

    def processed(self, problem: int) -> int:
        """Tokens fed to the scorer's engine for this problem so far; 0 for unknown problems."""
        return 0

    def close(self) -> None:
        """Stops; sequences are released by the ports."""


class EngineScorer(ABC):
    """A scorer that runs on an engine. ``open`` puts it to work in one search."""

    name: str

    def prompted_model(self) -> LoadedModel | None:
        """The model whose prompt this scorer makes of questions; None if it makes none."""
        return None

    @abstractmethod
    def open(self, context: ScorerContext) -> Backend:
        """Raises ValueError if the search lacks what the scorer needs."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[float]:
        """Scores requests outside a search; each distinct context is fed once.

        Blocks, and steps the scorer's engine. Releases what it allocated. Source and ids of the
        requests are not looked at: texts are encoded with the scorer's own tokenizer.
        Raises:
            ScorerError: a candidate could not be scored (for instance it does not fit).
        """
        groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault((request.question, request.prefix), []).append(i)
        scores: list[float] = [math.nan] * len(requests)
        ports = Ports()
        backend = self.open(ScorerContext(ports=ports))
        try:
            for key, ((question, prefix), members) in enumerate(groups.items()):
                outcome: list[list[Score] | ScorerError] = []
                backend.begin(key, Prompt(question), prefix)
                backend.submit(key, [requests[i] for i in members], outcome.append)
                while not outcome and ports.step():
                    pass
                results = outcome[0] if outcome else ScorerError(self.name, "the engine stopped")
                if isinstance(results, ScorerError):
                    raise results
                for i, result in zip(members, results, strict=True):
                    if result.overflow:
                        raise ScorerError(self.name, f"request {i} does not fit its context")
                    scores[i] = result.value
                backend.end(key)
        finally:
            backend.close()
            ports.close()
        return scores


class ThreadBackend(Backend):
    """Calls a user's ``score`` in worker threads, which nothing waits for when the search ends."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.name = scorer_name(scorer)
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
        self._workers.run(lambda: self._finished.put((ticket, self._outcome(given))))

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def poll(self, timeout: float = 0.0) -> bool:
        handed = False
        while self._waiting:
            try:
                wait = timeout > 0 and not handed
                item = self._finished.get(block=wait, timeout=timeout if wait else None)
            except queue.Empty:
                break
            ticket, outcome = item
            waiting = self._waiting.pop(ticket, None)
            if waiting is not None:
                handed = True
                waiting[1](outcome)
        return handed

    def end(self, problem: int) -> None:
        self._waiting = {t: w for t, w in self._waiting.items() if w[0] != problem}

    def close(self) -> None:
        # A call that runs cannot be stopped; it is not waited for.
        self._waiting.clear()
        self._workers.close()

    def _outcome(self, requests: tuple[ScoreRequest, ...]) -> list[Score] | ScorerError:
        """Runs in a worker. Whatever is raised there, SystemExit included, is the outcome."""
        try:
            return checked_scores(self.name, self._scorer.score(requests), len(requests))
        except BaseException as error:
            return ScorerError(self.name, told(error))


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


def scorer_model(scorer: object) -> LoadedModel | None:
    """The model that ``scorer`` gives questions to, if it is an engine scorer with such a one."""
    return scorer.prompted_model() if isinstance(scorer, EngineScorer) else None


def open_scorer(scorer: Scorer | EngineScorer, context: ScorerContext) -> Backend:
    """Puts any scorer to work.

    Raises:
        TypeError: it has no ``score`` method.
        ValueError: it needs something this search does not have.
    """
    if isinstance(scorer, EngineScorer):
        return scorer.open(context)
    if not callable(getattr(scorer, "score", None)):
        raise TypeError(f"scorer: expected an object with a score method, got {scorer!r}")
    return ThreadBackend(scorer)
