"""Scoring on an engine: a root per problem that holds the committed steps, a fork per candidate.

Only a candidate's own tokens are fed when it is scored; the root then becomes the winner's fork.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvcore.engine.events import FeedOutput, StepEvent
from kvcore.search.failures import ScorerError, told
from kvcore.search.ports import Handler, Lease, ModelPort
from kvcore.search.scorers.base import (
    OVERFLOW,
    Done,
    Score,
    ScorerContext,
    ScoreRequest,
    SearchScorer,
)


@dataclass
class Round:
    """One step's candidates under way."""

    requests: Sequence[ScoreRequest]
    done: Done
    scores: list[Score | None]
    children: dict[int, int] = field(default_factory=dict)  # request -> sequence
    tokens: dict[int, list[int]] = field(default_factory=dict)  # request -> ids fed
    started: bool = False


@dataclass
class Tree:
    """One problem on the scorer's engine.

    ``owned`` is False when the root is the helper's sequence, which the search keeps up to date.
    """

    root: int
    owned: bool
    length: int  # tokens of an owned root, those under way included
    ready: bool
    processed: int
    round: Round | None = None
    failure: str | None = None


class TreeScorer(SearchScorer, ABC):
    """Common part of scorers that read values of teacher-forced candidates.

    Attributes:
        output: which values.
        reserve: tokens that a candidate costs beyond its own.
    """

    output: FeedOutput
    reserve: int
    _lease: Lease
    _trees: dict[int, Tree]

    def open(self, context: ScorerContext) -> TreeScorer:
        opened = copy.copy(self)
        opened._trees = {}
        opened._lease = opened.join(context)
        return opened

    @abstractmethod
    def join(self, context: ScorerContext) -> Lease:
        """The model that candidates are fed to. Settles how questions are put to it.

        Raises:
            ValueError: the search has no such model, or it cannot be asked that way.
        """

    @abstractmethod
    def ids(self, step: ScoreRequest) -> list[int]:
        """What is fed for a step, candidate or committed."""

    @abstractmethod
    def read(self, values: torch.Tensor) -> Score:
        """The score from what the engine returned for a candidate."""

    def known(self, request: ScoreRequest) -> Score | None:
        """The score of a candidate that needs no forward."""
        return None

    def rows(self, num_base: int, num_helper: int) -> tuple[ModelPort, int] | None:
        return self._lease.port, 1 + num_base + num_helper

    def plant(self, problem: int, ids: Sequence[int]) -> None:
        """Starts an own root. Raises ValueError if it does not fit."""
        limit = self._lease.port.context_len
        if len(ids) >= limit:
            raise ValueError(f"scorer {self.name!r}: prompt has {len(ids)} tokens, limit {limit}")
        root = self._lease.add(ids, self._root_handler(problem))
        self._trees[problem] = Tree(root, True, len(ids), False, len(ids))

    def plant_on(self, problem: int, root: int) -> None:
        """Works on forks of the caller's root, which is ready whenever candidates are submitted."""
        self._trees[problem] = Tree(root, False, 0, True, 0)

    def room(self, problem: int) -> int | None:
        tree = self._trees[problem]
        if not tree.owned:
            return None
        return self._lease.port.context_len - tree.length - self.reserve

    def submit(self, problem: int, requests: Sequence[ScoreRequest], done: Done) -> None:
        tree = self._trees[problem]
        assert tree.round is None
        tree.round = Round(requests, done, [None] * len(requests))
        if tree.failure is not None:
            self._fail(tree, tree.failure)
        elif tree.ready:
            self._start(problem, tree)

    def claim(self, problem: int, index: int) -> int | None:
        tree = self._trees[problem]
        if tree.owned or tree.round is None:
            return None
        return tree.round.children.pop(index, None)

    def commit(self, problem: int, index: int | None, step: ScoreRequest) -> None:
        tree = self._trees[problem]
        finished, tree.round = tree.round, None
        chosen = None
        if finished is not None:
            if tree.owned and index is not None:
                chosen = finished.children.pop(index, None)
            self._release(finished)
        if not tree.owned:
            return
        if chosen is not None:
            assert finished is not None and index is not None
            self._lease.adopt(tree.root, chosen)
            tree.length += len(finished.tokens[index])
            return
        ids = self.ids(step)
        tree.length += len(ids)
        # A step that does not fit ends the problem: room() has told the search.
        if ids and tree.length <= self._lease.port.context_len:
            tree.processed += len(ids)
            tree.ready = False
            self._lease.extend(tree.root, ids)

    def end(self, problem: int) -> None:
        tree = self._trees.pop(problem, None)
        if tree is None:
            return
        if tree.round is not None:
            self._release(tree.round)
        if tree.owned:
            self._lease.release(tree.root)

    def processed(self, problem: int) -> int:
        tree = self._trees.get(problem)
        return 0 if tree is None else tree.processed

    def _start(self, problem: int, tree: Tree) -> None:
        current = tree.round
        assert current is not None
        current.started = True
        try:
            self._feed_candidates(problem, tree, current)
        except Exception as error:  # of these candidates: a text, an id that the model lacks
            self._fail(tree, told(error))
            return
        self._finish_if_complete(tree)

    def _feed_candidates(self, problem: int, tree: Tree, current: Round) -> None:
        limit = self._lease.port.context_len
        for i, request in enumerate(current.requests):
            current.scores[i] = self.known(request)
            if current.scores[i] is None:
                ids = self.ids(request)
                if not ids:  # nothing to judge: last choice
                    current.scores[i] = Score(value=-math.inf, rank=-math.inf)
                elif tree.length + len(ids) > limit:
                    current.scores[i] = OVERFLOW
                else:
                    current.tokens[i] = ids
        if current.tokens:
            handlers = [self._child_handler(problem, tree, i) for i in current.tokens]
            children = self._lease.fork(tree.root, [None] * len(handlers), handlers)
            for (i, ids), child in zip(current.tokens.items(), children, strict=True):
                current.children[i] = child
                tree.processed += len(ids)
                self._lease.extend(child, ids, self.output)

    def _root_handler(self, problem: int) -> Handler:
        def handle(event: StepEvent) -> None:
            tree = self._trees[problem]
            if event.error is not None:
                tree.failure = event.error
                if tree.round is not None:
                    self._fail(tree, event.error)
            elif event.extended:
                tree.ready = True
                if tree.round is not None and not tree.round.started:
                    self._start(problem, tree)

        return handle

    def _child_handler(self, problem: int, tree: Tree, index: int) -> Callable[[StepEvent], None]:
        def handle(event: StepEvent) -> None:
            current = tree.round
            if current is None or self._trees.get(problem) is not tree:
                return
            if event.error is not None:
                self._fail(tree, event.error)
            elif event.extended and event.values is not None:
                try:
                    current.scores[index] = self.read(event.values)
                except Exception as error:
                    self._fail(tree, told(error))
                    return
                self._finish_if_complete(tree)

        return handle

    def _finish_if_complete(self, tree: Tree) -> None:
        current = tree.round
        assert current is not None
        scores = [score for score in current.scores if score is not None]
        if len(scores) == len(current.requests):
            current.done(scores)

    def _fail(self, tree: Tree, reason: str) -> None:
        assert tree.round is not None
        failed, tree.round = tree.round, None
        self._release(failed)
        failed.done(ScorerError(self.name, reason))

    def _release(self, finished: Round) -> None:
        for child in finished.children.values():
            self._lease.release(child)
        finished.children.clear()
