"""The engine: continuous-batched decoding over a bounded cache."""

from kvcore.engine.engine import Engine
from kvcore.engine.events import (
    EngineStats,
    Finish,
    GenerateSpec,
    Generation,
    Output,
    StepEvent,
)

__all__ = [
    "Engine",
    "EngineStats",
    "Finish",
    "GenerateSpec",
    "Generation",
    "Output",
    "StepEvent",
]
