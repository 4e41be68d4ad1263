"""Attention and MLP of a decoder layer with one product where the stock modules have several.

A module is replaced as a whole, so nothing is kept between calls. Replaced is only what is known:
by its class, by its parts, and because on random input it computed the same as its replacement.
Everything else (adapters, quantised layers, classes of other names, another activation) stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import SiLUActivation

from kvcore.models.attention import (
    ATTENTION_NAME,
    AttentionContext,
    attend_cached,
    register_attention,
)
from kvcore.models.prepack import PackedLinear, is_plain, is_worth_packing
from kvcore.models.support import MODEL_TYPES

_FAMILIES = ("Llama", "Qwen2", "Qwen3")
_TRIAL = {
    "vocab_size": 8,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "pad_token_id": None,
}
# Replacements differ from stock modules by rounding only; relative to the largest output.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class FusedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up in one product."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self._gates = mlp.gate_proj.weight.dtype == torch.float32  # in the product itself
        self.gate_up = PackedLinear(mlp.gate_proj, mlp.up_proj, gated=self._gates)
        self.down_proj = mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """[.., hidden] to [.., hidden]."""
        if self._gates:
            gated = self.gate_up(x)
        else:
            gate, up = self.gate_up.split(x)
            gated = nn.functional.silu(gate) * up
        out: Tensor = self.down_proj(gated)
        return out


class FusedAttention(nn.Module):
    """Self-attention over the cache with queries, keys and values in one product.

    Attributes:
        layer_idx: which layer of the cache.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.qkv = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = attention.o_proj
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        kv_batch: AttentionContext | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As the stock module of a model bound to kvcore: ``hidden_states`` [1, tokens, hidden]."""
        heads = [
            part[0].unflatten(-1, (-1, self.head_dim)) for part in self.qkv.split(hidden_states)
        ]
        query, key, value = heads  # [tokens, heads, head_dim] each
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = (table[0, :, None] for table in position_embeddings)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        out = attend_cached(self.layer_idx, query, key, value, self.scaling, kv_batch)
        return self.o_proj(out.flatten(1)[None]), None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat((-right, left), dim=-1).mul_(sin))


def fuse_layers(model: nn.Module) -> dict[str, int]:
    """Replace the attentions and MLPs below ``model`` that can be fused, one at a time.

    Modifies ``model``; the weights that went into a product are freed. Returns how many of each,
    kinds without any left out. REQUIRES: ``model`` is bound to kvcore's attention, and no linear
    layer of it has been packed.
    """
    counts: dict[str, int] = {}
    trusted: dict[type, bool] = {}  # classes whose replacement has been compared
    # Names, because a list of modules would keep their weights alive.
    for name in [name for name, module in model.named_modules() if _kind(module) is not None]:
        module = model.get_submodule(name)
        kind = _kind(module)
        if kind is None:
            continue
        if type(module) not in trusted:
            trusted[type(module)] = _agrees(kind, module)
        if trusted[type(module)]:
            parent, _, leaf = name.rpartition(".")
            fused = FusedMLP(module) if kind == "mlp" else FusedAttention(module)
            setattr(model.get_submodule(parent), leaf, fused)
            counts[kind] = counts.get(kind, 0) + 1
        del module  # and with it its weights
    return counts


def _kind(module: nn.Module) -> str | None:
    """ "mlp" or "attention" if the module has the class and the parts of one that can be fused."""
    known = {f"{family}{suffix}": suffix for family in _FAMILIES for suffix in ("MLP", "Attention")}
    suffix = known.get(type(module).__name__)
    if suffix is None or not type(module).__module__.startswith("transformers.models."):
        return None
    if not is_plain(module):
        return None
    if suffix == "MLP":
        silu = type(getattr(module, "act_fn", None)) in (SiLUActivation, nn.SiLU)
        same_width = silu and _same_outputs(module, "gate_proj", "up_proj")
        return "mlp" if same_width and _fits(module, "gate_proj", "up_proj") else None
    return "attention" if _fits(module, "q_proj", "k_proj", "v_proj") else None


def _fits(module: Any, *names: str) -> bool:
    """Whether these are plain linears of one input and type that are worth packing together."""
    linears: list[Any] = [getattr(module, name, None) for name in names]
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    kinds = {(x.in_features, x.weight.dtype, x.weight.device.type) for x in linears}
    biases = {x.bias.dtype for x in linears if x.bias is not None}
    return (
        len(kinds) == 1
        and biases <= {linears[0].weight.dtype}
        and linears[0].weight.device.type == "cpu"
        and is_worth_packing(*linears)
    )


def _same_outputs(module: Any, *names: str) -> bool:
    return len({getattr(getattr(module, name, None), "out_features", None) for name in names}) == 1


class _Recorder:
    """Stands in for a cache: keeps what is appended, attends by returning the queries."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def update_and_attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: object, scale: float
    ) -> Tensor:
        self.seen += [query.clone(), key.clone(), value.clone(), torch.tensor(float(scale))]
        return query.contiguous()


@torch.inference_mode()
def _agrees(kind: str, module: Any) -> bool:
    """Whether the replacement computes what this module does, up to rounding."""
    linear = module.gate_proj if kind == "mlp" else module.q_proj
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, 3, linear.in_features), generator=generator).to(linear.weight.dtype)
    try:
        if kind == "mlp":
            pairs = [(module(x), FusedMLP(module)(x))]
        else:
            pairs = list(
                zip(*(_watch(m, x, module) for m in (module, FusedAttention(module))), strict=True)
            )
    except (AttributeError, TypeError, ValueError, RuntimeError):  # another interface
        return False
    return all(_is_close(stock, fused) for stock, fused in pairs)


def _watch(forward: Callable[..., Any], x: Tensor, module: Any) -> list[Tensor]:
    """What an attention module gives the cache, and what it makes of the answer."""
    generator = torch.Generator().manual_seed(1)
    tables = torch.rand((2, *x.shape[:2], module.head_dim), generator=generator).to(x.dtype)
    recorder = _Recorder()
    context = AttentionContext(recorder, None)  # type: ignore[arg-type]
    out = forward(
        hidden_states=x,
        position_embeddings=(tables[0], tables[1]),
        attention_mask=None,
        kv_batch=context,
    )
    return [*recorder.seen, out[0], torch.tensor(float(context.layers))]


def _is_close(stock: Tensor, fused: Tensor) -> bool:
    if stock.shape != fused.shape or stock.dtype != fused.dtype:
        return False
    allowed = _TOLERANCE[stock.dtype] * float(stock.abs().max())
    return bool(((stock - fused).abs() <= allowed).all())


def trial_fusions(dtype: torch.dtype) -> dict[str, list[str]]:
    """What is fused in a model of each supported type with the libraries of this machine: builds a
    small one and fuses it.
    """
    register_attention()
    found: dict[str, list[str]] = {}
    for model_type in MODEL_TYPES:
        config = AutoConfig.for_model(model_type, **_TRIAL)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.set_attn_implementation(ATTENTION_NAME)
        found[model_type] = sorted(fuse_layers(model.eval().requires_grad_(False)))
    return found
