"""How a checkpoint's ``generation_config.json`` wants the model to be sampled."""

from __future__ import annotations

from typing import Any

from kvcore.config import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
_OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}  # what the file does not mention


def own_sampling(generation: Any) -> SamplingParams | None:
    """The settings of a transformers ``GenerationConfig``; None if no file stands behind it.

    Without ``do_sample`` the model decodes greedily. Filters that are not mentioned are off, and
    ``max_new_tokens`` is that of ``SamplingParams``, as with vLLM.
    Raises:
        ValueError: a value that no sampler takes, by its name.
    """
    if generation is None or getattr(generation, "_from_model_config", False):
        return None
    given = {name: getattr(generation, name, None) for name in _NAMES}
    values: dict[str, Any] = {**_OFF, **{n: v for n, v in given.items() if v is not None}}
    if not getattr(generation, "do_sample", None):
        values["temperature"] = 0.0
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None
