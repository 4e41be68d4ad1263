"""One problem under way: both models' halves of its trajectory, its candidates, its books."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcore.engine.events import Finish, Generation
from kvcore.search.ports import EnginePort
from kvcore.search.prompt import Prompt
from kvcore.search.results import (
    Aborted,
    CandidateEnded,
    FinishReason,
    KvBytes,
    Solution,
    Source,
    Step,
    StepCommitted,
    TokenCount,
    Tokens,
)
from kvcore.search.scorers.base import ScoreRequest

SOURCES: tuple[Source, Source] = ("base", "helper")


@dataclass(eq=False)
class Candidate:
    """One candidate of the present step.

    Attributes:
        seq: its sequence; None once released or adopted.
        seen: tokens it generated so far.
        generation: set when it ended.
        score: None unless it was offered to the scorer and scored.
        cache_slots, kv_bytes: of its cache when it ended.
        told: its event was sent.
    """

    source: Source
    index: int
    seq: int | None = None
    seen: int = 0
    generation: Generation | None = None
    score: float | None = None
    cache_slots: int = 0
    kv_bytes: int = 0
    told: bool = False

    @property
    def ended(self) -> Generation:
        """The generation; only for a candidate that ended."""
        assert self.generation is not None
        return self.generation

    @property
    def text(self) -> str:
        return self.ended.text.decode("utf-8", errors="replace")

    @property
    def aborted(self) -> bool:
        return self.ended.finish.degenerate

    @property
    def offered(self) -> bool:
        """Whether the scorer may be asked about it.

        Not if it is degenerate; nor if it is blank, unless it ends the solution: a step without
        text tells a scorer nothing, while an eos after the last step is a choice like any other.
        """
        blank = self.text.strip() == "" and self.ended.finish is not Finish.EOS
        return not self.aborted and not blank


@dataclass(eq=False)
class Side:
    """One model's half of a trajectory.

    Attributes:
        root: its sequence, which holds prompt and committed steps; its handle never changes.
        length: tokens of the root, those being fed included.
        ready: the root holds all of them, so candidates may start from it.
        started: the present step's candidates have started.
        holds_step: the root was given the last committed step by adopting a sequence.
        num_candidates: candidates per step.
    """

    source: Source
    port: EnginePort
    num_candidates: int
    root: int
    length: int
    ready: bool = False
    started: bool = False
    holds_step: bool = True
    candidates: list[Candidate] = field(default_factory=list)
    generated: int = 0
    processed: int = 0

    @property
    def done(self) -> bool:
        """The present step's candidates have all ended."""
        return self.started and all(c.generation is not None for c in self.candidates)

    def close_step(self, winner: Candidate | None, claimed: int | None) -> None:
        """Ends a step: the root goes on as ``winner``'s sequence or as ``claimed``.

        All other candidates are freed. With neither the root stays what it was, and ``feed`` gives
        it the step.
        """
        heir = claimed if winner is None else winner.seq
        for candidate in self.candidates:
            if candidate is not winner:
                self.release_candidate(candidate)
        if heir is not None:
            self.port.adopt(self.root, heir)
        self.generated += sum(candidate.seen for candidate in self.candidates)
        self.candidates = []
        self.started = False
        self.holds_step = heir is not None

    def feed(self, tokens: Sequence[int]) -> None:
        """Gives the root the step that was just closed, unless it holds it already."""
        if tokens and not self.holds_step:
            self.port.extend(self.root, tokens)
            self.ready = False
            self.processed += len(tokens)

    def release(self) -> None:
        """Gives everything back, children first."""
        for candidate in self.candidates:
            self.release_candidate(candidate)
        self.port.release(self.root)

    def release_candidate(self, candidate: Candidate) -> None:
        if candidate.seq is not None:
            self.port.release(candidate.seq)
            candidate.seq = None


@dataclass(eq=False)
class Trajectory:
    """The state of one problem, from its admission to its solution.

    Attributes:
        order: place in the list of questions.
        key: names the problem in events and keys its random numbers.
        base_length: base tokens, prompt included; counts the last step even when it is not fed.
        offered: the candidates that the scorer was asked about, in the order of the requests.
        untold: the last step's event is due once all models hold it.
        evictions: base slots per lane that the trajectory no longer holds.
    """

    order: int
    key: int
    prompt: Prompt
    sides: dict[Source, Side] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: bytes = b""
    base_length: int = 0
    offered: list[Candidate] = field(default_factory=list)
    scoring: bool = False
    retired: bool = False
    untold: bool = False
    aborted: dict[str, int] = field(default_factory=dict)
    kv_peak: int = 0
    evictions: int = 0
    scorer_tokens: int = 0
    started_at: float = field(default_factory=time.perf_counter)

    @property
    def candidates(self) -> list[Candidate]:
        """Of the present step, base first, in order of index."""
        return [
            c for source in SOURCES if source in self.sides for c in self.sides[source].candidates
        ]

    @property
    def all_ended(self) -> bool:
        return all(side.done for side in self.sides.values())

    @property
    def all_ready(self) -> bool:
        return all(side.ready for side in self.sides.values())

    def append(self, step: Step, data: bytes) -> None:
        """Books a step; ``data`` is its text's bytes."""
        self.steps.append(step)
        self.token_ids.extend(step.tokens)
        self.text += data
        self.base_length += len(step.tokens)
        self.scoring = False
        self.offered = []
        self.untold = True

    def request(
        self,
        candidate: Candidate,
        tokens: Sequence[int] | None = None,
        data: bytes | None = None,
    ) -> ScoreRequest:
        """What a scorer is told about a candidate, or about a part of it."""
        ended = candidate.ended
        data = ended.text if data is None else data
        return ScoreRequest(
            question=self.prompt.question,
            prefix=tuple(step.text for step in self.steps),
            text=data.decode("utf-8", errors="replace"),
            ends=ended.finish is Finish.EOS,
            tokens=tuple(ended.tokens if tokens is None else tokens),
            source=candidate.source,
            mean_logprob=ended.mean_logprob,
            problem=self.key,
            step=len(self.steps),
            index=candidate.index,
            data=data,
        )

    def count_abort(self, finish: Finish) -> None:
        self.aborted[finish.value] = self.aborted.get(finish.value, 0) + 1

    def note_footprint(self, seq: int) -> None:
        """Looks at the blocks that a base sequence holds now."""
        self.kv_peak = max(self.kv_peak, self.sides["base"].port.engine.kv_bytes(seq))

    def note_base_cache(self) -> None:
        """Looks at the base root, while it holds all that it was given."""
        side = self.sides.get("base")
        if side is None or not side.ready:
            return
        self.note_footprint(side.root)
        held = side.port.engine.cache_len(side.root)
        if held > 0:  # else it lost its place to others and will be fed again
            # The last token of a sequence is not in the cache yet.
            self.evictions = len(side.port.engine.tokens(side.root)) - 1 - held

    def step_event(self) -> StepCommitted:
        """The trace event of the last step, with the caches as they are now."""
        step = self.steps[-1]
        slots, sizes = {"helper": 0}, {"helper": 0}
        for source, side in self.sides.items():
            slots[source] = side.port.engine.cache_len(side.root)
            sizes[source] = side.port.engine.kv_bytes(side.root)
        return StepCommitted(
            problem=self.key,
            step=len(self.steps) - 1,
            source=step.source,
            index=step.index,
            tokens=step.tokens,
            text=step.text,
            score=step.score,
            finish=step.finish,
            flag=step.flag,
            context=self.base_length,
            base_slots=slots["base"],
            base_bytes=sizes["base"],
            helper_slots=slots["helper"],
            helper_bytes=sizes["helper"],
            evictions=self.evictions,
        )

    def candidate_event(self, candidate: Candidate, *, chosen: bool) -> CandidateEnded:
        """The trace event of a candidate that ended."""
        ended = candidate.ended
        return CandidateEnded(
            problem=self.key,
            step=len(self.steps),
            source=candidate.source,
            index=candidate.index,
            tokens=tuple(ended.tokens),
            text=candidate.text,
            score=candidate.score,
            chosen=chosen,
            aborted=candidate.aborted,
            finish=ended.finish.value,
            fired_at=ended.fired_at,
            max_entropy=ended.max_entropy,
            min_gzip_ratio=ended.min_gzip_ratio,
            mean_logprob=ended.mean_logprob,
            n_tokens=len(ended.tokens),
            cache_slots=candidate.cache_slots,
            kv_bytes=candidate.kv_bytes,
        )

    def solution(self, finish: FinishReason, error: str | None, bytes_per_token: int) -> Solution:
        """What there is, with the tokens of unfinished candidates counted."""
        counts = {
            source: TokenCount(
                side.generated + sum(c.seen for c in side.candidates), side.processed
            )
            for source, side in self.sides.items()
        }
        return Solution(
            problem=self.key,
            question=self.prompt.question,
            text=self.text.decode("utf-8", errors="replace"),
            token_ids=tuple(self.token_ids),
            steps=tuple(self.steps),
            tokens=Tokens(
                base=counts.get("base", TokenCount()),
                helper=counts.get("helper", TokenCount()),
                scorer=TokenCount(0, self.scorer_tokens),
            ),
            aborted=Aborted(**self.aborted),
            finish=finish,
            error=error,
            evictions=self.evictions,
            kv_bytes=KvBytes(peak=self.kv_peak, full=self.base_length * bytes_per_token),
            seconds=time.perf_counter() - self.started_at,
        )
