"""Stepwise best-of-N: the baseline of KV-Rescue, by the same driver without helper and detector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvcore.config import SearchConfig
from kvcore.search.driver import solve
from kvcore.search.ports import ModelPort
from kvcore.search.prompt import DEFAULT_SYSTEM_PROMPT, Prompt
from kvcore.search.results import Solution, TraceEvent
from kvcore.search.scorers.base import Scorer


def best_of_n_config(config: SearchConfig) -> SearchConfig:
    """``config`` without helper and detector (KV-Rescue, experiment setup: N_h = 0)."""
    n = config.candidates(helper=False)[0]
    return replace(config, n=n, n_helper=0, n_total=None, detector=None)


def best_of_n(
    engine: ModelPort,
    questions: Sequence[str | Prompt],
    *,
    scorer: Scorer | None = None,
    config: SearchConfig | None = None,
    system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
    template_args: Mapping[str, Any] | None = None,
    on_event: Callable[[TraceEvent], None] | None = None,
    max_in_flight: int | None = None,
) -> list[Solution]:
    """Solves problems with ``config.n`` candidates of one model per step; arguments as ``Search``.

    Returns:
        One solution per question, in their order.
    """
    return solve(
        engine,
        questions,
        scorer=scorer,
        config=best_of_n_config(config or SearchConfig()),
        system_prompt=system_prompt,
        template_args=template_args,
        on_event=on_event,
        max_in_flight=max_in_flight,
    )
