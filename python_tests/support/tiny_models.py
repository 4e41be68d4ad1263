"""Random models of a few thousand parameters, and a byte-level tokenizer, for tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvcore.models import LoadedModel, bind_model
from kvcore.models.token_head import TokenHeadModel

VOCAB = 512
EOS = 257
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),  # not hidden_size / heads
    "llama": (LlamaConfig, LlamaForCausalLM, {"head_dim": 16}),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0..255 are bytes; then specials and merged pieces around "\\n\\n", as real BPEs have
    them.
    """
    letters = pre_tokenizers.ByteLevel.alphabet()
    byte_of = {c: b for b, c in enumerate(_byte_chars())}
    vocab = {c: byte_of[c] for c in letters}
    newline = _byte_chars()[10]
    merges = [(newline, newline), (".", newline + newline), (")", newline + newline)]
    pieces = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<extra_0>"]
    base = 256 + len(pieces)
    for offset, (left, right) in enumerate(merges):
        vocab[left + right] = base + offset
    for offset, piece in enumerate(pieces):
        vocab[piece] = 256 + offset
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(p, special=True) for p in pieces])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_chars() -> list[str]:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    chars, extra = [], 0
    for b in range(256):
        if b in printable:
            chars.append(chr(b))
        else:
            chars.append(chr(256 + extra))
            extra += 1
    return chars


def make_module(
    architecture: str = "qwen2",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **sizes: object,
) -> torch.nn.Module:
    """A transformers causal LM with random weights, not bound to kvcore."""
    config_class, model_class, own = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **own, **sizes}))
    return model.to(dtype).eval()


def make_model(
    architecture: str = "qwen2",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    **sizes: object,
) -> LoadedModel:
    """The same, bound to kvcore. With the tokenizer only its 263 ids are sampled."""
    module = make_module(architecture, seed=seed, dtype=dtype, **sizes)
    return bind_model(module, byte_tokenizer() if tokenizer else None, name=f"tiny-{architecture}")


def make_prm(*, seed: int = 0) -> LoadedModel:
    """A Qwen2 trunk with a random token head."""
    torch.manual_seed(seed)
    trunk = Qwen2Model(Qwen2Config(**SIZES)).eval()
    model = TokenHeadModel(trunk, SIZES["hidden_size"], 2)
    return bind_model(model, byte_tokenizer(), name="tiny-prm", has_head=True)


def save_model(folder: Path, architecture: str = "qwen2", **options: object) -> Path:
    """Write a checkpoint directory as a user would have it."""
    make_module(architecture, **options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_prm(folder: Path, *, seed: int = 0) -> Path:
    """Write a process-reward-model checkpoint directory (Qwen2ForProcessRewardModel)."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    config = Qwen2Config(**SIZES)
    model = TokenHeadModel(Qwen2Model(config), SIZES["hidden_size"], 2)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["architectures"] = ["Qwen2ForProcessRewardModel"]
    settings["dtype"] = "float32"
    path.write_text(json.dumps(settings))
    byte_tokenizer().save_pretrained(folder)
    return folder
