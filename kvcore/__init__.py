"""kvcore: reasoning models with a KV cache of fixed size, without losing their accuracy.

    engine = kvcore.Engine.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", eviction=...)
    [output] = engine.generate("Once upon a time")

Importing this package imports neither torch nor transformers: each name brings what it needs when
it is first used.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.config import (
        DetectorConfig,
        EngineConfig,
        EvictionConfig,
        SamplingParams,
        SearchConfig,
        pyramid_budgets,
    )
    from kvcore.engine import CacheUse, Engine, EngineStats, Output
    from kvcore.models import LoadedModel, UnsupportedModel, load_model, load_prm
    from kvcore.search import (
        LoglikScorer,
        PrmScorer,
        Prompt,
        RandomScorer,
        Search,
        Solution,
        solve,
    )
    from kvcore.search.best_of_n import best_of_n

__version__ = "0.1.0"

_HOMES = {
    "kvcore.config": (
        "DetectorConfig",
        "EngineConfig",
        "EvictionConfig",
        "SamplingParams",
        "SearchConfig",
        "pyramid_budgets",
    ),
    "kvcore.engine": ("CacheUse", "Engine", "EngineStats", "Output"),
    "kvcore.models": ("LoadedModel", "UnsupportedModel", "load_model", "load_prm"),
    "kvcore.search": (
        "LoglikScorer",
        "Prompt",
        "PrmScorer",
        "RandomScorer",
        "Search",
        "Solution",
        "best_of_n",
        "solve",
    ),
}

__all__ = [
    "CacheUse",
    "DetectorConfig",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "EvictionConfig",
    "LoadedModel",
    "LoglikScorer",
    "Output",
    "PrmScorer",
    "Prompt",
    "RandomScorer",
    "SamplingParams",
    "Search",
    "SearchConfig",
    "Solution",
    "UnsupportedModel",
    "best_of_n",
    "load_model",
    "load_prm",
    "pyramid_budgets",
    "solve",
]

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Silent unless the application, or --log-level, listens.
logging.getLogger(__name__).addHandler(logging.NullHandler())
