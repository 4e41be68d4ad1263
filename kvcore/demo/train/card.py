"""The model card: how the embedded models were made, and how good they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from kvcore.demo.task import Difficulty
from kvcore.demo.train.labels import Labelled
from kvcore.demo.train.metrics import (
    calibration_problems,
    label_shares,
    load_language_model,
    step_accuracy,
)
from kvcore.demo.train.plan import Plan
from kvcore.demo.train.reward import RewardMetrics
from kvcore.files import write_whole
from kvcore.train.loop import WARM_UP

CARD = "README.md"
MODELS = ("base", "helper", "prm")
_PROBLEMS = 200

_TEMPLATE = """\
# The models of the demo

Three small models, trained from random weights on generated problems by

    python -m kvcore.demo.train --out DIR

They exist to show what cache eviction does to a model and how it is repaired; they can do nothing
else. `kvcore/demo/task.py` describes the task, `kvcore/demo/train/plan.py` is the recipe.

Outside kvcore load the tokenizer with `PreTrainedTokenizerFast.from_pretrained`: `AutoTokenizer`
builds byte-level BPE for every Qwen2 configuration, whatever `tokenizer.json` says.

| | base | helper | prm |
| --- | --- | --- | --- |
| class | Qwen2ForCausalLM | Qwen2ForCausalLM | Qwen2 trunk, two-label head |
| parameters | {base_size} | {helper_size} | {prm_size} |
| layers, width, query / kv heads | {base_shape} | {helper_shape} | {prm_shape} |
| width of the MLP | {base.mlp:,} | {helper.mlp} | {base.mlp:,} |
| optimizer steps | {base_steps:,} | {helper_steps:,} | {prm_steps:,} |
| peak learning rate | {base_rate:g} | {helper_rate:g} | {prm_rate:g} |
| seed | {base.seed} | {helper.seed} | {plan.seed} |

Heads have 32 dimensions. AdamW (0.9, 0.98), weight decay 0.01 on matrices, {warm} warm-up steps,
cosine. Weights are stored in bf16. Sums depend on the number of threads, so a rebuilt model is as
good but not the same bit for bit.

**Data.** Every problem belongs to one of the sets train, calibration and test by a hash of its own
text, so the sets cannot overlap. A seedling with small MLPs learns look-ups alone, in
{plan.seedling.schedule.steps:,} steps; base and helper grow out of it. They see whole problems and
the look-up steps of problems in random order, the base model computation steps alone as well.
Problems grow to {difficulty.names[0]} to {difficulty.names[1]} names and
{difficulty.operations[0]} to {difficulty.operations[1]} operations, {difficulty.products:.0%} of
them products.

**The reward model** is the base model, which stays as it is, and three layers that are trained to
compare a step with what it expected. They learn labels of {steps:,} steps in {solutions:,}
solutions of training problems, {right:.0%} of them right: base (full and evicted cache) and helper
wrote them, the task's checker labelled them. In the first {plan.drilled:,} steps of the training
they judge drilled computations, half of them with a wrong digit; later, besides, solutions of
training problems with mistakes made on purpose.

## Final metrics

Steps predicted token by token without a mistake after right steps, greedily, full cache,
{problems} calibration problems:

| | base | helper |
| --- | --- | --- |
{accuracy}

Process reward model, on {reward.steps:,} held-out labelled steps: {reward.accuracy:.1%} classified
correctly; {reward.missed:.1%} of wrong steps accepted, {reward.refused:.1%} of right ones refused.
"""


def _shape(config: PretrainedConfig) -> str:
    heads = f"{config.num_attention_heads} / {config.num_key_value_heads}"
    return f"{config.num_hidden_layers}, {config.hidden_size}, {heads}"


def write_card(plan: Plan, out: Path, labelled: Sequence[Labelled], reward: RewardMetrics) -> None:
    """Measures base and helper and writes ``out/README.md``."""
    chosen = calibration_problems(_PROBLEMS)
    models = {name: load_language_model(out / name) for name in ("base", "helper")}
    measured = {name: step_accuracy(model, chosen) for name, model in models.items()}
    kinds = measured["base"]
    steps, right = label_shares(labelled)
    text = _TEMPLATE.format(
        plan=plan,
        base=plan.base,
        helper=plan.helper,
        base_size=_millions(out / "base"),
        helper_size=_millions(out / "helper"),
        prm_size=_millions(out / "prm"),
        **{f"{name}_shape": _shape(AutoConfig.from_pretrained(out / name)) for name in MODELS},
        base_steps=plan.base.schedule.steps,
        helper_steps=plan.helper.schedule.steps,
        prm_steps=plan.reward.steps,
        base_rate=plan.base.schedule.learning_rate,
        helper_rate=plan.helper.schedule.learning_rate,
        prm_rate=plan.reward.learning_rate,
        warm=WARM_UP,
        difficulty=Difficulty(),
        steps=steps,
        solutions=len(labelled),
        right=right,
        problems=_PROBLEMS,
        accuracy="\n".join(
            f"| {kind} | {measured['base'][kind]:.1%} | {measured['helper'][kind]:.1%} |"
            for kind in kinds
        ),
        reward=reward,
    )
    write_whole(out / CARD, text)


def _millions(folder: Path) -> str:
    """Parameters of a checkpoint."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return f"{count / 1e6:.2f} M"
