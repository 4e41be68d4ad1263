"""What a scorer is, and how one takes part in a search.

A scorer of one's own needs one method, ``score``: the search calls it in a worker thread
(``scorers/thread.py``). A ``SearchScorer`` does more: it lives through the steps of every problem,
so that one that runs on an engine advances together with the models and keeps the committed steps
cached (``scorers/tree.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcore.search.failures import ProblemFailed, ScorerError, shown
from kvcore.search.ports import Lease, ModelFacts, ModelPort, Ports
from kvcore.search.prompt import DEFAULT_SYSTEM_PROMPT, Prompt, default_unless
from kvcore.search.results import Source


@dataclass(frozen=True)
class ScoreRequest:
    """One candidate step to score, in its context.

    Attributes:
        question: of the problem.
        prefix: texts of the committed steps, in order, each with its separator.
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
    """Judges candidate steps: R(c, s) of KV-Rescue. Called by one thread at a time, unless it has
    an attribute ``max_concurrency`` above 1.
    """

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
        value: reported; of a PRM the probability; None if nobody judged.
        rank: decides; of a PRM the difference of logits, which does not saturate.
        overflow: the candidate does not fit the scorer's context: it cannot be chosen.
    """

    value: float | None
    rank: float
    overflow: bool = False


OVERFLOW = Score(value=None, rank=-math.inf, overflow=True)

Done = Callable[["list[Score] | ScorerError"], None]


@dataclass(frozen=True)
class ScorerContext:
    """Where a search runs its scorer: its models, and how they are prompted.

    Attributes:
        system_prompt: what the search gives its models; None for none.
        template_args: keywords of every chat template.
    """

    ports: Ports
    base: Lease | None = None
    helper: Lease | None = None
    system_prompt: str | None = DEFAULT_SYSTEM_PROMPT
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def system_prompt_for(self, own: str | None, tokenizer: Any) -> str | None:
        """The system prompt of a scorer's model: its own, or the search's if that is the default.

        ``default_unless`` decides about the default where there is no search.
        """
        chosen = self.system_prompt if own == DEFAULT_SYSTEM_PROMPT else own
        return default_unless(chosen, [tokenizer]) if self.base is None else chosen


class SearchScorer:
    """A scorer that takes part in a search.

    ``open`` puts it to work. What it returns is called from the search's thread only, and never
    waits. Per problem: ``begin``, then for each step ``submit`` (its ``done`` called once, later or
    at once), maybe ``claim``, and ``commit``; at last ``end``. Steps without an offered candidate
    are only committed. All sequences are made through leases of the context's ports, which release
    them, and who works in another thread is watched by these ports.
    """

    name: str

    def prompted_model(self) -> ModelFacts | None:
        """The model whose prompt this scorer makes of questions; None if it makes none."""
        return None

    def open(self, context: ScorerContext) -> SearchScorer:
        """This scorer at work in one search, with books of its own.

        Raises:
            ValueError: the search lacks what the scorer needs.
        """
        return self

    def rows(self, num_base: int, num_helper: int) -> tuple[ModelPort, int] | None:
        """The model it runs on and the sequences it holds there for one problem, or None."""
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

    def processed(self, problem: int) -> int:
        """Tokens fed to the scorer's model for this problem so far; 0 for unknown problems."""
        return 0

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
        opened = self.open(ScorerContext(ports=ports))
        try:
            for key, ((question, prefix), members) in enumerate(groups.items()):
                outcome: list[list[Score] | ScorerError] = []
                opened.begin(key, Prompt(question), prefix)
                opened.submit(key, [requests[i] for i in members], outcome.append)
                while not outcome and ports.advance():
                    pass
                results = outcome[0] if outcome else ScorerError(self.name, "the engine stopped")
                if isinstance(results, ScorerError):
                    raise results
                for i, result in zip(members, results, strict=True):
                    if result.value is None:
                        raise ScorerError(self.name, f"request {i} does not fit its context")
                    scores[i] = result.value
                opened.end(key)
        finally:
            ports.close()
        return scores


EngineScorer = SearchScorer  # another name of it


class Unjudged(SearchScorer):
    """In place of a scorer where a step has one candidate: it is the best."""

    name = "none"

    def submit(self, problem: int, requests: Sequence[ScoreRequest], done: Done) -> None:
        done([Score(value=None, rank=0.0)] * len(requests))


def checked_outcome(who: str, outcome: object, count: int) -> Sequence[Score]:
    """Scores that ``who`` may tell of ``count`` requests. Raises ProblemFailed."""
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
