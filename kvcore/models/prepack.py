"""oneDNN-prepacked linear layers for CPU decoding.

Stock ``torch`` bf16 linears re-order the weight on every call; at 1 to 64 rows that re-ordering
costs several times the product itself. The packed product is bitwise equal to the stock one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """Takes the place of ``nn.Linear``; the plain weight is gone once packed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def can_prepack(dtype: torch.dtype) -> bool:
    """Whether packed linears exist here and compute what stock ones do (bf16 only)."""
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def prepack_linears(model: nn.Module) -> int:
    """Replace every ``nn.Linear`` below ``model``, one at a time; returns how many.

    Modifies ``model``. A weight shared with an embedding stays there; other weights are freed.
    """
    count = 0
    parents = [m for m in model.modules() if type(m) is not nn.Linear]  # holds no weight alive
    for parent in parents:
        for name in [n for n, child in parent.named_children() if type(child) is nn.Linear]:
            setattr(parent, name, PackedLinear(getattr(parent, name)))
            count += 1
    return count
