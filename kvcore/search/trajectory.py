"""One problem under way: where it stands, both models' halves of its trajectory, its candidates."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcore.engine.events import Finish, GenerateSpec, Generation
from kvcore.native import _C
from kvcore.search.ports import Handler, Lease
from kvcore.search.prompt import Prompt
from kvcore.search.results import Source, Step
from kvcore.search.scorers.base import ScoreRequest

SOURCES: tuple[Source, Source] = ("base", "helper")


def candidate_key(seed: int, problem: int, step: int, source: Source, index: int) -> int:
    """Key of one candidate's random numbers, u64."""
    key = seed
    for word in (problem, step, SOURCES.index(source), index):
        key = _C.hash_key(key, word)
    return key


class State(enum.Enum):
    """Where a trajectory stands."""

    PLANTING = "planting"  # admitted; its roots are being made
    FEEDING = "feeding"  # a root takes in the prompt or the last step; those that hold it propose
    PROPOSING = "proposing"  # all roots hold the context; candidates decode
    SCORING = "scoring"  # all candidates have ended; their scores are awaited
    COMMITTING = "committing"  # a choice is made; it is becoming the next step
    RETIRED = "retired"  # over, whatever was allocated


_NEXT = {
    State.PLANTING: (State.FEEDING, State.RETIRED),
    State.FEEDING: (State.PROPOSING, State.RETIRED),
    State.PROPOSING: (State.SCORING, State.COMMITTING, State.RETIRED),  # not all steps are scored
    State.SCORING: (State.COMMITTING, State.RETIRED),
    State.COMMITTING: (State.FEEDING, State.RETIRED),
    State.RETIRED: (),
}


@dataclass(frozen=True)
class Model:
    """One of the search's models: its port and how many candidates it gives per step."""

    lease: Lease
    num_candidates: int


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
        length: tokens of the trajectory in this model's vocabulary, prompt included.
        under_way: of these, tokens that the root was given and has not taken in.
        num_candidates: candidates per step.
    """

    source: Source
    lease: Lease
    num_candidates: int
    root: int
    length: int
    under_way: int
    candidates: list[Candidate] = field(default_factory=list)
    generated: int = 0
    processed: int = 0

    @property
    def ready(self) -> bool:
        """The root can be forked."""
        return self.under_way == 0

    @property
    def done(self) -> bool:
        """The present step's candidates have all ended."""
        started = len(self.candidates) == self.num_candidates
        return started and all(c.generation is not None for c in self.candidates)

    def propose(
        self, specs: Sequence[GenerateSpec], handler: Callable[[Candidate], Handler]
    ) -> None:
        """Forks a candidate per spec from the root."""
        self.candidates = [Candidate(self.source, i) for i in range(len(specs))]
        if not specs:
            return
        children = self.lease.fork(self.root, specs, [handler(c) for c in self.candidates])
        for candidate, seq in zip(self.candidates, children, strict=True):
            candidate.seq = seq

    def close_step(self, heir: int | None, step_len: int) -> None:
        """Ends a step of ``step_len`` tokens: the root goes on as ``heir`` if there is one, else
        ``feed`` gives it the step. All other candidates are freed.
        """
        for candidate in self.candidates:
            if candidate.seq != heir:
                self.release_candidate(candidate)
        if heir is not None:
            self.lease.adopt(self.root, heir)
        self.generated += sum(candidate.seen for candidate in self.candidates)
        self.candidates = []
        self.length += step_len

    def feed(self, tokens: Sequence[int]) -> None:
        """Gives the root the step that was just closed."""
        if tokens:
            self.lease.extend(self.root, tokens)
            self.under_way = len(tokens)
            self.processed += len(tokens)

    def release(self) -> None:
        """Gives everything back, children first."""
        for candidate in self.candidates:
            self.release_candidate(candidate)
        self.lease.release(self.root)

    def release_candidate(self, candidate: Candidate) -> None:
        if candidate.seq is not None:
            self.lease.release(candidate.seq)
            candidate.seq = None


@dataclass(eq=False)
class Trajectory:
    """The state of one problem, from its admission to its solution.

    Attributes:
        order: place in the list of questions.
        key: names the problem in events and keys its random numbers.
        told_steps: steps whose events were sent: a step's is due once all models hold it.
        base_length: base tokens, prompt included; counts the last step even when it is not fed.
        offered: the candidates that the scorer was asked about, in the order of the requests.
        ended: candidates that ended, by model.
        aborted: of them, those that degenerated, by finish.
        evictions: base slots per lane that the trajectory no longer holds.
    """

    order: int
    key: int
    prompt: Prompt
    state: State = State.PLANTING
    sides: dict[Source, Side] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: bytes = b""
    told_steps: int = 0
    base_length: int = 0
    offered: list[Candidate] = field(default_factory=list)
    ended: dict[Source, int] = field(default_factory=dict)
    aborted: dict[str, int] = field(default_factory=dict)
    kv_peak: int = 0
    evictions: int = 0
    scorer_tokens: int = 0
    started_at: float = field(default_factory=time.perf_counter)

    def enter(self, state: State) -> None:
        """Goes from one state to the next. Raises RuntimeError if that is none that may follow."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(
                f"internal: problem {self.key} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state

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
        self.offered = []

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

    def book(self, side: Side, candidate: Candidate, ended: Generation) -> None:
        """Books a candidate that is complete. A degenerate one gives its blocks back at once."""
        assert candidate.seq is not None
        candidate.generation = ended
        candidate.seen = len(ended.tokens)
        candidate.cache_slots = side.lease.port.cache_len(candidate.seq)
        candidate.kv_bytes = side.lease.port.kv_bytes(candidate.seq)
        self.ended[side.source] = self.ended.get(side.source, 0) + 1
        if side.source == "base":
            self.kv_peak = max(self.kv_peak, candidate.kv_bytes)
        if candidate.aborted:
            self.aborted[ended.finish.value] = self.aborted.get(ended.finish.value, 0) + 1
            side.release_candidate(candidate)

    def note_footprint(self, seq: int) -> None:
        """Looks at the blocks that a base sequence holds now."""
        self.kv_peak = max(self.kv_peak, self.sides["base"].lease.port.kv_bytes(seq))

    def note_base_cache(self) -> None:
        """Looks at the base root, while it holds all that it was given."""
        side = self.sides.get("base")
        if side is None or not side.ready:
            return
        self.note_footprint(side.root)
        held = side.lease.port.cache_len(side.root)
        if held > 0:  # else it lost its place to others and will be fed again
            # The last token of a sequence is not in the cache yet.
            self.evictions = len(side.lease.port.tokens(side.root)) - 1 - held
