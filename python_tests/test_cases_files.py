"""Tokenizer and weight files that broke other engines, by the number of their case: P21, P24."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import State, change_json, change_weights, continuation
from support.tiny_models import save_model, save_prm
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvcore.models import UnsupportedModel, load_model, load_prm

# ---- P21: ids are those of tokenizer.json

PROBES = [
    "Hello world 12345 and 67.89, x=3",
    " leading space",
    "two  spaces   and\ttabs",
    "a\n\nb\n \n c\r\n",
    "é e\u0301 ﬁ Ⅳ 汉字 🧑‍🚀",
    "don't I'LL 'Tis",
    "<|im_end|> and <think>x</think>",
    "▁ and \u2581x",
    "",
]


def alphabet_vocab() -> dict[str, int]:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for piece in ("12", "123", "34", "Ġ1", "ll", "Ġa", "in", "ĠĠ", "ĊĊ", "Ġand", "nd"):
        vocab[piece] = len(vocab)
    return vocab


MERGES = [
    *[("1", "2"), ("12", "3"), ("3", "4"), ("Ġ", "1"), ("l", "l"), ("Ġ", "a")],
    *[("i", "n"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("n", "d"), ("Ġa", "nd")],
]


def byte_level(**options: object) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=alphabet_vocab(), merges=MERGES, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def digits_first() -> Tokenizer:
    tokenizer = byte_level()
    split = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    return tokenizer


def no_split() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def prefix_space() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def normalized() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return tokenizer


def by_threes() -> Tokenizer:
    tokenizer = byte_level(ignore_merges=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def begins_with_a_token() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_end|>"])
    end = tokenizer.token_to_id("<|im_end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", end)]
    )
    return tokenizer


def stripping_added_tokens() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", rstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("<think>", lstrip=True, special=False)])
    return tokenizer


def sentence_piece(prepend: bool) -> Tokenizer:
    letters = [chr(c) for c in range(32, 127) if chr(c) != " "]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *letters]
    pieces += ["▁a", "ll", "12"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("l", "l"), ("1", "2")]
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    parts = [normalizers.Prepend("▁")] * prepend + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(parts)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(p, special=True) for p in ("<unk>", "<s>", "</s>")])
    return tokenizer


def with_training_settings() -> Tokenizer:
    tokenizer = byte_level(dropout=0.5)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64, pad_token="!")
    return tokenizer


FILES: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "digits first": digits_first,
    "no split": no_split,
    "prefix space": prefix_space,
    "normalized": normalized,
    "by threes": by_threes,
    "begins with a token": begins_with_a_token,
    "stripping added tokens": stripping_added_tokens,
    "sentence piece": lambda: sentence_piece(False),
    "sentence piece, prepended": lambda: sentence_piece(True),
}
CLASSES = [
    *("GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "LlamaTokenizerFast"),
    *("PreTrainedTokenizerFast", "TokenizersBackend", "NoSuchTokenizer", None),
]


def save_tokenizer(folder: Path, tokenizer: Tokenizer, name: str | None) -> Path:
    for path in folder.glob("*token*"):
        path.unlink()
    for path in folder.glob("chat_template*"):
        path.unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    change_json(folder / "tokenizer_config.json", tokenizer_class=name, chat_template="{{ 1 }}")
    return folder


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("file", FILES)
def test_p21_ids_are_those_of_the_file_whatever_class_is_named(file, name, architecture, tmp_path):
    truth = FILES[file]()
    folder = save_tokenizer(save_model(tmp_path / "m", architecture), truth, name)
    tokenizer = load_model(folder).tokenizer
    for probe in PROBES:
        for special in (True, False):
            want = truth.encode(probe, add_special_tokens=special).ids
            assert tokenizer(probe, add_special_tokens=special).input_ids == want, probe
    assert tokenizer.chat_template == "{{ 1 }}"
    ids = truth.encode(PROBES[0], add_special_tokens=False).ids
    assert tokenizer.decode(ids) == truth.decode(ids)


def test_p21_what_a_file_keeps_for_training_does_not_touch_prompts(tmp_path):
    folder = save_model(tmp_path / "m")
    save_tokenizer(folder, with_training_settings(), "Qwen2Tokenizer")
    tokenizer = load_model(folder).tokenizer
    assert tokenizer("12 and 34 and 123").input_ids == byte_level().encode("12 and 34 and 123").ids


def test_p21_special_tokens_of_the_configuration_are_kept(tmp_path):
    folder = save_tokenizer(save_model(tmp_path / "m"), digits_first(), "GPT2Tokenizer")
    extra = {"content": "<|im_end|>", "special": True, "normalized": False}
    extra |= {"lstrip": False, "rstrip": False, "single_word": False}
    config = folder / "tokenizer_config.json"
    size = digits_first().get_vocab_size()
    change_json(config, added_tokens_decoder={str(size): extra}, eos_token="<|im_end|>")
    tokenizer = load_model(folder).tokenizer
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", size)
    assert tokenizer("123<|im_end|>").input_ids == [*digits_first().encode("123").ids, size]


def test_p21_without_the_file_vocabulary_and_merges_are_read(tmp_path):
    folder = save_tokenizer(save_model(tmp_path / "m"), byte_level(), "Qwen2Tokenizer")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(alphabet_vocab()))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in MERGES))
    ids = load_model(folder).tokenizer("1234").input_ids
    assert ids == [alphabet_vocab()[c] for c in "1234"]  # Qwen2 takes digits one by one


# ---- P24: tensors that nobody takes, or that are not there


def biased_llama(folder: Path) -> None:
    save_model(folder, "qwen2")
    config = json.loads((folder / "config.json").read_text())
    change_json(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    assert config["model_type"] == "qwen2"


def normed_qwen2(folder: Path) -> None:
    save_model(folder, "qwen2")

    def add(state: State) -> None:
        for layer in range(2):
            state[f"model.layers.{layer}.self_attn.q_norm.weight"] = torch.ones(16)
            state[f"model.layers.{layer}.self_attn.k_norm.weight"] = torch.ones(16)

    change_weights(folder, add)


def extra_layers(folder: Path) -> None:
    save_model(folder, "qwen2")
    change_json(folder / "config.json", num_hidden_layers=1, layer_types=["full_attention"])


def lora(folder: Path) -> None:
    save_model(folder, "qwen2")

    def add(state: State) -> None:
        state["model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.ones(4, 64)
        state["model.layers.0.self_attn.q_proj.lora_B.weight"] = torch.ones(64, 4)

    change_weights(folder, add)


def missing_biases(folder: Path) -> None:
    save_model(folder, "llama")
    change_json(folder / "config.json", model_type="qwen2", architectures=["Qwen2ForCausalLM"])


def unknown_extras(folder: Path) -> None:
    save_model(folder, "llama")
    change_weights(folder, lambda s: s.update({f"extra.{i}": torch.ones(2) for i in range(5)}))


MISFITS = {
    "biases under llama": (biased_llama, "unexpected", "model.layers.0.self_attn.k_proj.bias"),
    "norms of heads": (normed_qwen2, "unexpected", "model.layers.0.self_attn.k_norm.weight"),
    "more layers": (extra_layers, "unexpected", "model.layers.1.input_layernorm.weight"),
    "lora": (lora, "unexpected", "model.layers.0.self_attn.q_proj.lora_A.weight"),
    "no biases": (missing_biases, "missing", "model.layers.0.self_attn.k_proj.bias"),
    "anything else": (unknown_extras, "unexpected", "['extra.0', 'extra.1', 'extra.2']"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_p24_tensors_that_do_not_fit_are_refused_by_name(case, tmp_path):
    make, kind, name = MISFITS[case]
    make(tmp_path / "m")
    with pytest.raises(UnsupportedModel) as error:
        load_model(tmp_path / "m", argument="helper")
    message = str(error.value)
    assert message.startswith("helper: ") and str(tmp_path / "m") in message
    assert kind in message and name in message and message.count("',") <= 4


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_norm.weight", "lora_A", "model.layers.2.mlp.up_proj.weight"],
)
def test_p24_the_same_for_reward_models(name, tmp_path):
    folder = save_prm(tmp_path / "prm")
    change_weights(folder, lambda s: s.update({name: torch.ones(16)}))
    with pytest.raises(UnsupportedModel, match=r"^scorer: .*unexpected") as error:
        load_prm(folder)
    assert name in str(error.value)


def add_rope_buffers(state: State) -> None:
    for layer in range(2):
        state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    state["model.rotary_emb.inv_freq"] = torch.ones(8)


@pytest.mark.parametrize("tie", [False, True])
def test_p24_rope_buffers_and_a_redundant_output_matrix_load(tie, tmp_path):
    folder = save_model(tmp_path / "m", tie_word_embeddings=tie)
    want = continuation(load_model(folder))

    def add(state: State) -> None:
        add_rope_buffers(state)
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"].clone())

    change_weights(folder, add)
    assert continuation(load_model(folder)) == want


def test_p24_rope_buffers_and_an_output_matrix_load_in_reward_models(tmp_path):
    folder = save_prm(tmp_path / "prm")

    def add(state: State) -> None:
        add_rope_buffers(state)
        state["lm_head.weight"] = torch.zeros(3, 3)

    change_weights(folder, add)
    assert load_prm(folder).has_head


def test_an_output_matrix_that_a_tied_model_contradicts_is_refused(tmp_path):
    folder = save_model(tmp_path / "m", tie_word_embeddings=True)
    change_weights(
        folder, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"] * 2})
    )
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight differs .*tie_word_embeddings"):
        load_model(folder)


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    folder = save_model(tmp_path / "m")
    change_json(folder / "adapter_config.json", peft_type="LORA")
    with pytest.raises(UnsupportedModel, match=r"^base: .*adapter_config\.json"):
        load_model(folder)


@pytest.mark.parametrize("load", [load_model, load_prm])
def test_weights_stored_in_eight_bits_are_refused(load, tmp_path):
    folder = save_model(tmp_path / "m") if load is load_model else save_prm(tmp_path / "m")
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(folder, lambda s: s.update({name: s[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(UnsupportedModel, match=r"up_proj.*F8_E4M3.*quantised"):
        load(folder)


def shard(folder: Path) -> dict[str, str]:
    """Cuts the weights in two; returns the index's map."""
    path = folder / "model.safetensors"
    state = load_file(path)
    names = sorted(state)
    table = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(names)}
    for file in ("a.safetensors", "b.safetensors"):
        mine = {name: state[name] for name in names if table[name] == file}
        save_file(mine, folder / file, metadata={"format": "pt"})
    path.unlink()
    return table


def write_index(folder: Path, table: dict[str, str]) -> None:
    change_json(folder / "model.safetensors.index.json", weight_map=table, metadata={})


@pytest.mark.parametrize("load", [load_model, load_prm])
def test_an_index_that_contradicts_its_files_is_refused(load, tmp_path):
    folder = save_model(tmp_path / "m") if load is load_model else save_prm(tmp_path / "m")
    table = shard(folder)
    write_index(folder, table)
    assert load(folder)
    name, other = "model.norm.weight", {"a.safetensors": "b.safetensors"}
    write_index(folder, {**table, name: other.get(table[name], "a.safetensors")})
    with pytest.raises(ValueError, match=r"places weight 'model\.norm\.weight'"):
        load(folder)
    write_index(folder, {**table, "model.ghost.weight": "a.safetensors"})
    with pytest.raises(ValueError, match=r"model\.ghost\.weight"):
        load(folder)
    write_index(folder, {**table, name: "c.safetensors"})
    with pytest.raises(ValueError, match=r"'c\.safetensors'"):
        load(folder)
    twice = load_file(folder / table[name])
    save_file({name: twice[name]}, folder / "c.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="stored twice"):
        load(folder)
