"""From a checkpoint to a model that an engine can run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from kvcore.cache import CacheShape
from kvcore.config import SamplingParams
from kvcore.models.attention import ATTENTION_NAME, register_attention
from kvcore.models.checkpoint import (
    DTYPES,
    OUTPUT_MATRIX,
    check_fit,
    check_kinds,
    read_config,
    stored_tensors,
)
from kvcore.models.fusion import fuse_layers
from kvcore.models.own_sampling import own_sampling
from kvcore.models.prepack import prepack_linears
from kvcore.models.sources import name_of, resolve
from kvcore.models.support import UnsupportedModel, cache_shape, check_supported
from kvcore.models.token_bytes import token_byte_list
from kvcore.models.token_head import PRM_ARCHITECTURE, load_token_head_model
from kvcore.models.tokenizer import open_tokenizer
from kvcore.native import _C

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A decoder bound to kvcore's attention, with its tokenizer.

    Attributes:
        name: of its directory, or on the hub.
        model: transformers module; runs only through an engine.
        config: as transformers read it.
        tokenizer: None for a model that takes token ids only.
        shape: layers, heads and dtype of its KV cache.
        vocab: ids below this may be sampled (rows above it are padding of the output matrix).
        eos_ids: ids that end a text.
        token_bytes: bytes of each id; None without a tokenizer.
        context_len: tokens that the model was made for.
        has_head: True for a token-head model (PRM), which scores and does not generate.
        prepacked: some of its linear layers have packed weights.
        fused: how many attentions and MLPs compute their products together (``fusion``).
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
    fused: Mapping[str, int] = field(default_factory=dict)

    @property
    def sampling(self) -> SamplingParams | None:
        """How its ``generation_config.json`` wants it to be sampled; None without one.

        Raises:
            ValueError: a value in it that no sampler takes.
        """
        return own_sampling(getattr(self.model, "generation_config", None))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers, with a full cache."""
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
    fuse: bool = True,
    has_head: bool = False,
) -> LoadedModel:
    """Bind a transformers decoder that is already in memory. Modifies ``model``.

    Without ``prepack`` nothing is fused either, since fused products have packed weights.

    Raises:
        UnsupportedModel: it would decode wrongly here.
    """
    config: PretrainedConfig = model.config  # type: ignore[assignment]
    check_supported(config)
    dtype = next(model.parameters()).dtype
    if dtype not in DTYPES.values():
        raise UnsupportedModel(f"model: expected float32, bfloat16 or float16 weights, got {dtype}")
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    model.eval().requires_grad_(False)
    fused = fuse_layers(model) if prepack and fuse else {}
    prepacked = prepack and prepack_linears(model) + sum(fused.values()) > 0
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
        fused=fused,
    )


def _open_config(path: str | Path, argument: str) -> tuple[Path, PretrainedConfig]:
    folder = resolve(path, argument)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{argument}: {str(path)!r} holds no config.json")
    if int(transformers.__version__.split(".")[0]) < 5:
        raise RuntimeError(f"transformers >= 5 is needed, found {transformers.__version__}")
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"{argument}: {str(path)!r} holds an adapter (adapter_config.json): merge it first"
        )
    try:
        return folder, read_config(folder)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{argument}: {str(path)!r} is refused: {error}") from None


def _resolve_dtype(dtype: str | torch.dtype | None, config: PretrainedConfig) -> torch.dtype:
    if dtype is None or dtype == "auto":
        dtype = config.dtype
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in DTYPES.values():
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)} or auto, got {dtype!r}")
    assert chosen is not None
    return chosen


def load_checkpoint(
    source: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    prepack: bool = True,
    argument: str = "model",
) -> LoadedModel:
    """``load_prm`` if ``source`` is a process reward model, else ``load_model``; raises as they."""
    folder, config = _open_config(source, argument)
    if PRM_ARCHITECTURE in (config.architectures or []):
        return load_prm(folder, dtype=dtype, device=device, prepack=prepack, argument=argument)
    return load_model(folder, dtype=dtype, device=device, prepack=prepack, argument=argument)


def _check_device(device: str) -> None:
    if device != "cpu":
        raise ValueError(
            f"device: expected 'cpu' (this version has no CUDA kernels), got {device!r}"
        )


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    prepack: bool = True,
    fuse: bool = True,
    argument: str = "base",
) -> LoadedModel:
    """Load a Qwen2, Qwen3 or Llama checkpoint.

    Args:
        path: a directory, ``"demo:NAME"`` for an embedded model, or a hub id ``"owner/name"``,
            which is downloaded once.
        dtype: "float32", "bfloat16" or "float16"; None or "auto" takes the checkpoint's.
        device: only "cpu" in this version.
        prepack: keep linear weights in a packed layout, where that is faster (large weights in
            float32; all in bfloat16 if the CPU has instructions for it).
        fuse: compute q, k and v, and gate and up, in one packed product each, where that is
            possible. Results differ by rounding.
        argument: name used in error messages.
    Raises:
        ValueError: no such directory, a hub model that cannot be had (``UnreachableModel``; the
            message says how to get it), damaged files, or an unknown dtype or device.
        UnsupportedModel: the model would decode wrongly here, its weights being others than its
            configuration implies included; the message says why.
    """
    _check_device(device)
    folder, config = _open_config(path, argument)
    chosen = _resolve_dtype(dtype, config)
    _log.info("%s: loading %s as %s", argument, folder, chosen)
    tokenizer = open_tokenizer(folder, argument)
    try:
        stored = stored_tensors(folder)
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
    for name, found, expected in sorted(info["mismatched_keys"]):
        shapes = f"expected {tuple(expected)}, got {tuple(found)}"
        raise ValueError(f"{argument}: weight {name!r} in {str(path)!r}: {shapes}")
    try:
        check_fit(info["missing_keys"], info["unexpected_keys"])
        check_kinds(stored)
        _check_tie(model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{argument}: {str(path)!r} is refused: {error}") from None
    return bind_model(model, tokenizer, name=name_of(folder), prepack=prepack, fuse=fuse)


def _check_tie(model: Any) -> None:
    """Raises UnsupportedModel if a tied model's file holds another output matrix.

    One that repeats the embedding is redundant. With one that differs, the file contradicts its
    configuration, and libraries disagree on which of them counts.
    """
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if head is not embedding and not torch.equal(head, embedding):
        raise UnsupportedModel(
            f"{OUTPUT_MATRIX} differs from the embedding that it shall be (tie_word_embeddings)"
        )


def load_prm(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    prepack: bool = True,
    fuse: bool = True,
    argument: str = "scorer",
) -> LoadedModel:
    """Load a process reward model of the Qwen2.5-Math-PRM family natively (no remote code).

    Takes the sources and raises the errors of ``load_model``.
    """
    _check_device(device)
    folder, config = _open_config(path, argument)
    chosen = _resolve_dtype(dtype, config)
    _log.info("%s: loading %s as %s", argument, folder, chosen)
    tokenizer = open_tokenizer(folder, argument)
    try:
        model = load_token_head_model(folder, config, chosen)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{argument}: {str(path)!r} is refused: {error}") from None
    except Exception as error:
        raise ValueError(f"{argument}: cannot load weights from {str(path)!r}: {error}") from error
    return bind_model(
        model, tokenizer, name=name_of(folder), prepack=prepack, fuse=fuse, has_head=True
    )
