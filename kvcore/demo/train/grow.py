"""Larger models that start as a smaller one: what they compute does not change by growing."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2Model


@torch.no_grad()
def grow_trunk(small: Qwen2Model, config: Qwen2Config) -> Qwen2Model:
    """A trunk of the shape of ``config`` that computes exactly what ``small`` does.

    It may have more layers and wider MLPs. New layers and new MLP units start without effect (the
    matrices that write their results are zero) and everything else is random.

    Raises:
        ValueError: another part of the shape differs, or there would be less of something.
    """
    old: Qwen2Config = small.config
    for field in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        if getattr(old, field) != getattr(config, field):
            raise ValueError(
                f"{field}: expected {getattr(old, field)}, got {getattr(config, field)}"
            )
    for field in ("num_hidden_layers", "intermediate_size"):
        if getattr(config, field) < getattr(old, field):
            raise ValueError(
                f"{field}: expected >= {getattr(old, field)}, got {getattr(config, field)}"
            )
    trunk = Qwen2Model(config)
    units = old.intermediate_size
    trunk.embed_tokens.load_state_dict(small.embed_tokens.state_dict())
    trunk.norm.load_state_dict(small.norm.state_dict())
    layers: Any = trunk.layers
    sources: Any = small.layers
    for i, layer in enumerate(layers):
        layer.mlp.down_proj.weight.zero_()
        if i >= len(sources):
            layer.self_attn.o_proj.weight.zero_()
            continue
        source = sources[i]
        layer.self_attn.load_state_dict(source.self_attn.state_dict())
        layer.input_layernorm.load_state_dict(source.input_layernorm.state_dict())
        layer.post_attention_layernorm.load_state_dict(source.post_attention_layernorm.state_dict())
        layer.mlp.gate_proj.weight[:units] = source.mlp.gate_proj.weight
        layer.mlp.up_proj.weight[:units] = source.mlp.up_proj.weight
        layer.mlp.down_proj.weight[:, :units] = source.mlp.down_proj.weight
    return trunk
