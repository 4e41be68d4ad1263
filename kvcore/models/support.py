"""Which model configurations are served correctly; all others are refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from kvcore.cache import CacheShape

MODEL_TYPES = ("qwen2", "qwen3", "llama")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_SCALED_ROPE = ("linear", "llama3", "yarn")

# Keys that change what is attended or how it is weighed, with the values that leave it as it is.
# The model classes do not read them: a file that sets one describes another model.
_OFF: tuple[Any, ...] = (None, False, 0)
_ATTENTION_KEYS: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (None, True),
    "causal": (None, True),
    "use_causal_mask": (None, True),
    "bidirectional": _OFF,
    "is_bidirectional": _OFF,
    "use_bidirectional_attention": _OFF,
    "prefix_lm": _OFF,
    "is_encoder_decoder": _OFF,
    "add_cross_attention": _OFF,
    "attention_chunk_size": _OFF,
    "attention_window": _OFF,
    "attn_logit_softcapping": _OFF,
    "final_logit_softcapping": _OFF,
    "logit_softcapping": _OFF,
    "clip_qkv": _OFF,
    "query_pre_attn_scalar": _OFF,
    "attention_multiplier": _OFF,
    "scale_attn_by_inverse_layer_idx": _OFF,
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "partial_rotary_factor": (None, 1),
    "no_rope_layer_interval": _OFF,
}


class UnsupportedModel(ValueError):
    """A model that would decode wrongly here; the message says why."""


def check_supported(config: PretrainedConfig) -> None:
    """Raise ``UnsupportedModel`` naming the feature that is not served correctly."""

    def refuse(reason: str) -> None:
        raise UnsupportedModel(f"model: {reason}")

    if config.model_type not in MODEL_TYPES:
        names = ", ".join(MODEL_TYPES)
        refuse(f"model type {config.model_type!r} is not supported (expected one of {names})")
    check_settings(vars(config))
    layer_types = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in layer_types):
        kinds = sorted(set(layer_types) - {"full_attention"})
        refuse(f"layers with {', '.join(kinds)} are not supported: every layer must attend fully")
    if getattr(config, "use_sliding_window", False):
        refuse("sliding-window attention (use_sliding_window) is not supported")
    window = getattr(config, "sliding_window", None)
    if (
        window is not None
        and window < config.max_position_embeddings
        and getattr(config, "use_sliding_window", None) is None
    ):
        refuse(f"sliding-window attention (sliding_window {window}) is not supported")
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
    elif not _is_positive(rope["rope_theta"]):
        refuse(f"rope_theta: expected a number > 0, got {rope['rope_theta']!r}")
    shape = cache_shape(config, None)
    if shape.q_heads % shape.kv_heads:
        refuse(f"{shape.q_heads} query heads cannot share {shape.kv_heads} kv heads")
    if shape.head_dim % 8 or not 8 <= shape.head_dim <= 256:
        refuse(f"head_dim {shape.head_dim} is not a multiple of 8 in [8, 256]")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ``UnsupportedModel`` naming a key of ``config.json`` that asks for something else.

    For what a configuration object no longer says, or cannot be made of.
    """
    for key, harmless in _ATTENTION_KEYS.items():
        value = settings.get(key)
        if value not in harmless:
            raise UnsupportedModel(f"model: {key} = {value!r} changes attention: not supported")
    layers = settings.get("no_rope_layers")
    if isinstance(layers, list) and not all(layers):
        raise UnsupportedModel("model: layers without RoPE (no_rope_layers) are not supported")
    if settings.get("model_type", MODEL_TYPES[0]) in MODEL_TYPES:
        for key in ("rope_parameters", "rope_scaling"):
            if settings.get(key) is not None:
                _check_rope(key, settings[key])


def _check_rope(key: str, rope: Any) -> None:
    """One line for what transformers meets with errors from deep inside, or not at all."""
    if not isinstance(rope, Mapping):
        raise UnsupportedModel(f"model: {key}: expected an object, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModel(
            f"model: rope_type {kind!r} changes with the length of the batch and is not supported"
        )
    if kind not in ROPE_TYPES:
        names = ", ".join(ROPE_TYPES)
        raise UnsupportedModel(
            f"model: {key}: rope_type {kind!r} is not supported (expected one of {names})"
        )
    if rope.get("partial_rotary_factor", 1) not in (None, 1):
        raise UnsupportedModel(
            f"model: partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported"
        )
    factor = rope.get("factor")
    if kind in _SCALED_ROPE and not _is_positive(factor):
        raise UnsupportedModel(
            f"model: {key}: expected a factor > 0 for rope_type {kind!r}, got {factor!r}"
        )


def _is_positive(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0


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
