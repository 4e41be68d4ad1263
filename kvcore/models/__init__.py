"""transformers decoders on kvcore's cache."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.models.loader import LoadedModel, bind_model, load_checkpoint, load_model, load_prm
    from kvcore.models.support import UnsupportedModel

__all__ = [
    "LoadedModel",
    "UnsupportedModel",
    "bind_model",
    "load_checkpoint",
    "load_model",
    "load_prm",
]


def __getattr__(name: str) -> Any:
    """torch comes with the first of these names: where a model lies is found without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("kvcore.models.loader"), name)
