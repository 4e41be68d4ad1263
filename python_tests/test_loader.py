"""What a checkpoint directory says is what runs; what would decode wrongly is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_tools import generate, greedy, hf_greedy, make_prompts, run, small_config
from support.tiny_models import ARCHITECTURES, EOS, SIZES, make_module, save_model, save_prm
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Model

from kvcore.engine import Engine, FeedOutput
from kvcore.models import LoadedModel, UnsupportedModel, load_model, load_prm


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def prm_folder(tmp_path: Path) -> Path:
    return save_prm(tmp_path / "prm")


def change_json(path: Path, **changes: object) -> None:
    """Sets keys; None deletes."""
    settings = json.loads(path.read_text())
    settings.update(changes)
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def continuation(model: LoadedModel, prompt: list[int]) -> list[int]:
    [tokens] = generate(Engine(model, small_config()), [prompt], greedy(20))
    return tokens


def plain_continuation(module: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The same from transformers, which does not know that rows above the tokenizer are padding."""
    module.generation_config.suppress_tokens = list(range(263, SIZES["vocab_size"]))
    return hf_greedy(module, prompt, 20)


# ---- what is loaded


def test_a_saved_model_decodes_like_transformers(saved):
    module = AutoModelForCausalLM.from_pretrained(saved)
    model = load_model(saved)
    assert model.name == saved.name and not model.has_head and not model.prepacked
    [prompt] = make_prompts([23])
    assert continuation(model, prompt) == plain_continuation(module, prompt)


def test_shape_vocabulary_and_context_come_from_the_directory(saved):
    model = load_model(saved)
    head_dim = {"qwen2": 16, "qwen3": 24, "llama": 16}[saved.name]
    shape = model.shape
    assert (shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim) == (2, 4, 2, head_dim)
    assert shape.dtype == torch.float32
    assert model.kv_bytes_per_token == 2 * 2 * 2 * head_dim * 4
    assert model.vocab == len(model.tokenizer) == len(model.token_bytes) == 263
    assert model.config.vocab_size == 512 and model.context_len == 4096
    assert model.eos_ids == {EOS}


def test_eos_ids_are_those_of_all_three_files(folder):
    change_json(folder / "generation_config.json", eos_token_id=[256, 258])
    change_json(folder / "config.json", eos_token_id=259)
    assert load_model(folder).eos_ids == {256, 258, 259, EOS}
    (folder / "generation_config.json").unlink()
    change_json(folder / "config.json", eos_token_id=None)
    assert load_model(folder).eos_ids == {EOS}


def test_a_tokenizer_larger_than_the_output_matrix_bounds_nothing_beyond_it(folder):
    change_json(folder / "config.json", vocab_size=260)
    weights = folder / "model.safetensors"

    def cut(state: dict[str, torch.Tensor]) -> None:
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            state[name] = state[name][:260].clone()

    change_weights(weights, cut)
    model = load_model(folder)
    assert model.vocab == len(model.token_bytes) == 260


def test_a_tokenizer_is_what_its_file_says_and_not_what_the_model_type_usually_has(folder):
    # transformers builds byte-level BPE around any vocabulary of a Qwen2 checkpoint.
    words = Tokenizer(WordLevel({"<unk>": 0, "three": 1, "blind": 2, "mice": 3}, "<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    tokenizer = load_model(folder).tokenizer
    assert tokenizer("three blind mice").input_ids == [1, 2, 3]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype_is_the_checkpoints_unless_asked(name, tmp_path):
    dtype = getattr(torch, name)
    path = save_model(tmp_path / "m", dtype=dtype)
    assert load_model(path).shape.dtype == dtype
    for asked in ("float32", torch.bfloat16):
        wanted = torch.float32 if asked == "float32" else asked
        model = load_model(path, dtype=asked, prepack=False)
        assert {p.dtype for p in model.model.parameters()} == {wanted} == {model.shape.dtype}


def test_checkpoints_of_transformers_4_are_read(folder):
    config = folder / "config.json"
    want = continuation(load_model(folder), [1, 2, 3])
    change_json(
        config,
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling=None,
        layer_types=None,
        dtype=None,
        torch_dtype="float32",
        transformers_version="4.40.0",
    )
    assert "rope_parameters" not in json.loads(config.read_text())
    assert continuation(load_model(folder), [1, 2, 3]) == want


def test_sharded_and_tied_checkpoints_are_read(tmp_path):
    for tie in (False, True):
        one = save_model(tmp_path / f"one{tie}", tie_word_embeddings=tie)
        many = tmp_path / f"many{tie}"
        shutil.copytree(one, many)
        (many / "model.safetensors").unlink()
        make_module(tie_word_embeddings=tie).save_pretrained(many, max_shard_size="60KB")
        assert len(list(many.glob("model-*.safetensors"))) > 2
        assert continuation(load_model(one), [5, 6]) == continuation(load_model(many), [5, 6])


def test_static_rope_scalings_are_served(tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    path = save_model(tmp_path / "m", rope_parameters=rope)
    module = AutoModelForCausalLM.from_pretrained(path)
    [prompt] = make_prompts([40])
    assert continuation(load_model(path), prompt) == plain_continuation(module, prompt)


# ---- what is refused because it would decode wrongly

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
FP8_CACHE = {
    "quant_method": "compressed-tensors",
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
}
REFUSED = {
    "sliding window": ({"use_sliding_window": True, "max_window_layers": 0}, "sliding"),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    "linear layers": ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "alibi": ({"alibi": True}, "ALiBi"),
    "alibi by name": ({"position_embedding_type": "alibi"}, "ALiBi"),
    "sinks": ({"attention_sinks": True}, "attention sinks"),
    "shared kv": ({"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
    "fp8 kv": ({"quantization_config": FP8_CACHE}, "KV cache"),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    "dynamic rope": ({"rope_parameters": DYNAMIC}, "'dynamic'"),
    "long rope": ({"rope_parameters": LONG}, "'longrope'"),
    "unknown type": ({"model_type": "frobnicate"}, "frobnicate"),
    "other type": ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "gpt2"),
    "head_dim": ({"head_dim": 12}, "head_dim 12"),
    "implied head_dim": ({"num_attention_heads": 16, "num_key_value_heads": 16}, "head_dim 4"),
    "huge head_dim": ({"head_dim": 264}, "head_dim 264"),
}


@pytest.mark.parametrize("load", [load_model, load_prm])
@pytest.mark.parametrize("case", REFUSED)
def test_models_that_would_decode_wrongly_are_refused_by_name(case, load, tmp_path):
    changes, name = REFUSED[case]
    path = save_model(tmp_path / "m") if load is load_model else save_prm(tmp_path / "m")
    change_json(path / "config.json", **changes)
    with pytest.raises(UnsupportedModel, match=name) as error:
        load(path, argument="helper")
    assert str(error.value).startswith("helper: ") and str(path) in str(error.value)


def test_sliding_window_that_is_switched_off_is_served(folder):
    change_json(folder / "config.json", use_sliding_window=False, sliding_window=128)
    assert load_model(folder).context_len == 4096


# ---- what is refused because it is damaged or not there


def missing_weight(folder: Path) -> None:
    change_weights(
        folder / "model.safetensors", lambda s: s.pop("model.layers.1.mlp.up_proj.weight")
    )


def wrong_shape(folder: Path) -> None:
    def cut(state: dict[str, torch.Tensor]) -> None:
        state["model.norm.weight"] = torch.ones(32)

    change_weights(folder / "model.safetensors", cut)


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def bad_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


DAMAGES = {
    "no folder": (no_folder, "no such"),
    "no config": (no_config, r"config\.json"),
    "config cut": (bad_config, "config"),
    "no tokenizer": (no_tokenizer, "no tokenizer"),
    "tokenizer cut": (bad_tokenizer, "tokenizer"),
    "no weights": (no_weights, "weights"),
    "weights cut": (truncated, "weights"),
    "weight missing": (missing_weight, "up_proj"),
    "wrong shape": (wrong_shape, "norm"),
}


@pytest.mark.parametrize("load", [load_model, load_prm])
@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_directories_are_refused_and_named(case, load, tmp_path):
    damage, message = DAMAGES[case]
    path = save_model(tmp_path / "m") if load is load_model else save_prm(tmp_path / "m")
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        load(path, argument="helper")
    assert str(error.value).startswith("helper: ") and str(path) in str(error.value)


def test_a_file_in_place_of_a_directory_is_refused(folder):
    with pytest.raises(ValueError, match=r"^base: expected a model directory"):
        load_model(folder / "config.json")
    with pytest.raises(ValueError, match=r"^base: expected a model directory"):
        load_model("some-org/some-model")  # nothing is fetched from anywhere


def test_unknown_dtype_and_device_are_refused(folder):
    with pytest.raises(ValueError, match=r"^dtype: expected one of .*bfloat16.*, got 'int8'"):
        load_model(folder, dtype="int8")
    with pytest.raises(ValueError, match=r"^dtype: .*float64"):
        load_model(folder, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^device: expected 'cpu' .*, got 'cuda'"):
        load_model(folder, device="cuda")


# ---- process reward models


def head_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Of every token, from a plain transformers trunk and the head's formula."""
    state = load_file(folder / "model.safetensors")
    trunk = Qwen2Model.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        hidden = trunk(torch.tensor([tokens])).last_hidden_state[0]
        inner = torch.relu(hidden @ state["score.0.weight"].T + state["score.0.bias"])
        return inner @ state["score.2.weight"].T + state["score.2.bias"]


def test_a_prm_equals_a_plain_trunk_and_its_head(prm_folder):
    model = load_prm(prm_folder)
    assert model.has_head and model.vocab == 263
    [tokens] = make_prompts([60], seed=4)
    expected = head_logits(prm_folder, tokens)
    engine = Engine(model, small_config())
    root = engine.add(tokens[:11])
    for begin, end in ((11, 12), (12, 40), (40, 60)):
        engine.extend(root, tokens[begin:end], FeedOutput.HEAD)
        [values] = [e.values for e in run(engine) if e.values is not None]
        torch.testing.assert_close(values, expected[end - 1], atol=1e-5, rtol=1e-5)


def test_a_sharded_prm_with_a_stored_output_matrix_is_the_same(prm_folder):
    before = head_logits(prm_folder, [1, 2, 3])
    path = prm_folder / "model.safetensors"
    state = load_file(path)
    state["lm_head.weight"] = torch.zeros(4, 4)  # stored by some exports, used by nobody
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, mine in shards.items():
        save_file({n: state[n] for n in mine}, prm_folder / shard, metadata={"format": "pt"})
    index = {"weight_map": {n: shard for shard, mine in shards.items() for n in mine}}
    (prm_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    path.unlink()
    engine = Engine(load_prm(prm_folder), small_config())
    root = engine.add([1, 2])
    engine.extend(root, [3], FeedOutput.HEAD)
    [values] = [e.values for e in run(engine) if e.values is not None]
    torch.testing.assert_close(values, before[-1], atol=1e-5, rtol=1e-5)


def test_only_prm_checkpoints_load_as_prm(folder, prm_folder):
    with pytest.raises(UnsupportedModel, match=r"Qwen2ForProcessRewardModel.*Qwen2ForCausalLM"):
        load_prm(folder)
    change_json(prm_folder / "config.json", architectures=["Qwen2ForRewardModel"])
    with pytest.raises(UnsupportedModel, match="Qwen2ForRewardModel"):
        load_prm(prm_folder)


def test_prm_weights_that_are_left_over_or_missing_are_refused(prm_folder):
    path = prm_folder / "model.safetensors"

    def rename(state: dict[str, torch.Tensor]) -> None:
        state["v_head.weight"] = state.pop("score.2.weight")

    change_weights(path, rename)
    with pytest.raises(UnsupportedModel, match=r"missing .*score\.2\.weight.*unexpected .*v_head"):
        load_prm(prm_folder)


def test_a_prm_neither_generates_nor_is_scored_by_likelihood(prm_folder):
    engine = Engine(load_prm(prm_folder), small_config())
    with pytest.raises(ValueError, match=r"^generate: .*does not generate"):
        engine.add([1, 2, 3], greedy(4))
    root = engine.add([1, 2, 3])
    run(engine)
    with pytest.raises(ValueError, match=r"^output"):
        engine.extend(root, [4], FeedOutput.LOGPROBS)
