"""Linear layers whose weights lie as a CPU reads them fastest.

Stock ``torch`` linears re-order the weight on every call; at 1 to 64 rows that costs up to several
times the product itself. In bfloat16 oneDNN's packed product is bitwise the stock one. In float32
the core's own product (``ops.linear``) is taken, which differs by rounding and does not depend on
the batch; weights that bfloat16 holds exactly, as those of most checkpoints, are kept in it, which
halves what a step reads and changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvcore import ops

MIN_FLOAT32_WEIGHTS = 1 << 18
_PANEL = ops.LINEAR_PANEL
_CHUNK = 256  # panels that are packed at once, so that nothing but them is copied


class PackedLinear(nn.Module):
    """Takes the place of one ``nn.Linear``, or of several with the same input; their plain weights
    are gone once packed.

    Args:
        linears: of one element type and one number of inputs.
        gated: of two float32 ones, a gate and what it gates: silu(gate(x)) * other(x).
    """

    def __init__(self, *linears: nn.Linear, gated: bool = False) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.widths = [linear.out_features for linear in linears]
        self._gated = gated
        self._own = linears[0].weight.dtype == torch.float32
        unit = _PANEL if self._own and len(linears) > 1 else 1
        self.starts = [0]
        for width in self.widths:
            self.starts.append(self.starts[-1] + -(-width // unit) * unit)
        last = 0 if gated else len(linears) - 1
        self.out_features = self.starts[last] + self.widths[last]
        if self._own:
            self._packed = _pack([linear.weight.detach() for linear in linears], gated)
            self._bias = _pack_biases(linears, gated)
        else:
            rows = [linear.weight.detach() for linear in linears]
            weight = rows[0] if len(rows) == 1 else torch.cat(rows)
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            biases = _biases(linears)
            self._bias = None if biases is None else torch.cat(biases)

    def forward(self, x: Tensor) -> Tensor:
        """[.., out_features]; of several linears the outputs follow each other (``split``)."""
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        if not self._own:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        rows = x.reshape(-1, self.in_features)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = ops.linear(rows, self._packed, self._bias, self.out_features, gated=self._gated)
        return out.view(*x.shape[:-1], self.out_features)

    def split(self, x: Tensor) -> list[Tensor]:
        """The outputs of each linear, as views of one tensor."""
        out = self(x)
        pairs = zip(self.starts[:-1], self.widths, strict=True)
        return [out[..., start : start + width] for start, width in pairs]


def _biases(linears: tuple[nn.Linear, ...]) -> list[Tensor] | None:
    """The bias of each, zeros for one without; None if none has one."""
    if all(linear.bias is None for linear in linears):
        return None
    return [
        linear.weight.new_zeros(linear.out_features)
        if linear.bias is None
        else linear.bias.detach()
        for linear in linears
    ]


def _pack_biases(linears: tuple[nn.Linear, ...], gated: bool) -> Tensor | None:
    """f32 [panels, 16], in the order of ``_pack``."""
    biases = _biases(linears)
    if biases is None:
        return None
    padded = [nn.functional.pad(b, (0, -len(b) % _PANEL)).view(-1, _PANEL) for b in biases]
    return torch.stack(padded, dim=1).flatten(0, 1) if gated else torch.cat(padded)


def _pack(weights: list[Tensor], gated: bool) -> Tensor:
    """[panels, inputs, 16] of f32 [outputs, inputs] each: the panels of one after the other, or
    alternating if gated. bf16 if that holds every weight exactly.
    """
    counts = [-(-len(weight) // _PANEL) for weight in weights]
    shape = (sum(counts), weights[0].shape[1], _PANEL)
    packed = torch.empty(shape, dtype=torch.bfloat16)
    for place, panels in _panels(weights, counts, gated):
        packed[place] = panels
        if not torch.equal(packed[place].float(), panels):
            break
    else:
        return packed
    packed = torch.empty(shape, dtype=torch.float32)
    for place, panels in _panels(weights, counts, gated):
        packed[place] = panels
    return packed


def _panels(
    weights: list[Tensor], counts: list[int], gated: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Where panels go, and the panels."""
    step = len(weights) if gated else 1
    for i, weight in enumerate(weights):
        begin = i if gated else sum(counts[:i])
        for first in range(0, counts[i], _CHUNK):
            rows = weight[first * _PANEL : (first + _CHUNK) * _PANEL]
            panels = nn.functional.pad(rows, (0, 0, 0, -len(rows) % _PANEL))
            panels = panels.view(-1, _PANEL, weight.shape[1]).transpose(1, 2)
            place = begin + first * step
            yield slice(place, place + len(panels) * step, step), panels


def can_prepack(dtype: torch.dtype) -> bool:
    """Whether packed linears of this type exist here and are faster."""
    if dtype == torch.bfloat16:
        available = torch.backends.mkldnn.is_available()
        return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module) -> bool:
    """No hook, no forward of its own, no parametrisation: calling it is calling its class."""
    hooked = any(getattr(module, hooks, None) for hooks in _HOOKS)
    return not hooked and "forward" not in vars(module) and not hasattr(module, "parametrizations")


def is_worth_packing(*linears: nn.Linear) -> bool:
    """Whether their packed form, one for all, exists here, is faster, and computes the same."""
    dtype = linears[0].weight.dtype
    if not can_prepack(dtype) or not all(is_plain(linear) for linear in linears):
        return False
    return (
        dtype != torch.float32
        or sum(linear.weight.numel() for linear in linears) >= MIN_FLOAT32_WEIGHTS
    )


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
