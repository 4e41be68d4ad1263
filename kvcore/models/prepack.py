"""oneDNN-prepacked linear layers for CPU decoding.

Stock ``torch`` linears re-order the weight on every call; at 1 to 64 rows that costs up to several
times the product itself. In bf16 the packed product is bitwise the stock one. In float32 it differs
by rounding, and pays for large weights only: a packed product costs some 40 us before it begins.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MIN_FLOAT32_WEIGHTS = 1 << 18


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
    """Whether packed linears of float32 or bfloat16 exist here."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def is_worth_packing(linear: nn.Linear) -> bool:
    """Whether its packed form exists here and is faster."""
    if not can_prepack(linear.weight.dtype):
        return False
    large = linear.weight.numel() >= MIN_FLOAT32_WEIGHTS
    return large or linear.weight.dtype != torch.float32


def prepack_linears(model: nn.Module) -> int:
    """Replace every ``nn.Linear`` below ``model`` whose packed form is faster, one at a time;
    returns how many.

    Modifies ``model``. A weight shared with an embedding stays there; other weights are freed.
    """
    count = 0
    parents = [m for m in model.modules() if type(m) is not nn.Linear]  # holds no weight alive
    for parent in parents:
        for name in [n for n, child in parent.named_children() if type(child) is nn.Linear]:
            if is_worth_packing(getattr(parent, name)):  # no variable keeps the weight alive
                setattr(parent, name, PackedLinear(getattr(parent, name)))
                count += 1
    return count
