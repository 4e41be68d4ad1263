"""The engine: continuous-batched decoding over a bounded cache."""

from kvcore.engine.engine import Engine
from kvcore.engine.events import (
    EngineStats,
    FeedOutput,
    Finish,
    GenerateSpec,
    Generation,
    StepEvent,
)

__all__ = [
    "Engine",
    "EngineStats",
    "FeedOutput",
    "Finish",
    "GenerateSpec",
    "Generation",
    "StepEvent",
]
