"""Changes a checkpoint directory, as careless tools do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvcore.engine import Engine
from kvcore.models import LoadedModel
from support.engine_tools import generate, greedy, small_config

State = dict[str, torch.Tensor]


def change_json(path: Path, **changes: object) -> None:
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings.update(changes)
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def change_weights(folder: Path, change: Callable[[State], object]) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def continuation(model: LoadedModel) -> list[int]:
    [tokens] = generate(Engine(model, small_config()), [[1, 2, 3]], greedy(12))
    return tokens
