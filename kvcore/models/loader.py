"""From a checkpoint directory to a model that an engine can run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kvcore.cache import CacheShape
from kvcore.models.attention import ATTENTION_NAME, register_attention
from kvcore.models.prepack import prepack_linears
from kvcore.models.support import UnsupportedModel, cache_shape, check_supported
from kvcore.models.token_bytes import token_byte_list
from kvcore.models.token_head import load_token_head_model
from kvcore.native import _C

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A decoder bound to kvcore's attention, with its tokenizer.

    Attributes:
        model: transformers module; runs only through an engine.
        vocab: ids below this may be sampled (rows above it are padding of the output matrix).
        eos_ids: ids that end a text.
        token_bytes: bytes of each id; None without a tokenizer.
        context_len: tokens that the model was made for.
        has_head: True for a token-head model (PRM), which scores and does not generate.
    """

    name: str
    model: nn.Module
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    shape: CacheShape
    vocab: int
    eos_ids: frozenset[int]
    token_bytes: _C.TokenBytes
    context_len: int
    has_head: bool = False
    prepacked: bool = False

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shape.token_bytes


def _as_ids(value: int | Iterable[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)


def bind_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    name: str = "model",
    prepack: bool = True,
    has_head: bool = False,
) -> LoadedModel:
    """Bind a transformers decoder that is already in memory. Modifies ``model``.

    Raises:
        UnsupportedModel: it would decode wrongly here.
    """
    config: PretrainedConfig = model.config  # type: ignore[assignment]
    check_supported(config)
    dtype = next(model.parameters()).dtype
    if dtype not in _DTYPES.values():
        raise UnsupportedModel(f"model: expected float32, bfloat16 or float16 weights, got {dtype}")
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    model.eval().requires_grad_(False)
    prepacked = prepack and prepack_linears(model) > 0
    rows = config.vocab_size
    pieces = [b""] * rows if tokenizer is None else token_byte_list(tokenizer)[:rows]
    generation = getattr(model, "generation_config", None)
    eos = _as_ids(getattr(generation, "eos_token_id", None)) | _as_ids(config.eos_token_id)
    if tokenizer is not None:
        eos |= _as_ids(tokenizer.eos_token_id)
    return LoadedModel(
        name=name,
        model=model,
        config=config,
        tokenizer=tokenizer,
        shape=cache_shape(config, dtype),
        vocab=len(pieces),
        eos_ids=frozenset(eos),
        token_bytes=_C.TokenBytes(pieces),
        context_len=config.max_position_embeddings,
        has_head=has_head,
        prepacked=prepacked,
    )


def _open_config(path: str | Path, argument: str) -> tuple[Path, PretrainedConfig]:
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{argument}: expected a model directory, got {str(path)!r}: no such one")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{argument}: {str(path)!r} holds no config.json")
    if int(transformers.__version__.split(".")[0]) < 5:
        raise RuntimeError(f"transformers >= 5 is needed, found {transformers.__version__}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"{argument}: {str(path)!r}: {error}") from error
    try:
        check_supported(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{argument}: {str(path)!r} is refused: {error}") from None
    return folder, config


def _resolve_dtype(dtype: str | torch.dtype | None, config: PretrainedConfig) -> torch.dtype:
    if dtype is None:
        dtype = getattr(config, "dtype", None) or torch.float32
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in _DTYPES.values():
        raise ValueError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    assert chosen is not None
    return chosen


def _open_tokenizer(folder: Path, argument: str) -> PreTrainedTokenizerBase:
    # Without files transformers may make an empty tokenizer of the model's usual class.
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        names = ", ".join(_TOKENIZER_FILES)
        raise ValueError(f"{argument}: no tokenizer in {str(folder)!r}: expected one of {names}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if _rebuilt_differently(tokenizer, folder / "tokenizer.json"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        return tokenizer
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument}: no usable tokenizer in {str(folder)!r}: {error}") from error


def _rebuilt_differently(tokenizer: PreTrainedTokenizerBase, file: Path) -> bool:
    """True if the model's usual tokenizer class ignored what ``tokenizer.json`` says.

    For some model types transformers 5 builds the class's own algorithm (byte-level BPE for Qwen2)
    around the file's vocabulary, whatever the file describes, and texts become other ids.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.is_file():
        return False
    declared = json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("type")
    return declared is not None and declared != type(backend.model).__name__


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    prepack: bool = True,
    argument: str = "base",
) -> LoadedModel:
    """Load a Qwen2, Qwen3 or Llama checkpoint directory.

    Args:
        dtype: "float32", "bfloat16" or "float16"; None takes the checkpoint's.
        device: only "cpu" in this version.
        prepack: keep linear weights in oneDNN's packed layout, where that is faster (large
            weights in float32; all in bfloat16 if the CPU has instructions for it).
        argument: name used in error messages.
    Raises:
        ValueError: no such directory, damaged files, or an unknown dtype or device.
        UnsupportedModel: the model would decode wrongly here; the message says why.
    """
    if device != "cpu":
        raise ValueError(
            f"device: expected 'cpu' (this version has no CUDA kernels), got {device!r}"
        )
    folder, config = _open_config(path, argument)
    chosen = _resolve_dtype(dtype, config)
    tokenizer = _open_tokenizer(folder, argument)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=chosen,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            trust_remote_code=False,
        )
        model, info = loaded
    except Exception as error:  # safetensors, OS and shape errors: all mean damaged files
        raise ValueError(f"{argument}: cannot load weights from {str(path)!r}: {error}") from error
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])[:3]
        raise ValueError(f"{argument}: weights missing in {str(path)!r}, for instance {names}")
    for name, found, expected in sorted(info["mismatched_keys"]):
        shapes = f"expected {tuple(expected)}, got {tuple(found)}"
        raise ValueError(f"{argument}: weight {name!r} in {str(path)!r}: {shapes}")
    return bind_model(model, tokenizer, name=folder.name, prepack=prepack)


def load_prm(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    prepack: bool = True,
    argument: str = "scorer",
) -> LoadedModel:
    """Load a process reward model of the Qwen2.5-Math-PRM family natively (no remote code).

    Raises as ``load_model``.
    """
    folder, config = _open_config(path, argument)
    chosen = _resolve_dtype(dtype, config)
    tokenizer = _open_tokenizer(folder, argument)
    try:
        model = load_token_head_model(folder, config, chosen)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{argument}: {str(path)!r} is refused: {error}") from None
    except Exception as error:
        raise ValueError(f"{argument}: cannot load weights from {str(path)!r}: {error}") from error
    return bind_model(model, tokenizer, name=folder.name, prepack=prepack, has_head=True)
