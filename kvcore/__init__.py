"""kvcore: reasoning models with a KV cache of fixed size, without losing their accuracy."""

__version__ = "0.1.0"
