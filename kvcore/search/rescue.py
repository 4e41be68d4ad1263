"""KV-Rescue's Algorithm 1, and best-of-N where there is no helper.

Many problems run through it at once, on models that they share, so events drive it: a root that has
taken in what it was given proposes candidates, the last candidate to end asks the scorer, scores
commit a step, and the commit feeds the roots again. Whatever raises on the way (tokenizers,
templates, scorers, models that refuse) ends the problem that it was asked for, and no other.

Source: KV-Rescue, appendix B. Numbers in comments are its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvcore.config import SearchConfig
from kvcore.engine.events import Finish, GenerateSpec, StepEvent
from kvcore.search.choose import Choice, choose, fallback, pool, take
from kvcore.search.ending import Endings
from kvcore.search.failures import ProblemFailed, ScorerError, named
from kvcore.search.limits import Limits
from kvcore.search.ports import Handler
from kvcore.search.prompt import Prompt, Translator
from kvcore.search.prompting import Prompting
from kvcore.search.results import ProblemStarted, Solution, Source, Step, TraceEvent, Warned
from kvcore.search.scorers.base import Score, SearchScorer, checked_outcome
from kvcore.search.telling import Teller
from kvcore.search.trajectory import (
    Candidate,
    Model,
    Side,
    State,
    Trajectory,
    candidate_key,
)

_FOOTPRINT_TOKENS = 16  # slots of a block: footprints change at most this often


class Rescue:
    """Takes problems from their prompt to their solution.

    Args:
        models: base, and the helper if there is one.
        translators: by (from, to), for steps that one model wrote and the other must read.
        emit: gets every trace event. What it raises ends the search, as ``SearchFailed``.
        solved: gets every solution, once.
    Attributes:
        active: problems under way, by their place in the list of questions.
    """

    def __init__(
        self,
        models: Mapping[Source, Model],
        translators: Mapping[tuple[Source, Source], Translator],
        scorer: SearchScorer,
        config: SearchConfig,
        prompting: Prompting,
        *,
        emit: Callable[[TraceEvent], None],
        solved: Callable[[Solution], None],
    ) -> None:
        self.active: dict[int, Trajectory] = {}
        self.limits = Limits(models, config, scorer)
        self._models = models
        self._translators = translators
        self._scorer = scorer
        self._judge = f"scorer {scorer.name!r}"
        self._config = config
        self._prompting = prompting
        self._teller = Teller(emit)
        bytes_per_token = models["base"].lease.port.model.kv_bytes_per_token
        self._endings = Endings(self.active, scorer, self._teller, bytes_per_token, solved)
        self.interrupt = self._endings.interrupt

    # The algorithm.

    def admit(self, order: int, prompt: Prompt) -> None:
        """1, 2: both caches are given the question. One that does not fit ends the problem."""
        assert prompt.key is not None
        trajectory = self.active[order] = Trajectory(order, prompt.key, prompt)
        ids: dict[Source, list[int]] = {}
        with self._endings.fate_of(trajectory):
            try:
                for source, model in self._models.items():
                    tokenizer = model.lease.port.model.tokenizer
                    limit = self.limits.of(source)
                    ids[source] = self._prompting.ids(source, tokenizer, prompt, limit)
            finally:
                lengths = [len(ids.get(source, [])) for source in ("base", "helper")]
                trajectory.base_length = lengths[0]
                self._teller.tell(ProblemStarted(trajectory.key, prompt.question, *lengths))
            self._plant(trajectory, ids)
            trajectory.enter(State.FEEDING)

    def _propose(self, trajectory: Trajectory, side: Side) -> None:
        """4, 5: a model's candidates start from its root; the detector watches the base model's."""
        config, step = self._config, len(trajectory.steps)
        longest = min(config.sampling.max_new_tokens, self.limits.room(trajectory))
        specs = [
            GenerateSpec(
                sampling=replace(config.sampling, max_new_tokens=longest),
                rng_key=candidate_key(config.seed, trajectory.key, step, side.source, i),
                stop_at_step=True,
                detect=side.source == "base" and config.detector is not None,
                separators=config.separators,
            )
            for i in range(side.num_candidates)
        ]
        with named(f"{side.source} model"):
            side.propose(specs, lambda candidate: self._on_candidate(trajectory, side, candidate))

    def _score(self, trajectory: Trajectory) -> None:
        """6, 7: those that did not degenerate are offered to the scorer, once all have ended."""
        if trajectory.state is not State.PROPOSING or not trajectory.all_ended:
            return
        candidates = trajectory.candidates
        trajectory.offered = pool(candidates)
        if not trajectory.offered:
            choice = fallback(candidates)
            if choice is None:
                raise ProblemFailed("no candidate has a token: the logits are not finite")
            self._commit(trajectory, choice, None)
            return
        for candidate in candidates:
            if candidate not in trajectory.offered:
                trajectory.sides[candidate.source].release_candidate(candidate)
        trajectory.enter(State.SCORING)
        requests = [trajectory.request(candidate) for candidate in trajectory.offered]
        with named(self._judge):
            self._scorer.submit(trajectory.order, requests, self._on_scores(trajectory))

    def _choose(self, trajectory: Trajectory, outcome: list[Score] | ScorerError) -> None:
        """8: the best of those that fit the scorer's context."""
        offered = trajectory.offered
        scores = checked_outcome(self._judge, outcome, len(offered))
        fits = [i for i, score in enumerate(scores) if not score.overflow]
        for i in fits:
            offered[i].score = scores[i].value
        if not fits:
            self._retire_full(trajectory)
            return
        ranks = [scores[i].rank for i in fits]
        best = fits[choose([offered[i] for i in fits], ranks)]
        self._commit(trajectory, take(offered[best]), best)

    def _commit(self, trajectory: Trajectory, choice: Choice, request: int | None) -> None:
        """9 to 16: the winner's cache is retained, the other model is fed its step; ``request`` is
        its place among the offered. 17: a step that ends the problem is not fed.
        """
        trajectory.enter(State.COMMITTING)
        chosen, source = choice.candidate, choice.candidate.source
        own = trajectory.sides[source].lease.port
        data = chosen.ended.text if choice.whole else own.text(choice.tokens)
        ends = choice.whole and chosen.ended.finish is Finish.EOS
        ids = self._in_every_vocabulary(trajectory, choice, data, ends)
        self._teller.candidates(trajectory, chosen)
        step = trajectory.request(chosen, choice.tokens, data)
        trajectory.append(
            Step(
                source=source,
                index=chosen.index,
                text=step.text,
                tokens=tuple(ids["base"]),
                score=chosen.score,
                finish=chosen.ended.finish.value,
                flag=choice.flag,
            ),
            data,
        )
        heirs = {source: chosen.seq if choice.whole else None}
        if request is not None and source == "base" and "helper" in trajectory.sides:
            with named(self._judge):
                heirs["helper"] = self._scorer.claim(trajectory.order, request)
        for name, side in trajectory.sides.items():
            with named(f"{name} model"):
                side.close_step(heirs.get(name), len(ids[name]))
        with named(self._judge):
            self._scorer.commit(trajectory.order, request, step)

        finish = self.limits.finish(trajectory, ends=ends)
        if finish is not None:
            trajectory.note_base_cache()
            self._teller.step(trajectory)
            if finish == "max_tokens":
                self._retire_full(trajectory)
            else:
                self._endings.retire(trajectory, finish)
            return
        trajectory.enter(State.FEEDING)
        for name, side in trajectory.sides.items():
            if heirs.get(name) is None:
                with named(f"{name} model"):
                    side.feed(ids[name])
        self._go_on(trajectory, [side for side in trajectory.sides.values() if side.ready])

    # What happens between its lines.

    def _plant(self, trajectory: Trajectory, ids: Mapping[Source, list[int]]) -> None:
        """Starts the roots and tells the scorer."""
        for source, model in self._models.items():
            with named(f"{source} model"):
                root = model.lease.add(ids[source], self._on_root(trajectory, source))
            length = len(ids[source])
            side = Side(source, model.lease, model.num_candidates, root, length, under_way=length)
            side.processed = length
            trajectory.sides[source] = side
        helper = trajectory.sides.get("helper")
        with named(self._judge):
            root_there = None if helper is None else helper.root
            self._scorer.begin(trajectory.order, trajectory.prompt, root=root_there)
        if self.limits.room(trajectory) < 1:
            raise ProblemFailed("question: its prompt fills the scorer's context")

    def _go_on(self, trajectory: Trajectory, ready: list[Side]) -> None:
        """Roots have become ``ready``: their models propose, even if another root is not."""
        trajectory.note_base_cache()
        if trajectory.all_ready:
            trajectory.enter(State.PROPOSING)
            self._teller.step(trajectory)
        for side in ready:
            self._propose(trajectory, side)
        self._score(trajectory)

    def _in_every_vocabulary(
        self, trajectory: Trajectory, choice: Choice, data: bytes, ends: bool
    ) -> dict[Source, list[int]]:
        """The ids of a step for each model. ``data``: its bytes; ``ends``: with an eos."""
        giver = choice.candidate.source
        ids: dict[Source, list[int]] = {giver: list(choice.tokens)}
        for source in trajectory.sides:
            if source != giver:
                with named(f"step for the {source} model"):
                    carrier = self._translators[giver, source]
                    ids[source] = carrier.ids(choice.tokens, data, ends=ends)
        return ids

    def _retire_full(self, trajectory: Trajectory) -> None:
        """Ends a problem for lack of room, and names the context that lacks it if it is not
        ``max_tokens`` that was met.
        """
        full = self.limits.full(trajectory)
        if full is not None:
            name = f"question {trajectory.key + 1}"
            self._teller.tell(Warned(f"{name} ends here: {full} has no room for another step"))
        self._endings.retire(trajectory, "max_tokens")

    # Events.

    def _on_root(self, trajectory: Trajectory, source: Source) -> Handler:
        def act(event: StepEvent) -> None:
            if event.extended:
                side = trajectory.sides[source]
                side.under_way = 0
                self._go_on(trajectory, [side])

        return self._handler(trajectory, source, act)

    def _on_candidate(self, trajectory: Trajectory, side: Side, candidate: Candidate) -> Handler:
        def act(event: StepEvent) -> None:
            candidate.seen += event.token is not None
            if event.generation is not None:
                trajectory.book(side, candidate, event.generation)
                self._score(trajectory)
            elif side.source == "base" and candidate.seen % _FOOTPRINT_TOKENS == 0:
                assert candidate.seq is not None
                trajectory.note_footprint(candidate.seq)

        return self._handler(trajectory, side.source, act)

    def _on_scores(self, trajectory: Trajectory) -> Callable[[list[Score] | ScorerError], None]:
        step = len(trajectory.steps)

        def done(outcome: list[Score] | ScorerError) -> None:
            # Else they are late, or said twice.
            if trajectory.state is State.SCORING and len(trajectory.steps) == step:
                with self._endings.fate_of(trajectory):
                    self._choose(trajectory, outcome)

        return done

    def _handler(
        self, trajectory: Trajectory, source: Source, act: Callable[[StepEvent], None]
    ) -> Handler:
        def handle(event: StepEvent) -> None:
            if trajectory.state is State.RETIRED:  # its sequence could not be released
                return
            with self._endings.fate_of(trajectory):
                if event.error is not None:
                    raise ProblemFailed(f"{source} model: {event.error}")
                act(event)

        return handle
