"""The trace of a search: what is told of each problem, each thing once and in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kvcore.search.failures import SearchFailed
from kvcore.search.results import (
    CandidateEnded,
    ProblemEnded,
    Solution,
    StepCommitted,
    TraceEvent,
)
from kvcore.search.trajectory import Candidate, Trajectory


class Teller:
    """Sends the events of problems to ``emit``. What that raises ends the search.

    Attributes:
        broken: ``emit`` has raised.
    """

    def __init__(self, emit: Callable[[TraceEvent], None]) -> None:
        self._emit = emit
        self.broken = False

    def tell(self, event: TraceEvent) -> None:
        try:
            self._emit(event)
        except Exception as error:
            self.broken = True
            raise SearchFailed(error) from error

    def candidates(self, trajectory: Trajectory, chosen: Candidate | None) -> None:
        """The present step's candidates that ended, when it is decided, or never will be."""
        for candidate in trajectory.candidates:
            if candidate.generation is not None and not candidate.told:
                candidate.told = True
                self.tell(candidate_event(trajectory, candidate, chosen=candidate is chosen))

    def step(self, trajectory: Trajectory) -> None:
        """The last step, if it is not told yet: all models hold it, or never will."""
        if trajectory.told_steps < len(trajectory.steps):
            event = step_event(trajectory)
            trajectory.told_steps += 1
            self.tell(event)

    def untold_step(self, trajectory: Trajectory) -> StepCommitted | None:
        """The last step's event, if a problem ends before all models hold it."""
        if trajectory.told_steps < len(trajectory.steps):
            with contextlib.suppress(Exception):  # an engine that cannot say what it holds
                return step_event(trajectory)
        return None

    def end(self, trajectory: Trajectory, step: StepCommitted | None, solution: Solution) -> None:
        """A problem's last events: a step not told yet, an undecided step's candidates, the end."""
        if step is not None:
            self.tell(step)
        self.candidates(trajectory, None)
        self.tell(ProblemEnded(solution))


def step_event(trajectory: Trajectory) -> StepCommitted:
    """The event of the last step, with the caches as they are now."""
    step = trajectory.steps[-1]
    slots, sizes = {"helper": 0}, {"helper": 0}
    for source, side in trajectory.sides.items():
        slots[source] = side.lease.port.cache_len(side.root)
        sizes[source] = side.lease.port.kv_bytes(side.root)
    return StepCommitted(
        problem=trajectory.key,
        step=len(trajectory.steps) - 1,
        source=step.source,
        index=step.index,
        tokens=step.tokens,
        text=step.text,
        score=step.score,
        finish=step.finish,
        flag=step.flag,
        context=trajectory.base_length,
        base_slots=slots["base"],
        base_bytes=sizes["base"],
        helper_slots=slots["helper"],
        helper_bytes=sizes["helper"],
        evictions=trajectory.evictions,
    )


def candidate_event(
    trajectory: Trajectory, candidate: Candidate, *, chosen: bool
) -> CandidateEnded:
    """The event of a candidate that ended."""
    ended = candidate.ended
    return CandidateEnded(
        problem=trajectory.key,
        step=len(trajectory.steps),
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
