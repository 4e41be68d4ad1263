"""transformers decoders, unmodified, on kvcore's cache."""

from typing import TYPE_CHECKING

from kvcore._lazy import lazy_names

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

# torch is imported with the first of them: where a model lies is found without it.
_LOADER = "kvcore.models.loader"
__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, _LOADER))
