"""Scorers: what decides between candidate steps."""

from kvcore.search.failures import ScorerError
from kvcore.search.scorers.base import EngineScorer, Scorer, ScoreRequest, SearchScorer
from kvcore.search.scorers.loglik import LoglikScorer
from kvcore.search.scorers.prm import PrmScorer
from kvcore.search.scorers.random import RandomScorer

__all__ = [
    "EngineScorer",
    "LoglikScorer",
    "PrmScorer",
    "RandomScorer",
    "ScoreRequest",
    "Scorer",
    "ScorerError",
    "SearchScorer",
]
