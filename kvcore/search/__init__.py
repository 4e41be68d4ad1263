"""Stepwise search: one base model, maybe a helper, and a scorer that picks each next step."""

from kvcore.search.best_of_n import best_of_n, best_of_n_config
from kvcore.search.driver import Search, solve
from kvcore.search.ports import ModelPort, WakingPort
from kvcore.search.prompt import DEFAULT_SYSTEM_PROMPT, Prompt
from kvcore.search.results import (
    SCHEMA_VERSION,
    CandidateCount,
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
    SearchScorer,
)

__all__ = [
    "DEFAULT_SYSTEM_PROMPT",
    "SCHEMA_VERSION",
    "CandidateCount",
    "CandidateEnded",
    "EngineScorer",
    "LoglikScorer",
    "ModelPort",
    "PrmScorer",
    "ProblemEnded",
    "ProblemStarted",
    "Prompt",
    "RandomScorer",
    "ScoreRequest",
    "Scorer",
    "ScorerError",
    "Search",
    "SearchScorer",
    "Solution",
    "Step",
    "StepCommitted",
    "TraceEvent",
    "WakingPort",
    "Warned",
    "best_of_n",
    "best_of_n_config",
    "solve",
]
