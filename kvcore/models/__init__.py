"""transformers decoders, unmodified, on kvcore's cache."""

from kvcore.models.loader import LoadedModel, UnsupportedModel, bind_model, load_model, load_prm

__all__ = ["LoadedModel", "UnsupportedModel", "bind_model", "load_model", "load_prm"]
