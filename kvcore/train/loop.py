"""The training loop: AdamW over a loss that is a function of the step, resumed exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kvcore.train.checkpoint import load_state, save_state, trained

WARM_UP = 200  # steps
_FLOOR = 0.05  # of the peak learning rate, at the end
SAVE_SECONDS = 60.0

Report = Callable[[int, int, float], None]  # steps done, steps in all, recent mean loss


@dataclass(frozen=True)
class Schedule:
    """AdamW with linear warm-up and a cosine.

    Attributes:
        steps: optimizer steps.
        learning_rate: at its peak.
    """

    steps: int
    learning_rate: float

    def rate(self, step: int) -> float:
        """Learning rate of step ``step``, counted from 0."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        warm = min(1.0, (step + 1) / WARM_UP)
        return self.learning_rate * warm * (_FLOOR + (1 - _FLOOR) * cosine)


def train(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    schedule: Schedule,
    *,
    state: Path,
    recipe: str,
    report: Report,
    argument: str = "state",
) -> None:
    """Trains ``model``, going on where ``state`` ends.

    Args:
        loss: of step i, a function of i and the weights alone: a resumed training then equals one
            that was never stopped.
        state: file of the training's state, written every minute and at the end.
        recipe: names the settings; a state of others is refused.
        report: called after every step.
        argument: name of ``state`` in error messages.
    Raises:
        ValueError: ``state`` is damaged or of another recipe.
    """
    parameters = [p for _, p in trained(model)]
    decayed = [p for p in parameters if p.dim() > 1]
    plain = [p for p in parameters if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    done = load_state(state, model, optimizer, recipe, argument=argument)
    model.train()
    mean, saved = math.nan, time.monotonic()
    for step in range(done, schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        number = value.item()
        mean = number if math.isnan(mean) else 0.98 * mean + 0.02 * number
        last = step + 1 == schedule.steps
        if last or time.monotonic() - saved > SAVE_SECONDS:
            save_state(state, model, optimizer, step + 1, recipe)
            saved = time.monotonic()
        report(step + 1, schedule.steps, mean)
    model.eval()
