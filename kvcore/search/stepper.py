"""How one problem goes from step to step, on engines that it shares with others.

Everything here is driven by events: a root that is ready starts the candidates of its model, the
last candidate to end asks the scorer, the scores commit a step, the commit feeds the roots again.

Whatever raises on the way (tokenizers, templates, scorers, engines that refuse) ends the problem it
was asked for, and no other. Only ``emit`` ends the search.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcore.config import SearchConfig
from kvcore.engine.events import Finish, GenerateSpec, Generation, StepEvent
from kvcore.native import _C
from kvcore.search import rescue
from kvcore.search.failures import ProblemFailed, lone_surrogate
from kvcore.search.guard import Guard, checked_outcome
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
    Warned,
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
        self._solved = solved
        self._guard = Guard(emit, self._fail)
        self.active: dict[int, Trajectory] = {}

    def admit(self, order: int, prompt: Prompt) -> None:
        """Starts a problem; ``order`` names it here. A prompt that does not fit ends it at once."""
        assert prompt.key is not None
        trajectory = Trajectory(order, prompt.key, prompt)
        self.active[order] = trajectory
        ids: dict[Source, list[int]] = {}
        failure = None
        try:
            for source in self._models:
                ids[source] = self._prompt_ids(source, prompt)
        except ProblemFailed as error:
            failure = str(error)
        trajectory.base_length = len(ids.get("base", []))
        self._guard.tell(
            ProblemStarted(
                trajectory.key,
                prompt.question,
                len(ids.get("base", [])),
                len(ids.get("helper", [])),
            )
        )
        if failure is not None:
            self._fail(trajectory, failure)
            return
        with self._guard.fate_of(trajectory):
            self._plant(trajectory, ids)

    def _prompt_ids(self, source: Source, prompt: Prompt) -> list[int]:
        """The prompt of one model. Raises ProblemFailed."""
        text = prompt.question if prompt.text is None else prompt.text
        place = lone_surrogate(text) if isinstance(text, str) else None
        if place is not None:
            raise ProblemFailed(
                "question: expected text that has a UTF-8 form, "
                f"got the lone surrogate {text[place]!r} at {place}"
            )
        engine = self._models[source].port.engine
        with self._guard.named(f"question: no prompt for the {source} model"):
            ids = prompt_ids(
                engine.model.tokenizer, prompt, self._system_prompt, self._template_args
            )
        limit = self._limit(source)
        if not 0 < len(ids) < limit:
            raise ProblemFailed(
                f"question: expected 1 to {limit - 1} prompt tokens for the {source} model, "
                f"got {len(ids)}"
            )
        return ids

    def _plant(self, trajectory: Trajectory, ids: Mapping[Source, list[int]]) -> None:
        """Starts the roots and tells the scorer."""
        for source, model in self._models.items():
            with self._guard.named(f"{source} model"):
                root = model.port.add(ids[source], self._root_handler(trajectory, source))
            trajectory.sides[source] = Side(
                source,
                model.port,
                model.num_candidates,
                root,
                length=len(ids[source]),
                processed=len(ids[source]),
            )
        helper = trajectory.sides.get("helper")
        with self._scorer_named():
            self._backend.begin(
                trajectory.order, trajectory.prompt, root=helper.root if helper else None
            )
        if self._room(trajectory) < 1:
            raise ProblemFailed("question: its prompt fills the scorer's context")

    def interrupt(self) -> None:
        """Ends all problems with what they have. Releases nothing.

        What ``emit`` raises is dropped: the search ends for a reason of its own.
        """
        for trajectory in list(self.active.values()):
            trajectory.retired = True
            with contextlib.suppress(Exception):
                trajectory.scorer_tokens = self._backend.processed(trajectory.order)
            step = self._untold_step(trajectory)
            solution = self._solution(trajectory, "interrupted", None)
            self._solved(solution)
            del self.active[trajectory.order]
            if self._guard.broken is None:
                with contextlib.suppress(Exception):
                    self._tell_end(trajectory, step, solution)

    def _scorer_named(self) -> contextlib.AbstractContextManager[None]:
        return self._guard.named(f"scorer {self._backend.name!r}")

    # Candidates.

    def _root_handler(self, trajectory: Trajectory, source: Source) -> Handler:
        def handle(event: StepEvent) -> None:
            if trajectory.retired:  # its root could not be released
                return
            with self._guard.fate_of(trajectory):
                if event.error is not None:
                    raise ProblemFailed(f"{source} model: {event.error}")
                if event.extended:
                    side = trajectory.sides[source]
                    side.ready = True
                    self._tell_step(trajectory)
                    self._start(trajectory, side)
                    self._score(trajectory)

        return handle

    def _limit(self, source: Source) -> int:
        """Tokens that one model's half of a trajectory may have. ``max_tokens`` counts those of the
        base model; the same text may have more elsewhere.
        """
        own = self._models[source].port.engine.context_len
        return min(own, self._config.max_tokens) if source == "base" else own

    def _room(self, trajectory: Trajectory) -> int:
        """Tokens that the next step may have."""
        sides = [self._limit(s.source) - s.length for s in trajectory.sides.values()]
        with self._scorer_named():
            scorer = self._backend.room(trajectory.order)
        return min(sides if scorer is None else [*sides, scorer])

    def _retire_full(self, trajectory: Trajectory) -> None:
        """Ends a problem for lack of room, and names the limit that was met if it is not
        ``max_tokens``.
        """
        full = [
            f"the context of the {side.source} model ({self._limit(side.source)} tokens)"
            for side in trajectory.sides.values()
            if self._limit(side.source) <= side.length
            and self._limit(side.source) != self._config.max_tokens
        ]
        base = trajectory.sides["base"]
        if not full and base.length < self._limit("base"):
            full = [f"the context of scorer {self._backend.name!r}"]
        if full:
            name = f"question {trajectory.key + 1}"
            self._guard.tell(Warned(f"{name} ends here: {full[0]} has no room for another step"))
        self._retire(trajectory, "max_tokens")

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
        with self._guard.named(f"{side.source} model"):
            children = side.port.fork(side.root, specs, handlers)
        for candidate, seq in zip(side.candidates, children, strict=True):
            candidate.seq = seq

    def _candidate_handler(
        self, trajectory: Trajectory, side: Side, candidate: Candidate
    ) -> Handler:
        def handle(event: StepEvent) -> None:
            if trajectory.retired:
                return
            with self._guard.fate_of(trajectory):
                if event.error is not None:
                    raise ProblemFailed(f"{side.source} model: {event.error}")
                candidate.seen += event.token is not None
                if event.generation is not None:
                    self._end(trajectory, side, candidate, event.generation)
                elif side.source == "base" and candidate.seen % _BLOCK_SLOTS == 0:
                    assert candidate.seq is not None
                    trajectory.note_footprint(candidate.seq)

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
                raise ProblemFailed("no candidate has a token: the logits are not finite")
            self._commit(trajectory, choice, None)
            return
        for candidate in candidates:
            if candidate not in trajectory.offered:
                trajectory.sides[candidate.source].release_candidate(candidate)
        requests = [trajectory.request(c) for c in trajectory.offered]
        step = len(trajectory.steps)

        def done(outcome: list[Score] | ScorerError) -> None:
            if trajectory.retired or not trajectory.scoring or len(trajectory.steps) != step:
                return  # late, or said twice
            with self._guard.fate_of(trajectory):
                self._on_scores(trajectory, outcome)

        with self._scorer_named():
            self._backend.submit(trajectory.order, requests, done)

    def _on_scores(self, trajectory: Trajectory, outcome: list[Score] | ScorerError) -> None:
        offered = trajectory.offered
        scores = checked_outcome(f"scorer {self._backend.name!r}", outcome, len(offered))
        fits = [i for i, score in enumerate(scores) if not score.overflow]
        for i in fits:
            offered[i].score = scores[i].value
        if not fits:
            self._retire_full(trajectory)
            return
        ranks = [scores[i].rank for i in fits]
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
                with self._guard.named(f"step for the {source} model"):
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
            with self._scorer_named():
                claimed = self._backend.claim(trajectory.order, request)
        for side in trajectory.sides.values():
            winner = chosen if side is own and choice.whole else None
            with self._guard.named(f"{side.source} model"):
                side.close_step(winner, claimed if side is not own else None)
            side.length += len(ids[side.source])
        with self._scorer_named():
            self._backend.commit(trajectory.order, request, committed)

        finish = self._finish(trajectory, ends)
        if finish is not None:
            self._tell_step(trajectory, force=True)
            if finish == "max_tokens":
                self._retire_full(trajectory)
            else:
                self._retire(trajectory, finish)
            return
        for side in trajectory.sides.values():
            with self._guard.named(f"{side.source} model"):
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
        """Gives everything back, then tells. What cannot be given back now is so at the end."""
        assert not trajectory.retired
        trajectory.retired = True
        step = self._untold_step(trajectory)
        failures: list[str] = []

        def tidy(who: str, act: Callable[[], None]) -> None:
            try:
                with self._guard.named(who):
                    act()
            except ProblemFailed as failure:
                failures.append(str(failure))

        def count() -> None:
            trajectory.scorer_tokens = self._backend.processed(trajectory.order)

        scorer = f"scorer {self._backend.name!r}"
        tidy("base model", trajectory.note_base_cache)
        tidy(scorer, count)
        tidy(scorer, lambda: self._backend.end(trajectory.order))
        for side in trajectory.sides.values():
            tidy(f"{side.source} model", side.release)
        if failures and error is None:
            finish, error = "error", failures[0]
        solution = self._solution(trajectory, finish, error)
        self._solved(solution)
        del self.active[trajectory.order]
        self._tell_end(trajectory, step, solution)

    def _solution(
        self, trajectory: Trajectory, finish: FinishReason, error: str | None
    ) -> Solution:
        per_token = self._models["base"].port.engine.model.kv_bytes_per_token
        return trajectory.solution(finish, error, per_token)

    def _tell_candidates(self, trajectory: Trajectory, chosen: Candidate | None) -> None:
        for candidate in trajectory.candidates:
            if candidate.generation is not None and not candidate.told:
                candidate.told = True
                self._guard.tell(trajectory.candidate_event(candidate, chosen=candidate is chosen))

    def _tell_step(self, trajectory: Trajectory, *, force: bool = False) -> None:
        """Emits the last step once both models hold it; at once (``force``) if they never will."""
        trajectory.note_base_cache()
        if trajectory.untold and (force or trajectory.all_ready):
            event = trajectory.step_event()
            trajectory.untold = False
            self._guard.tell(event)

    def _untold_step(self, trajectory: Trajectory) -> TraceEvent | None:
        """The last step's event, if the problem ends before both models hold it."""
        if trajectory.untold:
            with contextlib.suppress(Exception):  # an engine that cannot say what it holds
                return trajectory.step_event()
        return None

    def _tell_end(
        self, trajectory: Trajectory, step: TraceEvent | None, solution: Solution
    ) -> None:
        """A problem's last events: a step not told yet, an undecided step's candidates, the end."""
        if step is not None:
            self._guard.tell(step)
        self._tell_candidates(trajectory, None)
        self._guard.tell(ProblemEnded(solution))
