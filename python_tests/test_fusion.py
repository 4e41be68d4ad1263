"""Fused attentions and MLPs compute what the stock modules do; what is not known is left alone."""

from __future__ import annotations

import itertools
import threading
import weakref

import pytest
import torch
from support.engine_tools import generate, greedy, make_prompts, run, sampled, small_config
from support.tiny_models import ARCHITECTURES, SIZES, byte_tokenizer, make_module
from torch import nn
from transformers import Qwen2Config, Qwen2Model

from kvcore.engine import Engine, FeedOutput
from kvcore.models import LoadedModel, bind_model
from kvcore.models import fusion as fusion_module
from kvcore.models.fusion import FusedAttention, FusedMLP
from kvcore.models.prepack import PackedLinear
from kvcore.models.token_head import TokenHeadModel

FUSED = {"attention": 2, "mlp": 2}
each_architecture = pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))


@pytest.fixture(autouse=True)
def pack_small(monkeypatch):
    """The models of these tests are tiny."""
    monkeypatch.setattr("kvcore.models.prepack.MIN_FLOAT32_WEIGHTS", 1)


def bind(module: nn.Module, **options: object) -> LoadedModel:
    return bind_model(module, byte_tokenizer(), **options)


def answers(model: LoadedModel) -> list:
    engine = Engine(model, small_config())
    prompts = make_prompts((1, 5, 34))
    return [generate(engine, prompts, spec) for spec in (greedy(16), sampled(16, key=7))]


def kinds(model: LoadedModel) -> dict[str, int]:
    modules = list(model.model.modules())
    found = {
        "attention": sum(isinstance(m, FusedAttention) for m in modules),
        "mlp": sum(isinstance(m, FusedMLP) for m in modules),
    }
    return {kind: count for kind, count in found.items() if count}


@each_architecture
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"hidden_size": 60, "head_dim": 8, "num_attention_heads": 5, "num_key_value_heads": 1}
        | {"intermediate_size": 50},  # no width is a multiple of a panel
    ],
    ids=["gqa", "mqa", "mha-tied", "odd"],
)
def test_tokens_are_those_of_the_stock_model(architecture, sizes):
    fused, stock = (
        bind(make_module(architecture, **sizes), prepack=prepack) for prepack in (True, False)
    )
    assert dict(fused.fused) == kinds(fused) == FUSED
    assert answers(fused) == answers(stock)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_biases_everywhere_are_taken_along(architecture):
    options = {"attention_bias": True} | ({"mlp_bias": True} if architecture == "llama" else {})
    modules = [make_module(architecture, **options) for _ in range(2)]
    for module in modules:
        generator = torch.Generator().manual_seed(5)
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(generator=generator)
    fused, stock = bind(modules[0]), bind(modules[1], prepack=False)
    assert dict(fused.fused) == FUSED
    assert answers(fused) == answers(stock)


@pytest.mark.parametrize("exact", [True, False], ids=["bf16-weights", "f32-weights"])
def test_weights_are_kept_in_bf16_only_where_that_is_exact(exact):
    modules = [make_module("qwen2") for _ in range(2)]
    if exact:
        for module in modules:
            for parameter in module.parameters():
                parameter.data = parameter.data.bfloat16().float()
    fused, stock = bind(modules[0]), bind(modules[1], prepack=False)
    stored = {m._packed.dtype for m in fused.model.modules() if isinstance(m, PackedLinear)}
    assert stored == {torch.bfloat16 if exact else torch.float32}
    assert answers(fused) == answers(stock)


def test_one_weight_that_bf16_cannot_hold_decides():
    linear = nn.Linear(64, 5000, bias=False)
    linear.weight.data = linear.weight.data.bfloat16().float()
    assert PackedLinear(linear)._packed.dtype == torch.bfloat16
    linear.weight.data[-1, -1] = 1.0 + 2.0**-12
    packed = PackedLinear(linear)
    assert packed._packed.dtype == torch.float32
    x = torch.zeros(1, 64)
    x[0, -1] = 1.0
    assert packed(x)[0, -1] == 1.0 + 2.0**-12


def test_a_row_has_the_same_bits_in_every_batch():
    packed = PackedLinear(nn.Linear(300, 70), nn.Linear(300, 20))
    x = torch.randn((40, 300), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = packed(x)
        for rows in (1, 2, 7, 13):
            assert torch.equal(packed(x[:rows]), whole[:rows])
            assert torch.equal(packed(x[None, -rows:])[0], whole[-rows:])


def test_parts_are_those_of_each_linear():
    linears = [
        nn.Linear(24, width, bias=bias) for width, bias in ((5, True), (16, False), (33, True))
    ]
    x = torch.randn((2, 3, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for part, linear in zip(PackedLinear(*linears).split(x), linears, strict=True):
            torch.testing.assert_close(part, linear(x))


@pytest.mark.parametrize("options", [{"prepack": False}, {"fuse": False}], ids=str)
def test_fusion_can_be_switched_off(options):
    model = bind(make_module("qwen2"), **options)
    assert dict(model.fused) == kinds(model) == {}
    assert model.prepacked == options.get("prepack", True)


def test_a_process_reward_model_is_fused():
    def make() -> nn.Module:
        torch.manual_seed(0)
        return TokenHeadModel(Qwen2Model(Qwen2Config(**SIZES)).eval(), SIZES["hidden_size"], 2)

    values = []
    for prepack in (True, False):
        model = bind(make(), prepack=prepack, has_head=True)
        assert dict(model.fused) == (FUSED if prepack else {})
        engine = Engine(model, small_config())
        engine.extend(engine.add(list(range(20))), list(range(50)), FeedOutput.HEAD)
        (event,) = [event for event in run(engine) if event.values is not None]
        values.append(event.values)
    torch.testing.assert_close(values[0], values[1])


class _Adapter(nn.Linear):
    """As LoRA wraps a layer: a linear with something added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1.0


def _adapt(module: nn.Module, name: str) -> None:
    parent, _, leaf = name.rpartition(".")
    linear = module.get_submodule(name)
    adapter = _Adapter(linear.in_features, linear.out_features, bias=linear.bias is not None)
    adapter.load_state_dict(linear.state_dict())
    setattr(module.get_submodule(parent), leaf, adapter)


def _hook(module: nn.Module, name: str) -> None:
    module.get_submodule(name).register_forward_hook(lambda m, a, out: out * 1.5)


def _own_forward(module: nn.Module, name: str) -> None:
    target = module.get_submodule(name)
    stock = target.forward
    target.forward = lambda *args, **kwargs: stock(*args, **kwargs) * 0.5


def _other_class(module: nn.Module, name: str) -> None:
    target = module.get_submodule(name)
    target.__class__ = type("OtherMLP", (type(target),), {})


def _other_activation(module: nn.Module, name: str) -> None:
    module.get_submodule(name).act_fn = nn.GELU()


@pytest.mark.parametrize(
    ("change", "name", "kind"),
    [
        (_adapt, "model.layers.1.self_attn.k_proj", "attention"),
        (_adapt, "model.layers.1.mlp.up_proj", "mlp"),
        (_hook, "model.layers.1.self_attn.v_proj", "attention"),
        (_hook, "model.layers.1.mlp", "mlp"),
        (_own_forward, "model.layers.1.mlp", "mlp"),
        (_own_forward, "model.layers.1.mlp.gate_proj", "mlp"),
        (_other_class, "model.layers.1.mlp", "mlp"),
        (_other_activation, "model.layers.1.mlp", "mlp"),
    ],
)
def test_what_is_not_known_is_left_alone_and_computes_the_same(change, name, kind):
    modules = [make_module("qwen2") for _ in range(2)]
    for module in modules:
        change(module, name)
    fused, stock = bind(modules[0]), bind(modules[1], prepack=False)
    assert dict(fused.fused) == kinds(fused) == {**FUSED, kind: 1}
    assert answers(fused) == answers(stock)


def test_a_class_that_computes_something_else_is_not_replaced(monkeypatch):
    from transformers.models.qwen2 import modeling_qwen2

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 1.01)

    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", forward)
    model = bind(make_module("qwen2"))
    assert dict(model.fused) == {"attention": 2}


def test_weights_of_other_types_are_not_joined():
    module = make_module("qwen2")
    module.model.layers[0].self_attn.k_proj.to(torch.float64)
    assert fusion_module._kind(module.model.layers[0].self_attn) is None


def test_weights_are_freed_one_layer_at_a_time(monkeypatch):
    module = make_module("qwen3", num_hidden_layers=4)
    parts = ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    weights = {
        f"model.layers.{i}.{part}": weakref.ref(
            module.get_submodule(f"model.layers.{i}.{part}").weight.untyped_storage()
        )
        for i in range(4)
        for part in parts
    }
    alive = []
    original = PackedLinear.__init__

    def watched(self, *linears, **options):
        original(self, *linears, **options)
        alive.append(sum(weight() is not None for weight in weights.values()))

    monkeypatch.setattr(PackedLinear, "__init__", watched)
    bind(module)
    assert alive[-1] == 0 and [w() for w in weights.values()] == [None] * len(weights)
    # Two trials compare and free nothing; then a layer's attention and MLP free two each.
    assert len(set(alive)) >= 2 * 4, alive
    assert all(a >= b for a, b in itertools.pairwise(alive)), alive


def test_engines_that_take_turns_on_one_model_do_not_disturb_each_other():
    model = bind(make_module("qwen3"))
    prompts = make_prompts((3, 20))
    alone = [generate(Engine(model, small_config()), [p], greedy(30))[0] for p in prompts]
    engines = [Engine(model, small_config()) for _ in prompts]
    for engine, prompt in zip(engines, prompts, strict=True):
        engine.add(prompt, greedy(30))
    done: list[list[int]] = [[], []]
    while any(e.has_work for e in engines):
        for tokens, engine in zip(done, engines, strict=True):
            events = engine.step() if engine.has_work else []
            tokens += [e.token for e in events if e.token is not None]
    assert done == alone


def test_threads_on_one_model_do_not_disturb_each_other():
    model = bind(make_module("qwen2"))
    x = torch.randn((1, 9, 64), generator=torch.Generator().manual_seed(3))
    mlp = model.model.model.layers[0].mlp
    with torch.inference_mode():
        inputs = [x * scale for scale in (1.0, -2.0, 3.0)]
        expected = [mlp(x) for x in inputs]
    wrong = []

    def work(i: int) -> None:
        with torch.inference_mode():
            wrong.extend(i for _ in range(200) if not torch.equal(mlp(inputs[i]), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_exception_between_products_leaves_nothing_behind(monkeypatch):
    model = bind(make_module("qwen2"))
    engine = Engine(model, small_config())
    prompts = make_prompts((4, 30))
    expected = generate(engine, prompts, greedy(20))
    rotate, calls = fusion_module._rotate, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("in the second layer")
        return rotate(*args)

    monkeypatch.setattr(fusion_module, "_rotate", failing)
    seq = engine.add(prompts[1], greedy(20))
    with pytest.raises(RuntimeError, match="second layer"):
        engine.step()
    engine.release(seq)
    assert generate(engine, prompts, greedy(20)) == expected
