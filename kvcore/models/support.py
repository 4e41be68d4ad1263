"""Which model configurations are served correctly; all others are refused by name."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from kvcore.cache import CacheShape

MODEL_TYPES = ("qwen2", "qwen3", "llama")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class UnsupportedModel(ValueError):
    """A model that would decode wrongly here; the message says why."""


def check_supported(config: PretrainedConfig) -> None:
    """Raise ``UnsupportedModel`` naming the feature that is not served correctly."""

    def refuse(reason: str) -> None:
        raise UnsupportedModel(f"model: {reason}")

    if config.model_type not in MODEL_TYPES:
        names = ", ".join(MODEL_TYPES)
        refuse(f"model type {config.model_type!r} is not supported (expected one of {names})")
    layer_types = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in layer_types):
        kinds = sorted(set(layer_types) - {"full_attention"})
        refuse(f"layers with {', '.join(kinds)} are not supported: every layer must attend fully")
    if getattr(config, "use_sliding_window", False):
        refuse("sliding-window attention (use_sliding_window) is not supported")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        refuse("ALiBi position biases are not supported")
    if getattr(config, "attention_sinks", False) or getattr(config, "sink_logits", None):
        refuse("attention sinks are not supported")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("layers that share keys and values (num_kv_shared_layers) are not supported")
    quantization: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    if quantization:
        get = quantization.get if isinstance(quantization, dict) else quantization.__dict__.get
        if get("kv_cache_scheme"):
            refuse("a quantised (fp8) KV cache (kv_cache_scheme) is not supported")
        refuse(f"quantised weights ({get('quant_method')}) are not supported; use bf16 or fp32")
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope:
        refuse("its configuration has no rope_parameters.rope_theta (transformers 5 form)")
    kind = rope.get("rope_type", "default")
    if kind in _LENGTH_DEPENDENT_ROPE:
        refuse(f"rope_type {kind!r} changes with the length of the batch and is not supported")
    shape = cache_shape(config, None)
    if shape.head_dim % 8 or not 8 <= shape.head_dim <= 256:
        refuse(f"head_dim {shape.head_dim} is not a multiple of 8 in [8, 256]")


def cache_shape(config: PretrainedConfig, dtype: Any) -> CacheShape:
    """Lanes and head size that a configuration implies."""
    heads = config.num_attention_heads
    return CacheShape(
        layers=config.num_hidden_layers,
        q_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
    )
