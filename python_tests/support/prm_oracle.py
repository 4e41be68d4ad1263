"""A process reward model in double precision, as its model card and transformers' Qwen2 define it.

Weights are a formula, so that stored scores depend on no random number generator.
Source: Qwen2.5-Math-PRM model card (conversation, separator token, softmax over two labels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SEPARATOR = "<extra_0>"


def formula_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Float32 weights for parameters of the given shapes, by the order of their names."""
    weights = {}
    for i, name in enumerate(sorted(shapes)):
        size = int(np.prod(shapes[name]))
        wave = np.sin(np.arange(size) * (1.0 + 0.37 * i) ** 1.5 + i)
        centre, scale = (1.0, 0.2) if "norm" in name else (0.0, 0.35)
        scale *= 4 if name.startswith("score.") else 1  # scores far from one half
        weights[name] = (centre + scale * wave).reshape(shapes[name]).astype(np.float32)
    return weights


def conversation(
    tokenizer: Any, system_prompt: str, question: str, steps: Sequence[str]
) -> list[int]:
    """Ids of the whole conversation with a separator after each step."""
    messages = [
        {"role": "system", "content": system_prompt},
        {"role": "user", "content": question},
        {"role": "assistant", "content": SEPARATOR.join(steps) + SEPARATOR},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _softmax(x: np.ndarray) -> np.ndarray:
    weight = np.exp(x - x.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding of x [tokens, heads, dim]: the two halves of dim are the pairs."""
    tokens, _, dim = x.shape
    frequency = theta ** (-np.arange(0, dim, 2) / dim)
    angle = np.arange(tokens)[:, None, None] * frequency
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def head_logits(weights: dict[str, np.ndarray], config: Any, ids: Sequence[int]) -> np.ndarray:
    """[tokens, labels] of a Qwen2 trunk and Linear, ReLU, Linear on its last hidden states."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = config.hidden_size // heads
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    hidden = w["model.embed_tokens.weight"][list(ids)]
    count = len(hidden)
    mask = np.triu(np.full((count, count), -np.inf), 1)
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        x = _rms_norm(hidden, w[f"{name}.input_layernorm.weight"], eps)
        q = _rotate(linear(x, f"{name}.self_attn.q_proj").reshape(count, heads, dim), theta)
        k = _rotate(linear(x, f"{name}.self_attn.k_proj").reshape(count, kv_heads, dim), theta)
        v = linear(x, f"{name}.self_attn.v_proj").reshape(count, kv_heads, dim)
        seen = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            seen.append(_softmax(q[:, head] @ k[:, kv].T / np.sqrt(dim) + mask) @ v[:, kv])
        hidden = hidden + linear(np.concatenate(seen, axis=-1), f"{name}.self_attn.o_proj")
        x = _rms_norm(hidden, w[f"{name}.post_attention_layernorm.weight"], eps)
        gate = linear(x, f"{name}.mlp.gate_proj")
        x = gate / (1 + np.exp(-gate)) * linear(x, f"{name}.mlp.up_proj")
        hidden = hidden + linear(x, f"{name}.mlp.down_proj")
    hidden = _rms_norm(hidden, w["model.norm.weight"], eps)
    return linear(np.maximum(linear(hidden, "score.0"), 0), "score.2")


def step_scores(
    weights: dict[str, np.ndarray], config: Any, ids: Sequence[int], separator: int
) -> list[float]:
    """Probability of the positive label at every separator."""
    logits = head_logits(weights, config, ids)
    return [float(_softmax(logits[i])[1]) for i, token in enumerate(ids) if token == separator]
