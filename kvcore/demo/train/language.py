"""Trains the two language models, base and helper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvcore.demo.train.curriculum import IGNORED, Stage, draw_batch
from kvcore.demo.train.grow import grow_trunk
from kvcore.demo.vocabulary import EOS, PAD, make_tokenizer, pieces, token_id
from kvcore.train.loop import Report, Schedule, train

_CONTEXT = 1024
_ROWS = 96  # of the embedding: the vocabulary, filled up


@dataclass(frozen=True)
class Recipe:
    """One language model: its shape, what it is trained on, and for how long.

    Attributes:
        start: name of the recipe whose model it grows out of; None starts from random weights.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    stages: tuple[Stage, ...]
    learning_rate: float
    seed: int = 0
    start: str | None = None

    @property
    def schedule(self) -> Schedule:
        return Schedule(sum(stage.steps for stage in self.stages), self.learning_rate)


def make_config(recipe: Recipe) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=_ROWS,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=_CONTEXT,
        initializer_range=recipe.hidden**-0.5,  # 0.02 is for wide models: look-ups come 4x later
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=token_id(EOS),
        pad_token_id=token_id(PAD),
    )


def make_model(recipe: Recipe, out: Path) -> Qwen2ForCausalLM:
    """The model that training begins with, a function of the recipe (and of ``out/<start>``)."""
    assert len(pieces()) <= _ROWS
    torch.manual_seed(recipe.seed)
    model = Qwen2ForCausalLM(make_config(recipe))
    if recipe.start is not None:
        small = Qwen2ForCausalLM.from_pretrained(out / recipe.start, dtype=torch.float32)
        model.model = grow_trunk(small.model, model.config)
        model.tie_weights()
    return model


def train_language_model(recipe: Recipe, out: Path, report: Report) -> None:
    """Trains one model and writes it to ``out/<name>`` in bf16; resumes a killed training."""
    model = make_model(recipe, out)

    def loss(step: int) -> torch.Tensor:
        ids, labels = draw_batch(recipe.stages, recipe.seed, step)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )

    state = out / "state" / f"{recipe.name}.safetensors"
    train(
        model,
        loss,
        recipe.schedule,
        state=state,
        recipe=repr(recipe),
        report=report,
        argument="out",
    )
    model.bfloat16().save_pretrained(out / recipe.name)
    make_tokenizer().save_pretrained(out / recipe.name)
