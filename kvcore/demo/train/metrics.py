"""How good the trained models are, on the calibration set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from kvcore.demo.task import Problem, problems
from kvcore.demo.train.labels import Labelled
from kvcore.demo.vocabulary import EOS, encode, token_id

_KINDS = ("look-up", "sum", "product", "answer")


def kind_of(step: str) -> str:
    """What a right step does."""
    if " answer " in step:
        return "answer"
    if " = " not in step:
        return "look-up"
    return "product" if " * " in step else "sum"


def calibration_problems(count: int) -> list[Problem]:
    return list(islice(problems("calibration", 0), count))


@torch.no_grad()
def step_accuracy(model: Qwen2ForCausalLM, chosen: Sequence[Problem]) -> dict[str, float]:
    """Share of steps whose every token is the most likely one, after right steps; by kind.

    "solution" is the share of problems with all steps right.
    """
    right: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for problem in chosen:
        prompt = encode(problem.prompt)
        steps = [encode(step) for step in problem.steps]
        steps[-1].append(token_id(EOS))
        ids = torch.tensor([*prompt, *chain.from_iterable(steps)])
        guesses = model(input_ids=ids[None], use_cache=False).logits[0].argmax(-1)
        good = (guesses[:-1] == ids[1:])[len(prompt) - 1 :]
        all_right, start = True, 0
        for step, step_ids in zip(problem.steps, steps, strict=True):
            is_right = bool(good[start : start + len(step_ids)].all())
            start += len(step_ids)
            kind = kind_of(step)
            seen[kind] += 1
            right[kind] += is_right
            all_right &= is_right
        seen["solution"] += 1
        right["solution"] += all_right
    return {kind: right[kind] / seen[kind] for kind in (*_KINDS, "solution") if seen[kind]}


def load_language_model(folder: Path) -> Qwen2ForCausalLM:
    """A trained model as it was written, computing in fp32."""
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def label_shares(labelled: Sequence[Labelled]) -> tuple[int, float]:
    """Steps in all, and the share of right ones."""
    marks = [mark for solution in labelled for mark in solution.right]
    return len(marks), sum(marks) / max(1, len(marks))
