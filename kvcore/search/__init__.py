"""Stepwise search: one base model, maybe a helper, and a scorer that picks each next step."""

from kvcore.search.best_of_n import best_of_n, best_of_n_config
from kvcore.search.driver import Search, solve
from kvcore.search.prompt import DEFAULT_SYSTEM_PROMPT, Prompt
from kvcore.search.results import (
    SCHEMA_VERSION,
    CandidateEnded,
    ProblemEnded,
    ProblemStarted,
    Solution,
    Step,
    StepCommitted,
    TraceEvent,
    Warned,
)
from kvcore.search.scorers import (
    EngineScorer,
    LoglikScorer,
    PrmScorer,
    RandomScorer,
    Scorer,
    ScoreRequest,
    ScorerError,
)

__all__ = [
    "DEFAULT_SYSTEM_PROMPT",
    "SCHEMA_VERSION",
    "CandidateEnded",
    "EngineScorer",
    "LoglikScorer",
    "PrmScorer",
    "ProblemEnded",
    "ProblemStarted",
    "Prompt",
    "RandomScorer",
    "ScoreRequest",
    "Scorer",
    "ScorerError",
    "Search",
    "Solution",
    "Step",
    "StepCommitted",
    "TraceEvent",
    "Warned",
    "best_of_n",
    "best_of_n_config",
    "solve",
]
