"""A decoder trunk with a classification head on every token: process reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig

from kvcore.models.checkpoint import (
    INDEX,
    OUTPUT_MATRIX,
    WEIGHTS,
    check_fit,
    check_kinds,
    stored_tensors,
    weight_files,
)
from kvcore.models.support import UnsupportedModel

PRM_ARCHITECTURE = "Qwen2ForProcessRewardModel"


class TokenHeadModel(nn.Module):
    """Linear, ReLU, Linear on the trunk's last hidden states.

    Attributes:
        model: the trunk, a transformers decoder without its output matrix.
        score: the head; logits [.., labels].
    Source: Qwen2.5-Math-PRM (model card and configuration).
    """

    def __init__(self, trunk: nn.Module, hidden: int, labels: int) -> None:
        super().__init__()
        self.model = trunk
        self.config = trunk.config
        self.score = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, labels))

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)  # type: ignore[operator]

    def forward(self, **inputs: Any) -> Tensor:
        """Head logits of every token, [1, tokens, labels]."""
        logits: Tensor = self.score(self.model(**inputs).last_hidden_state)
        return logits


def load_token_head_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype
) -> TokenHeadModel:
    """Trunk and head of a Qwen2.5-Math-PRM checkpoint; no remote code.

    Raises:
        UnsupportedModel: weights are missing, are left over, or have another shape.
    """
    if PRM_ARCHITECTURE not in (config.architectures or []):
        raise UnsupportedModel(
            f"expected a {PRM_ARCHITECTURE} checkpoint, got {config.architectures}"
        )
    with torch.device("meta"):
        trunk = AutoModel.from_config(config, dtype=dtype)
        model = TokenHeadModel(trunk, config.hidden_size, getattr(config, "num_labels", 2) or 2)
    # Some exports store an output matrix, which nobody uses.
    stored = {name: t for name, t in stored_tensors(folder).items() if name != OUTPUT_MATRIX}
    if not stored:
        raise ValueError(f"no weights: expected {WEIGHTS} or {INDEX}")
    own = model.state_dict().keys()
    check_fit(own - stored.keys(), stored.keys() - own)
    check_kinds(stored)
    state: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open has no __iter__)
                if name in own:
                    state[name] = tensors.get_tensor(name).to(dtype)
    model.load_state_dict(state, assign=True)
    _rebuild_rope(trunk, config)
    return model


def _rebuild_rope(trunk: nn.Module, config: PretrainedConfig) -> None:
    """RoPE frequencies are buffers that no checkpoint stores: compute them off the meta device."""
    rotary: Any = trunk.rotary_emb
    trunk.rotary_emb = type(rotary)(config=config)
