"""How one problem goes from step to step, on engines that it shares with others.

Everything here is driven by events: a root that is ready starts the candidates of its model, the
last candidate to end asks the scorer, the scores commit a step, the commit feeds the roots again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcore.config import SearchConfig
from kvcore.engine.events import Finish, GenerateSpec, Generation, StepEvent
from kvcore.native import _C
from kvcore.search import rescue
from kvcore.search.ports import EnginePort, Handler
from kvcore.search.prompt import Prompt, Translator, prompt_ids
from kvcore.search.results import (
    FinishReason,
    ProblemEnded,
    ProblemStarted,
    Solution,
    Source,
    Step,
    TraceEvent,
)
from kvcore.search.scorers.base import Backend, Score, ScorerError
from kvcore.search.trajectory import SOURCES, Candidate, Side, Trajectory

_BLOCK_SLOTS = 16  # footprints change at most this often


def candidate_key(seed: int, problem: int, step: int, source: Source, index: int) -> int:
    """Key of one candidate's random numbers, u64."""
    key = seed
    for word in (problem, step, SOURCES.index(source), index):
        key = _C.hash_key(key, word)
    return key


@dataclass(frozen=True)
class Model:
    """One of the search's models: its engine and how many candidates it gives per step."""

    port: EnginePort
    num_candidates: int


class Stepper:
    """Takes problems from their prompt to their solution.

    Args:
        models: base, and the helper if there is one.
        translators: by (from, to), for steps that one model wrote and the other must read.
        emit: gets every trace event.
        solved: gets every solution, once.
    """

    def __init__(
        self,
        models: Mapping[Source, Model],
        translators: Mapping[tuple[Source, Source], Translator],
        backend: Backend,
        config: SearchConfig,
        *,
        system_prompt: str | None,
        template_args: Mapping[str, Any] | None = None,
        emit: Callable[[TraceEvent], None],
        solved: Callable[[Solution], None],
    ) -> None:
        self._models = models
        self._translators = translators
        self._backend = backend
        self._config = config
        self._system_prompt = system_prompt
        self._template_args = template_args
        self._emit = emit
        self._solved = solved
        self.active: dict[int, Trajectory] = {}

    def admit(self, order: int, prompt: Prompt) -> None:
        """Starts a problem; ``order`` names it here. A prompt that does not fit ends it at once."""
        assert prompt.key is not None
        trajectory = Trajectory(order, prompt.key, prompt)
        self.active[order] = trajectory
        ids = {
            source: prompt_ids(
                model.port.engine.model.tokenizer,
                prompt,
                self._system_prompt,
                self._template_args,
            )
            for source, model in self._models.items()
        }
        trajectory.base_length = len(ids["base"])
        self._emit(
            ProblemStarted(
                trajectory.key, prompt.question, len(ids["base"]), len(ids.get("helper", []))
            )
        )
        for source, tokens in ids.items():
            limit = min(self._models[source].port.engine.context_len, self._config.max_tokens)
            if not 0 < len(tokens) < limit:
                self._fail(
                    trajectory,
                    f"question: expected 1 to {limit - 1} prompt tokens for the {source} model, "
                    f"got {len(tokens)}",
                )
                return
        for source, model in self._models.items():
            handler = self._root_handler(trajectory, source)
            root = model.port.add(ids[source], handler)
            trajectory.sides[source] = Side(
                source,
                model.port,
                model.num_candidates,
                root,
                length=len(ids[source]),
                processed=len(ids[source]),
            )
        helper = trajectory.sides.get("helper")
        try:
            self._backend.begin(order, prompt, root=helper.root if helper else None)
        except ValueError as error:
            self._fail(trajectory, str(error))
            return
        if self._room(trajectory) < 1:
            self._fail(trajectory, "question: its prompt fills the scorer's context")

    def interrupt(self) -> None:
        """Ends all problems with what they have. Releases nothing."""
        for trajectory in list(self.active.values()):
            trajectory.retired = True
            trajectory.scorer_tokens = self._backend.processed(trajectory.order)
            self._solved(self._solution(trajectory, "interrupted", None))
        self.active.clear()

    # Candidates.

    def _root_handler(self, trajectory: Trajectory, source: Source) -> Handler:
        def handle(event: StepEvent) -> None:
            if event.error is not None:
                self._fail(trajectory, f"{source} model: {event.error}")
            elif event.extended:
                side = trajectory.sides[source]
                side.ready = True
                self._tell_step(trajectory)
                self._start(trajectory, side)
                self._score(trajectory)

        return handle

    def _room(self, trajectory: Trajectory) -> int:
        """Tokens that the next step may have."""
        rooms = [
            min(side.port.engine.context_len, self._config.max_tokens) - side.length
            for side in trajectory.sides.values()
        ]
        scorer = self._backend.room(trajectory.order)
        return min(rooms if scorer is None else [*rooms, scorer])

    def _start(self, trajectory: Trajectory, side: Side) -> None:
        """Forks the step's candidates from a root that is ready."""
        side.started = True
        side.candidates = [Candidate(side.source, i) for i in range(side.num_candidates)]
        if not side.candidates:
            return
        config, step = self._config, len(trajectory.steps)
        longest = min(config.sampling.max_new_tokens, self._room(trajectory))
        sampling = replace(config.sampling, max_new_tokens=longest)
        specs = [
            GenerateSpec(
                sampling=sampling,
                rng_key=candidate_key(config.seed, trajectory.key, step, side.source, i),
                stop_at_step=True,
                detect=side.source == "base" and config.detector is not None,
            )
            for i in range(side.num_candidates)
        ]
        handlers = [self._candidate_handler(trajectory, side, c) for c in side.candidates]
        children = side.port.fork(side.root, specs, handlers)
        for candidate, seq in zip(side.candidates, children, strict=True):
            candidate.seq = seq

    def _candidate_handler(
        self, trajectory: Trajectory, side: Side, candidate: Candidate
    ) -> Handler:
        def handle(event: StepEvent) -> None:
            if event.error is not None:
                self._fail(trajectory, f"{side.source} model: {event.error}")
                return
            candidate.seen += event.token is not None
            ended = event.generation
            if ended is None:
                if side.source == "base" and candidate.seen % _BLOCK_SLOTS == 0:
                    assert candidate.seq is not None
                    trajectory.note_footprint(candidate.seq)
                return
            self._end(trajectory, side, candidate, ended)

        return handle

    def _end(
        self, trajectory: Trajectory, side: Side, candidate: Candidate, ended: Generation
    ) -> None:
        """A candidate is complete. A degenerate one gives its blocks back at once."""
        assert candidate.seq is not None
        candidate.generation = ended
        candidate.seen = len(ended.tokens)
        candidate.cache_slots = side.port.engine.cache_len(candidate.seq)
        candidate.kv_bytes = side.port.engine.kv_bytes(candidate.seq)
        if side.source == "base":
            trajectory.note_footprint(candidate.seq)
        if candidate.aborted:
            trajectory.count_abort(ended.finish)
            side.release_candidate(candidate)
        self._score(trajectory)

    # Scores.

    def _score(self, trajectory: Trajectory) -> None:
        """Asks the scorer once all candidates have ended and all roots can be forked."""
        if trajectory.scoring or not (trajectory.all_ended and trajectory.all_ready):
            return
        trajectory.scoring = True
        candidates = trajectory.candidates
        trajectory.offered = rescue.pool(candidates)
        if not trajectory.offered:
            choice = rescue.fallback(candidates)
            if choice is None:
                self._fail(trajectory, "no candidate has a token: the logits are not finite")
            else:
                self._commit(trajectory, choice, None)
            return
        for candidate in candidates:
            if candidate not in trajectory.offered:
                trajectory.sides[candidate.source].release_candidate(candidate)
        requests = [trajectory.request(c) for c in trajectory.offered]
        self._backend.submit(
            trajectory.order, requests, lambda outcome: self._on_scores(trajectory, outcome)
        )

    def _on_scores(self, trajectory: Trajectory, outcome: list[Score] | ScorerError) -> None:
        if isinstance(outcome, ScorerError):
            self._fail(trajectory, str(outcome))
            return
        offered = trajectory.offered
        fits = [i for i, score in enumerate(outcome) if not score.overflow]
        ranks = [outcome[i].rank for i in fits]
        if any(math.isnan(rank) for rank in ranks):
            error = ScorerError(self._backend.name, f"returned NaN among its scores {ranks}")
            self._fail(trajectory, str(error))
            return
        for i in fits:
            offered[i].score = outcome[i].value
        if not fits:
            self._retire(trajectory, "max_tokens")
            return
        best = fits[rescue.choose([offered[i] for i in fits], ranks)]
        self._commit(trajectory, rescue.take(offered[best]), best)

    # The step.

    def _commit(self, trajectory: Trajectory, choice: rescue.Choice, request: int | None) -> None:
        """Makes a choice the next step; ``request`` is its place among the offered, if it was.

        The winner's cache is taken over and the other model is fed the ids. A step that ends the
        problem is not fed: nobody would read it.
        """
        chosen = choice.candidate
        own = trajectory.sides[chosen.source]
        data = chosen.ended.text if choice.whole else own.port.engine.text(choice.tokens)
        ends = choice.whole and chosen.ended.finish is Finish.EOS
        ids: dict[Source, list[int]] = {chosen.source: list(choice.tokens)}
        for source in trajectory.sides:
            if source != chosen.source:
                carrier = self._translators[chosen.source, source]
                ids[source] = carrier.ids(choice.tokens, data, ends=ends)
        self._tell_candidates(trajectory, chosen)
        committed = trajectory.request(chosen, choice.tokens, data)
        trajectory.append(
            Step(
                source=chosen.source,
                index=chosen.index,
                text=committed.text,
                tokens=tuple(ids["base"]),
                score=chosen.score,
                finish=chosen.ended.finish.value,
                flag=choice.flag,
            ),
            data,
        )

        claimed = None
        if request is not None and chosen.source == "base" and "helper" in trajectory.sides:
            claimed = self._backend.claim(trajectory.order, request)
        for side in trajectory.sides.values():
            winner = chosen if side is own and choice.whole else None
            side.close_step(winner, claimed if side is not own else None)
            side.length += len(ids[side.source])
        self._backend.commit(trajectory.order, request, committed)

        finish = self._finish(trajectory, ends)
        if finish is not None:
            self._tell_step(trajectory, force=True)
            self._retire(trajectory, finish)
            return
        for side in trajectory.sides.values():
            side.feed(ids[side.source])
        self._tell_step(trajectory)
        for side in trajectory.sides.values():
            if side.ready:
                self._start(trajectory, side)
        self._score(trajectory)

    def _finish(self, trajectory: Trajectory, ends: bool) -> FinishReason | None:
        """Why a problem is over after its last step; None if it goes on."""
        if ends:
            return "eos"
        if len(trajectory.steps) >= self._config.max_steps:
            return "max_steps"
        return "max_tokens" if self._room(trajectory) < 1 else None

    # The end.

    def _fail(self, trajectory: Trajectory, reason: str) -> None:
        self._retire(trajectory, "error", reason)

    def _retire(
        self, trajectory: Trajectory, finish: FinishReason, error: str | None = None
    ) -> None:
        assert not trajectory.retired
        trajectory.retired = True
        self._tell_candidates(trajectory, None)
        trajectory.note_base_cache()
        trajectory.scorer_tokens = self._backend.processed(trajectory.order)
        self._backend.end(trajectory.order)
        for side in trajectory.sides.values():
            side.release()
        del self.active[trajectory.order]
        solution = self._solution(trajectory, finish, error)
        self._emit(ProblemEnded(solution))
        self._solved(solution)

    def _solution(
        self, trajectory: Trajectory, finish: FinishReason, error: str | None
    ) -> Solution:
        per_token = self._models["base"].port.engine.model.kv_bytes_per_token
        return trajectory.solution(finish, error, per_token)

    def _tell_candidates(self, trajectory: Trajectory, chosen: Candidate | None) -> None:
        for candidate in trajectory.candidates:
            if candidate.generation is not None:
                self._emit(trajectory.candidate_event(candidate, chosen=candidate is chosen))

    def _tell_step(self, trajectory: Trajectory, *, force: bool = False) -> None:
        """Emits the last step once both models hold it; at once (``force``) if they never will."""
        trajectory.note_base_cache()
        if trajectory.untold and (force or trajectory.all_ready):
            trajectory.untold = False
            self._emit(trajectory.step_event())
