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
from kvcore.engine.outputs import CacheUse, Output

__all__ = [
    "CacheUse",
    "Engine",
    "EngineStats",
    "FeedOutput",
    "Finish",
    "GenerateSpec",
    "Generation",
    "Output",
    "StepEvent",
]
