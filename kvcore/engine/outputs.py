"""What ``Engine.generate`` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheUse:
    """What one sequence held in the KV cache when it ended.

    Attributes:
        entries: slots of its longest lane.
        bytes: of its blocks (16 slots of one lane each), and of the lane states that the steady
            cadence keeps for some policies.
        full_bytes: of the blocks that the same tokens would hold with nothing evicted.
        evicted: tokens fed that the longest lane no longer holds; 0 with a full cache.
    """

    entries: int = 0
    bytes: int = 0
    full_bytes: int = 0
    evicted: int = 0


@dataclass(frozen=True)
class Output:
    """One continuation of one prompt.

    Attributes:
        prompt_index: place of its prompt among ``prompts``; 0 for a single one.
        index: which of the prompt's ``n`` continuations this is.
        text: what was generated, special tokens and the token that ended it excluded; ends before
            the stop string. Bytes that are no UTF-8 are U+FFFD.
        token_ids: what was generated, the eos token or the whole token that completed a stop string
            included.
        finish_reason: "stop": end of text or a stop string; "length": ``max_tokens``, or the
            context is full; "abort": interrupted by Ctrl-C; "error": see ``error``; "nan": the
            model gave no finite distribution; "entropy", "gzip", "repetition": the detector fired.
        stop_reason: the stop string that ended it; else None.
        logprobs: for every token of ``token_ids`` log-probabilities in nats by id, of the raw
            distribution (temperature 1, no filter): the chosen token first, then the most likely
            ones, falling. None unless asked for.
        cache: what it held in the KV cache at the end.
        prompt_token_ids: what it continues.
        error: why it could not go on; None unless ``finish_reason`` is "error".
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | None
    logprobs: list[dict[int, float]] | None
    cache: CacheUse
    prompt_token_ids: list[int]
    error: str | None = None
