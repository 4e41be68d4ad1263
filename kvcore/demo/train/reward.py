"""Trains the process reward model: the base model's trunk, three layers more, and a head.

The layers of the base model are copied and stay as they are: what they expect next is what a token
is compared with. The first new layer fetches that from the token before, the others start as the
identity. A step is judged at the separator that closes it, in the conversation in which it is later
used. To learn where a mistake is, every token of a step is labelled as well: is the step right so
far? Comparing is learned first, on computations alone; then come solutions, real ones and such with
mistakes made on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvcore.demo.task import Difficulty, parse_problem
from kvcore.demo.train.curriculum import IGNORED, Example, pad
from kvcore.demo.train.grow import grow_trunk
from kvcore.demo.train.labels import Labelled
from kvcore.demo.train.mistakes import judged_solution, judging_drill, spoiled_solution
from kvcore.demo.vocabulary import SEPARATOR, make_tokenizer, token_id
from kvcore.models.token_head import PRM_ARCHITECTURE, TokenHeadModel
from kvcore.train.loop import Report, Schedule, train

_NEW_LAYERS = 3
_HELD_OUT = 20
_SHARPNESS = 8.0  # the previous token gets over 99 % of the attention
_DRILLS = 8  # a batch
_SPOILED = 3  # solutions a batch


@torch.no_grad()
def look_back(layer: Any, rows: Tensor) -> None:
    """Makes every head of a layer fetch what the trunk expected at the previous token.

    With q = a(1, 0) and k = q turned by one position in each of the fastest RoPE planes, the logit
    of the token d back is the sum of a^2 cos((d - 1) theta), which is largest at d = 1. The values
    are the logits of the ten digits, and what tells the other tokens apart best.

    Args:
        rows: the unembedding, [vocabulary, hidden].
    """
    attention, config = layer.self_attn, layer.self_attn.config
    half = attention.head_dim // 2
    theta = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    planes = torch.arange(4)
    query, key = torch.zeros(2 * half), torch.zeros(2 * half)
    query[planes] = _SHARPNESS
    key[planes] = _SHARPNESS * theta[planes].cos()
    key[planes + half] = _SHARPNESS * theta[planes].sin()
    for projection, bias in ((attention.q_proj, query), (attention.k_proj, key)):
        projection.weight.zero_()
        projection.bias.copy_(bias.repeat(len(projection.bias) // len(bias)))
    attention.o_proj.weight.normal_(0.0, 0.5)  # as loud as what is there
    digits = rows[[token_id(digit) for digit in "0123456789"]]
    directions = torch.linalg.svd(rows - rows.mean(0), full_matrices=False).Vh
    logits = functional.normalize(digits - digits.mean(0), dim=1)
    values = torch.cat([logits, directions[: attention.head_dim - len(logits)]])
    attention.v_proj.weight.copy_(values.repeat(attention.v_proj.out_features // len(values), 1))
    attention.v_proj.bias.zero_()


def grow(base: Qwen2ForCausalLM) -> TokenHeadModel:
    """A reward model whose trunk computes what the base model's does.

    Only its new parts are to be trained.
    """
    config = Qwen2Config.from_dict(base.config.to_dict())
    config.num_hidden_layers = base.config.num_hidden_layers + _NEW_LAYERS
    config.layer_types = None
    config = Qwen2Config.from_dict(config.to_dict())
    config.architectures = [PRM_ARCHITECTURE]
    config.num_labels = 2
    trunk = grow_trunk(base.model, config)
    with torch.no_grad():
        # To the base model a step ended here as well.
        rows = trunk.embed_tokens.weight
        rows[token_id(SEPARATOR)] = rows[token_id("\n\n")]
        # A trunk's raw states have a few huge dims, which its final norm evens out.
        new: Any = trunk.layers[-_NEW_LAYERS:]
        for layer in new:
            layer.input_layernorm.load_state_dict(trunk.norm.state_dict())
            layer.post_attention_layernorm.load_state_dict(trunk.norm.state_dict())
        look_back(new[0], rows)
    for copied in (trunk.embed_tokens, *trunk.layers[:-_NEW_LAYERS]):
        copied.requires_grad_(False)
    return TokenHeadModel(trunk, config.hidden_size, 2)


@dataclass(frozen=True)
class RewardMetrics:
    """On held-out labelled steps.

    Attributes:
        steps: how many.
        accuracy: share classified as labelled, at probability 0.5.
        missed: share of the wrong steps that are accepted.
        refused: share of the right steps that are refused.
    """

    steps: int
    accuracy: float
    missed: float
    refused: float


class LabelledBatches:
    """Batches of labelled solutions: all of them once, in random order, then again."""

    def __init__(self, labelled: Sequence[Labelled], tokens: int, seed: int) -> None:
        self._rows = [judged_solution(parse_problem(x.question), x.steps) for x in labelled]
        self._tokens, self._seed = tokens, seed
        self._epoch, self._batches = -1, list[list[int]]()
        self.per_epoch = len(self._split(0))

    def _split(self, epoch: int) -> list[list[int]]:
        order = list(range(len(self._rows)))
        Random(f"{self._seed} {epoch}").shuffle(order)
        batches: list[list[int]] = [[]]
        longest = 0
        for i in order:
            longest = max(longest, len(self._rows[i].ids))
            if batches[-1] and (len(batches[-1]) + 1) * longest > self._tokens:
                batches.append([])
                longest = len(self._rows[i].ids)
            batches[-1].append(i)
        return batches

    def rows(self, step: int) -> list[Example]:
        """The solutions of step ``step``."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._split(epoch)
        return [self._rows[i] for i in self._batches[min(place, len(self._batches) - 1)]]


def train_reward_model(
    labelled: Sequence[Labelled],
    schedule: Schedule,
    out: Path,
    report: Report,
    *,
    drilled: int,
    tokens: int,
    seed: int,
) -> RewardMetrics:
    """Trains ``out/prm`` from ``out/base`` and labelled solutions; resumes a killed training.

    Every ``_HELD_OUT``-th solution is not trained on, but measured.

    Args:
        drilled: steps before the first solutions.
        tokens: of labelled solutions in a batch.
    """
    torch.manual_seed(seed)
    base = Qwen2ForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    model = grow(base)
    trained = [x for i, x in enumerate(labelled) if i % _HELD_OUT]
    batches = LabelledBatches(trained, tokens, seed)

    def judge(rows: list[Example]) -> Tensor:
        ids, labels = pad(rows)
        logits = model(input_ids=ids, use_cache=False).flatten(0, 1)
        whole = torch.where(ids == token_id(SEPARATOR), labels, IGNORED)
        losses = [
            functional.cross_entropy(logits, wanted.flatten(), ignore_index=IGNORED)
            for wanted in (labels, whole)
        ]
        return losses[0] + losses[1]

    def loss(step: int) -> Tensor:
        random = Random(f"{seed} drill {step}")
        if step < drilled:
            return judge([judging_drill(random) for _ in range(_DRILLS)])
        spoiled = [spoiled_solution(random, Difficulty()) for _ in range(_SPOILED)]
        return judge(batches.rows(step - drilled)) + judge(spoiled)

    recipe = f"prm {schedule} {drilled=} {tokens=} {seed=} solutions={len(labelled)}"
    state = out / "state" / "prm.safetensors"
    train(model, loss, schedule, state=state, recipe=recipe, report=report, argument="out")
    save_reward_model(model, out / "prm")
    return measure(model, LabelledBatches(labelled[::_HELD_OUT], tokens, seed))


def save_reward_model(model: TokenHeadModel, folder: Path) -> None:
    """Writes the model in bf16, in the form of a Qwen2.5-Math-PRM checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = model.config.to_dict()  # type: ignore[union-attr, operator]
    config.update(architectures=[PRM_ARCHITECTURE], dtype="bfloat16", num_labels=2)
    config.pop("_name_or_path", None)  # where the base model happened to lie
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    make_tokenizer().save_pretrained(folder)


@torch.no_grad()
def measure(model: TokenHeadModel, batches: LabelledBatches) -> RewardMetrics:
    """Classifies the steps of all batches once."""
    right = missed = refused = positive = negative = 0
    for step in range(batches.per_epoch):
        ids, labels = pad(batches.rows(step))
        known = (labels != IGNORED) & (ids == token_id(SEPARATOR))
        accepted = model(input_ids=ids, use_cache=False).argmax(-1)[known] == 1
        truth = labels[known] == 1
        right += int((accepted == truth).sum())
        missed += int((accepted & ~truth).sum())
        refused += int((~accepted & truth).sum())
        positive += int(truth.sum())
        negative += int((~truth).sum())
    steps = positive + negative
    return RewardMetrics(
        steps, right / max(1, steps), missed / max(1, negative), refused / max(1, positive)
    )
