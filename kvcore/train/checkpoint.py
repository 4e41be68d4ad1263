"""A training's state on disk: weights, optimizer moments and the step, as safetensors.

A file appears whole or not at all, so a killed training finds its last complete state.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from kvcore.files import replacing

_MOMENTS = ("exp_avg", "exp_avg_sq")


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a training changes."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def save_state(
    path: Path, model: nn.Module, optimizer: torch.optim.AdamW, step: int, recipe: str
) -> None:
    """Writes the state after ``step`` steps. ``recipe`` names what is trained, and how."""
    tensors = {}
    for name, parameter in trained(model):
        tensors[f"model.{name}"] = parameter.detach()
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        save_file(tensors, part, metadata={"step": str(step), "recipe": recipe})


def load_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    recipe: str,
    *,
    argument: str = "state",
) -> int:
    """Restores a state into ``model`` and ``optimizer``.

    Args:
        argument: name of ``path`` in error messages.
    Returns:
        The number of steps done; 0 if there is no such file.
    Raises:
        ValueError: the file is damaged or belongs to another recipe. Nothing was changed.
    """
    if not path.exists():
        return 0
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{argument}: {str(path)!r} is damaged ({error}); remove it") from error
    if told.get("recipe") != recipe:
        raise ValueError(
            f"{argument}: {str(path)!r} belongs to a training with other settings; "
            "remove it or name another"
        )
    step = int(told["step"])
    for name, parameter in trained(model):
        with torch.no_grad():
            parameter.copy_(tensors[f"model.{name}"])
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            **{moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS},
        }
    return step
