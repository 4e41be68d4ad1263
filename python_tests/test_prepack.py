"""Packed linear layers compute what stock ones do, and free what they replace."""

from __future__ import annotations

import weakref

import pytest
import torch
from support.engine_tools import generate, greedy, make_prompts, sampled, small_config
from support.tiny_models import byte_tokenizer, make_module
from torch import nn

from kvcore.engine import Engine
from kvcore.models import LoadedModel, bind_model
from kvcore.models.prepack import (
    MIN_FLOAT32_WEIGHTS,
    PackedLinear,
    can_prepack,
    is_worth_packing,
    prepack_linears,
)

needs_bf16 = pytest.mark.skipif(
    not can_prepack(torch.bfloat16), reason="oneDNN computes no bf16 products here"
)
needs_f32 = pytest.mark.skipif(not can_prepack(torch.float32), reason="torch without oneDNN")
each_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="float32", marks=needs_f32),
        pytest.param(torch.bfloat16, id="bfloat16", marks=needs_bf16),
    ],
)
each_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
each_shape = pytest.mark.parametrize(
    "shape", [(64, 96), (100, 36), (257, 130), (8, 512), (896, 128), (1, 1)]
)
ROWS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64)


@pytest.fixture
def pack_small(monkeypatch):
    """The models of these tests are tiny."""
    monkeypatch.setattr("kvcore.models.prepack.MIN_FLOAT32_WEIGHTS", 1)


def make_linear(inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


def linears(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if type(child) is nn.Linear]


def packed(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if isinstance(child, PackedLinear)]


def storage_of(linear: nn.Linear) -> weakref.ref:
    """Dies with the memory of the weight, whoever else looks at it."""
    return weakref.ref(linear.weight.untyped_storage())


@needs_bf16
@each_bias
@each_shape
def test_bf16_products_are_bitwise_those_of_stock_linears(shape, bias):
    linear = make_linear(*shape, bias=bias, dtype=torch.bfloat16)
    fast = PackedLinear(linear)
    assert (fast.in_features, fast.out_features) == shape
    generator = torch.Generator().manual_seed(1)
    for rows in ROWS:
        x = torch.randn((rows, shape[0]), generator=generator).bfloat16()
        for given in (x, x[None], x[:, None]):
            assert torch.equal(fast(given), linear(given)), rows


@needs_f32
@each_bias
@each_shape
def test_float32_products_are_exact_up_to_rounding(shape, bias):
    linear = make_linear(*shape, bias=bias, dtype=torch.float32)
    fast = PackedLinear(linear)
    weight = linear.weight.double().T
    added = linear.bias.double() if bias else torch.zeros(shape[1], dtype=torch.double)
    generator = torch.Generator().manual_seed(1)
    for rows in ROWS:
        x = torch.randn((rows, shape[0]), generator=generator)
        exact = x.double() @ weight + added
        # A sum of n products in any order is off by n roundings of the sum of magnitudes at most.
        bound = (shape[0] + 1) * 2.0**-24 * (x.double().abs() @ weight.abs() + added.abs())
        for given in (x, x[None], x[:, None]):
            wrong = (fast(given).double().view_as(exact) - exact).abs() > bound
            assert not wrong.any(), rows


@each_dtype
@each_bias
def test_no_rows_give_no_rows(bias, dtype):
    fast = PackedLinear(make_linear(64, 96, bias=bias, dtype=dtype))
    for shape in ((0, 64), (1, 0, 64), (0, 3, 64)):
        out = fast(torch.empty(shape, dtype=dtype))
        assert out.shape == (*shape[:-1], 96) and out.dtype == dtype


@each_dtype
def test_input_that_is_not_contiguous_gives_the_same(dtype):
    linear = make_linear(64, 96, bias=True, dtype=dtype)
    fast = PackedLinear(linear)
    x = torch.randn((64, 20), generator=torch.Generator().manual_seed(2)).to(dtype).T
    for given in (x, x[::3]):
        assert torch.equal(fast(given), fast(given.contiguous()))
        if dtype == torch.bfloat16:
            assert torch.equal(fast(given), linear(given))


@each_dtype
def test_every_weight_is_freed_as_soon_as_it_is_packed(dtype, monkeypatch, pack_small):
    module = make_module("qwen2", dtype=dtype)
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


@each_dtype
def test_a_weight_that_the_embedding_shares_stays_there(dtype, pack_small):
    module = make_module("qwen2", dtype=dtype, tie_word_embeddings=True)
    embedding = module.model.embed_tokens.weight
    assert module.lm_head.weight is embedding
    before = embedding.clone()
    prepack_linears(module)
    assert isinstance(module.lm_head, PackedLinear)
    assert torch.equal(module.model.embed_tokens.weight, before)
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(3)).to(dtype)
    stock = nn.functional.linear(x, before)
    if dtype == torch.bfloat16:
        assert torch.equal(module.lm_head(x), stock)
    else:
        torch.testing.assert_close(module.lm_head(x), stock)


def bind(dtype: torch.dtype, **options: object) -> LoadedModel:
    return bind_model(make_module("qwen2", dtype=dtype), byte_tokenizer(), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_model_is_packed_where_that_is_possible(dtype, pack_small):
    model = bind(dtype)
    assert model.prepacked == can_prepack(dtype) == (linears(model.model) == [])
    assert (packed(model.model) != []) == model.prepacked
    assert not can_prepack(torch.float16)


@needs_f32
def test_small_float32_weights_stay_as_they_are():
    rows = MIN_FLOAT32_WEIGHTS // 64
    assert is_worth_packing(make_linear(64, rows, bias=False, dtype=torch.float32))
    assert not is_worth_packing(make_linear(64, rows - 1, bias=False, dtype=torch.float32))
    model = bind(torch.float32)
    assert not model.prepacked and packed(model.model) == []


@each_dtype
def test_packing_can_be_switched_off(dtype, pack_small):
    model = bind(dtype, prepack=False)
    assert not model.prepacked and packed(model.model) == []


@each_dtype
@pytest.mark.parametrize("spec", [greedy(60), sampled(60, key=7)], ids=["greedy", "sampled"])
def test_an_engine_decodes_the_same_tokens_either_way(spec, dtype, pack_small):
    prompts = make_prompts((1, 5, 17, 50))
    answers = []
    for prepack in (True, False):
        engine = Engine(bind(dtype, prepack=prepack), small_config())
        answers.append(generate(engine, prompts, spec))
    assert answers[0] == answers[1]
