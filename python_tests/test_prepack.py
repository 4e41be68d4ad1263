"""Packed linear layers compute the same bits as stock ones, and free what they replace."""

from __future__ import annotations

import weakref

import pytest
import torch
from engine_tools import generate, greedy, make_prompts, sampled, small_config
from tiny_models import byte_tokenizer, make_module
from torch import nn

from kvcore.engine import Engine
from kvcore.models import LoadedModel, bind_model
from kvcore.models.prepack import PackedLinear, can_prepack, prepack_linears

needs_packing = pytest.mark.skipif(
    not can_prepack(torch.bfloat16), reason="oneDNN computes no bf16 products here"
)


def make_linear(inputs: int, outputs: int, *, bias: bool, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


def linears(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if type(child) is nn.Linear]


def packed(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if isinstance(child, PackedLinear)]


def storage_of(linear: nn.Linear) -> weakref.ref:
    """Dies with the memory of the weight, whoever else looks at it."""
    return weakref.ref(linear.weight.untyped_storage())


@needs_packing
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("shape", [(64, 96), (100, 36), (257, 130), (8, 512), (896, 128), (1, 1)])
def test_products_are_bitwise_those_of_stock_linears(shape, bias):
    linear = make_linear(*shape, bias=bias)
    fast = PackedLinear(linear)
    assert (fast.in_features, fast.out_features) == shape
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64):
        x = torch.randn((rows, shape[0]), generator=generator).bfloat16()
        for given in (x, x[None], x[:, None]):
            assert torch.equal(fast(given), linear(given)), rows


@needs_packing
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_no_rows_give_no_rows(bias):
    fast = PackedLinear(make_linear(64, 96, bias=bias))
    for shape in ((0, 64), (1, 0, 64), (0, 3, 64)):
        out = fast(torch.empty(shape, dtype=torch.bfloat16))
        assert out.shape == (*shape[:-1], 96) and out.dtype == torch.bfloat16


@needs_packing
def test_input_that_is_not_contiguous_gives_the_same():
    linear = make_linear(64, 96, bias=True)
    fast = PackedLinear(linear)
    x = torch.randn((64, 20), generator=torch.Generator().manual_seed(2)).bfloat16().T
    assert torch.equal(fast(x), linear(x))
    assert torch.equal(fast(x[::3]), linear(x[::3]))


@needs_packing
def test_every_weight_is_freed_as_soon_as_it_is_packed(monkeypatch):
    module = make_module("qwen2", dtype=torch.bfloat16)
    names = linears(module)
    weights = [storage_of(module.get_submodule(name)) for name in names]
    alive = []
    original = PackedLinear.__init__

    def watched(self: PackedLinear, linear: nn.Linear) -> None:
        original(self, linear)
        alive.append(sum(weight() is not None for weight in weights))

    monkeypatch.setattr(PackedLinear, "__init__", watched)
    assert prepack_linears(module) == len(names) == 2 * 7 + 1
    # While the k-th is packed its own weight still lives, and so may the one before it.
    assert all(count <= len(names) - k + 1 for k, count in enumerate(alive)), alive
    assert [weight() for weight in weights] == [None] * len(names)
    assert linears(module) == [] and packed(module) == names


@needs_packing
def test_a_weight_that_the_embedding_shares_stays_there():
    module = make_module("qwen2", dtype=torch.bfloat16, tie_word_embeddings=True)
    embedding = module.model.embed_tokens.weight
    assert module.lm_head.weight is embedding
    before = embedding.clone()
    prepack_linears(module)
    assert isinstance(module.lm_head, PackedLinear)
    assert torch.equal(module.model.embed_tokens.weight, before)
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(module.lm_head(x), nn.functional.linear(x, before))


def bind(dtype: torch.dtype, **options: object) -> LoadedModel:
    return bind_model(make_module("qwen2", dtype=dtype), byte_tokenizer(), **options)


def test_only_bfloat16_is_packed():
    assert not can_prepack(torch.float32) and not can_prepack(torch.float16)
    for dtype in (torch.float32, torch.float16):
        model = bind(dtype)
        assert not model.prepacked and packed(model.model) == []
    model = bind(torch.bfloat16)
    assert model.prepacked == can_prepack(torch.bfloat16) == (linears(model.model) == [])


def test_packing_can_be_switched_off():
    model = bind(torch.bfloat16, prepack=False)
    assert not model.prepacked and packed(model.model) == []


@needs_packing
@pytest.mark.parametrize("spec", [greedy(60), sampled(60, key=7)], ids=["greedy", "sampled"])
def test_an_engine_decodes_the_same_tokens_either_way(spec):
    prompts = make_prompts((1, 5, 17, 50))
    answers = []
    for prepack in (True, False):
        engine = Engine(bind(torch.bfloat16, prepack=prepack), small_config())
        answers.append(generate(engine, prompts, spec))
    assert answers[0] == answers[1]
