"""How long a trajectory may get, and which limit it met."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.config import SearchConfig
from kvcore.search.failures import named
from kvcore.search.results import FinishReason, Source
from kvcore.search.scorers.base import SearchScorer
from kvcore.search.trajectory import Model, Trajectory


class Limits:
    """The limits of one search."""

    def __init__(
        self, models: Mapping[Source, Model], config: SearchConfig, scorer: SearchScorer
    ) -> None:
        self._models = models
        self._config = config
        self._scorer = scorer

    def of(self, source: Source) -> int:
        """Tokens that one model's half of a trajectory may have. ``max_tokens`` counts those of the
        base model; the same text may have more elsewhere.
        """
        own = self._models[source].lease.port.context_len
        return min(own, self._config.max_tokens) if source == "base" else own

    def room(self, trajectory: Trajectory) -> int:
        """Tokens that the next step may have. Raises ProblemFailed."""
        rooms = [self.of(side.source) - side.length for side in trajectory.sides.values()]
        with named(f"scorer {self._scorer.name!r}"):
            scorer = self._scorer.room(trajectory.order)
        return min(rooms if scorer is None else [*rooms, scorer])

    def finish(self, trajectory: Trajectory, *, ends: bool) -> FinishReason | None:
        """Why a problem is over after its last step (``ends``: with an eos); None if it goes on."""
        if ends:
            return "eos"
        if len(trajectory.steps) >= self._config.max_steps:
            return "max_steps"
        return "max_tokens" if self.room(trajectory) < 1 else None

    def full(self, trajectory: Trajectory) -> str | None:
        """Which context leaves no room for a step; None if it is ``max_tokens`` that was met."""
        for side in trajectory.sides.values():
            limit = self.of(side.source)
            if limit <= side.length and limit != self._config.max_tokens:
                return f"the context of the {side.source} model ({limit} tokens)"
        if trajectory.sides["base"].length < self.of("base"):
            return f"the context of scorer {self._scorer.name!r}"
        return None
