"""The attention function through which transformers decoders use the cache.

A forward takes ``kv_batch=AttentionContext(...)``; transformers hands it down to every layer as a
keyword, so nothing lives on modules or in globals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvcore.cache import KVCache
from kvcore.models.support import UnsupportedModel
from kvcore.ops import RaggedBatch

ATTENTION_NAME = "kvcore"


@dataclass
class AttentionContext:
    """The cache and the ragged batch of one forward, and how many layers have attended so far."""

    cache: KVCache
    batch: RaggedBatch
    layers: int = 0

    def check_complete(self) -> None:
        """After the forward. Raises ``UnsupportedModel`` if a layer did not attend to the cache."""
        expected = self.cache.shape.layers
        if self.layers != expected:
            raise UnsupportedModel(
                f"model: expected all {expected} layers to attend through the cache, got "
                f"{self.layers}: attention of a model's own gives it no queries, keys and values"
            )


def kv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    kv_batch: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Append this layer's keys and values to the cache, then attend over it.

    Args:
        query: [1, q_heads, tokens, head_dim] of a flattened ragged batch, after RoPE.
        key, value: [1, kv_heads, tokens, head_dim].
    Returns:
        ([1, tokens, q_heads, head_dim], None).
    """
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return attend_cached(layer, q, k, v, scaling, kv_batch)[None], None


def attend_cached(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    kv_batch: AttentionContext | None,
) -> Tensor:
    """The same on [tokens, heads, head_dim]; returns [tokens, q_heads, head_dim].

    Raises:
        ValueError: there is no cache to attend over.
    """
    if kv_batch is None:
        raise ValueError("kv_batch: a model bound to kvcore runs only through kvcore.Engine")
    out = kv_batch.cache.update_and_attend(layer, query, key, value, kv_batch.batch, scaling)
    kv_batch.layers += 1
    return out


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Causality is the cache's business; without this transformers would build a mask."""


def register_attention() -> None:
    """Make ``model.set_attn_implementation("kvcore")`` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, kv_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
