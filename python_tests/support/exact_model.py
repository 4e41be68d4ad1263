"""Tiny models whose results are the same bits whatever shares the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcore.models import LoadedModel, bind_model
from support.tiny_models import byte_tokenizer, make_module


class ExactLinear(nn.Module):
    """A linear layer in double: what the order of its sums changes is lost when it is rounded."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().double(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().double())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.double(), self.weight, self.bias).to(x.dtype)


def make_exact_model(*, seed: int = 0, endless: bool = False) -> LoadedModel:
    """A random Qwen2 with a tokenizer; ``endless``: no id ends a text."""
    module = make_module(seed=seed)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, ExactLinear(child))
    model = bind_model(module, byte_tokenizer(), name="exact", prepack=False)
    if endless:
        object.__setattr__(model, "eos_ids", frozenset())
    return model


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def is_exact(model: LoadedModel, rows: int = 37) -> bool:
    """Whether a row's result does not depend on the rows beside it."""
    module = next(m for m in model.model.modules() if isinstance(m, ExactLinear))
    x = torch.randn(rows, module.weight.shape[1], generator=torch.Generator().manual_seed(3))
    alone = torch.cat([module(row[None]) for row in x])
    return same_bits(module(x), alone)
