"""What a checkpoint directory says, read before a model is made of it: settings and tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig

from kvcore.models.support import UnsupportedModel, check_settings, check_supported

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
OUTPUT_MATRIX = "lm_head.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Keys by which a file asks for another implementation of attention. They say how and not what.
_IMPLEMENTATION_KEYS = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "output_attentions",
)
_ROPE_BUFFER = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration of a directory that holds a ``config.json``; its dtype is a torch dtype.

    Which implementation of attention the file asks for is ignored: kvcore brings its own.
    A dtype that is not named, or "auto", is that of the stored weights.
    Raises:
        UnsupportedModel: the file is damaged, or the model would decode wrongly here.
    """
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:  # also what is not UTF-8
        raise UnsupportedModel(f"config.json is damaged: {error}") from error
    if not isinstance(settings, dict):
        raise UnsupportedModel("config.json: expected an object")
    for key in _IMPLEMENTATION_KEYS:
        settings.pop(key, None)
    dtype = _take_dtype(settings)
    check_settings(settings)
    try:
        model_type = settings.pop("model_type")
        config: PretrainedConfig = AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # transformers raises almost anything for a value it cannot use
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedModel(f"config.json cannot be used: {reason}") from error
    check_supported(config)
    config.dtype = dtype if dtype is not None else stored_dtype(folder)
    config.name_or_path = str(folder)
    return config


def _take_dtype(settings: dict[str, Any]) -> torch.dtype | None:
    """Removes the dtype from ``settings``; None if the file leaves it open."""
    names = [settings.pop(key, None) for key in ("dtype", "torch_dtype")]
    name = next((name for name in names if name is not None), "auto")
    if name == "auto":
        return None
    plain = name.removeprefix("torch.") if isinstance(name, str) else name
    if not isinstance(plain, str) or plain not in DTYPES:
        raise UnsupportedModel(
            f"config.json: dtype: expected one of {', '.join(DTYPES)} or auto, got {name!r}"
        )
    return DTYPES[plain]


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file, and the name of its dtype in safetensors."""

    file: Path
    dtype: str


def weight_files(folder: Path) -> list[Path]:
    """The directory's safetensors files, those of an index in order; none if it has no such.

    Raises:
        ValueError: the index is damaged or names a file that is not there.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        return []
    names = sorted(set(_weight_map(folder).values()))
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{INDEX} names {name!r}, which is not there")
    return [folder / name for name in names]


def _weight_map(folder: Path) -> dict[str, str]:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise ValueError(f"{INDEX}: expected a 'weight_map' of tensor names to files")
    return table


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory's safetensors files, by name.

    Raises:
        ValueError: a damaged file, a tensor stored twice, or an index that says something else.
    """
    found: dict[str, StoredTensor] = {}
    files = weight_files(folder)
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open has no __iter__)
                if name in found:
                    both = f"{found[name].file.name!r} and {path.name!r}"
                    raise ValueError(f"weight {name!r} is stored twice, in {both}")
                found[name] = StoredTensor(path, tensors.get_slice(name).get_dtype())
    if files and files[0].name != WEIGHTS:
        for name, file in sorted(_weight_map(folder).items()):
            if name not in found or found[name].file.name != file:
                raise ValueError(f"{INDEX} places weight {name!r} in {file!r}, which lacks it")
    return found


def is_ignored(name: str) -> bool:
    """Whether a stored tensor says nothing: RoPE frequencies, which the configuration gives."""
    return _ROPE_BUFFER.search(name) is not None


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that all weights share; float32 if they differ, or cannot be read here."""
    try:
        kinds = {t.dtype for name, t in stored_tensors(folder).items() if not is_ignored(name)}
    except Exception:  # damage is reported where the weights are loaded
        return torch.float32
    only = _STORED_DTYPES.get(kinds.pop()) if len(kinds) == 1 else None
    return DTYPES.get(only or "float32", torch.float32)


def check_fit(missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raises ``UnsupportedModel`` unless the files hold just what a model takes.

    Names the first three tensors that the model misses, and the first three that nobody takes.
    """
    absent, left = sorted(missing), sorted(n for n in unexpected if not is_ignored(n))
    if absent or left:
        parts = [f"missing {absent[:3]} (of {len(absent)})"] if absent else []
        parts += [f"unexpected {left[:3]} (of {len(left)})"] if left else []
        raise UnsupportedModel(f"weights do not fit config.json: {', '.join(parts)}")


def check_kinds(stored: Mapping[str, StoredTensor]) -> None:
    """Raises ``UnsupportedModel`` if a tensor that is not ignored is stored quantised."""
    for name, tensor in sorted(stored.items()):
        if tensor.dtype not in _STORED_DTYPES and not is_ignored(name):
            names = ", ".join(_STORED_DTYPES)
            raise UnsupportedModel(
                f"weight {name!r}: expected one of {names}, got {tensor.dtype}: quantised weights "
                "are not supported"
            )
