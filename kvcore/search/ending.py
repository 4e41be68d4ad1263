"""How problems end: solved, failed or interrupted, and whose failure an exception is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, MutableMapping

from kvcore.search.failures import ProblemFailed, SearchFailed, named, told
from kvcore.search.results import (
    Aborted,
    CandidateCount,
    FinishReason,
    KvBytes,
    Solution,
    TokenCount,
    Tokens,
)
from kvcore.search.scorers.base import SearchScorer
from kvcore.search.telling import Teller
from kvcore.search.trajectory import State, Trajectory


class Endings:
    """Ends problems.

    Args:
        active: problems under way; those that end are taken out.
        bytes_per_token: of keys and values of the base model.
        solved: gets every solution, once.
    """

    def __init__(
        self,
        active: MutableMapping[int, Trajectory],
        scorer: SearchScorer,
        teller: Teller,
        bytes_per_token: int,
        solved: Callable[[Solution], None],
    ) -> None:
        self._active = active
        self._scorer = scorer
        self._teller = teller
        self._bytes_per_token = bytes_per_token
        self._solved = solved

    @contextlib.contextmanager
    def fate_of(self, trajectory: Trajectory) -> Iterator[None]:
        """An exception inside is this problem's end and does not get out."""
        try:
            yield
        except Exception as error:
            if trajectory.state is not State.RETIRED:
                reason = str(error) if isinstance(error, ProblemFailed) else told(error)
                self.retire(trajectory, "error", reason)

    def retire(
        self, trajectory: Trajectory, finish: FinishReason, error: str | None = None
    ) -> None:
        """Gives everything back, then tells. What cannot be given back now is so at the end."""
        trajectory.enter(State.RETIRED)
        step = self._teller.untold_step(trajectory)
        failures: list[str] = []

        def tidy(who: str, act: Callable[[], None]) -> None:
            try:
                with named(who):
                    act()
            except ProblemFailed as failure:
                failures.append(str(failure))

        def count() -> None:
            trajectory.scorer_tokens = self._scorer.processed(trajectory.order)

        scorer = f"scorer {self._scorer.name!r}"
        tidy("base model", trajectory.note_base_cache)
        tidy(scorer, count)
        tidy(scorer, lambda: self._scorer.end(trajectory.order))
        for side in trajectory.sides.values():
            tidy(f"{side.source} model", side.release)
        if failures and error is None:
            finish, error = "error", failures[0]
        solution = self._close_books(trajectory, finish, error)
        self._teller.end(trajectory, step, solution)

    def interrupt(self) -> None:
        """Ends all problems with what they have. Releases nothing.

        What ``emit`` raises is dropped: the search ends for a reason of its own.
        """
        for trajectory in list(self._active.values()):
            trajectory.state = State.RETIRED  # from any state: it may have been retiring
            with contextlib.suppress(Exception):
                trajectory.scorer_tokens = self._scorer.processed(trajectory.order)
            step = self._teller.untold_step(trajectory)
            solution = self._close_books(trajectory, "interrupted", None)
            if not self._teller.broken:
                with contextlib.suppress(Exception, SearchFailed):
                    self._teller.end(trajectory, step, solution)

    def _close_books(
        self, trajectory: Trajectory, finish: FinishReason, error: str | None
    ) -> Solution:
        solution = solution_of(trajectory, finish, error, self._bytes_per_token)
        self._solved(solution)
        del self._active[trajectory.order]
        return solution


def solution_of(
    trajectory: Trajectory, finish: FinishReason, error: str | None, bytes_per_token: int
) -> Solution:
    """What there is, with the tokens of unfinished candidates counted."""
    counts = {
        source: TokenCount(side.generated + sum(c.seen for c in side.candidates), side.processed)
        for source, side in trajectory.sides.items()
    }
    return Solution(
        problem=trajectory.key,
        question=trajectory.prompt.question,
        text=trajectory.text.decode("utf-8", errors="replace"),
        token_ids=tuple(trajectory.token_ids),
        steps=tuple(trajectory.steps),
        tokens=Tokens(
            base=counts.get("base", TokenCount()),
            helper=counts.get("helper", TokenCount()),
            scorer=TokenCount(0, trajectory.scorer_tokens),
        ),
        aborted=Aborted(**trajectory.aborted),
        finish=finish,
        error=error,
        evictions=trajectory.evictions,
        kv_bytes=KvBytes(peak=trajectory.kv_peak, full=trajectory.base_length * bytes_per_token),
        seconds=time.perf_counter() - trajectory.started_at,
        candidates=CandidateCount(**trajectory.ended),
    )
