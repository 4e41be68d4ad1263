"""What goes into an engine and what comes out: generation requests, step events, statistics."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from kvcore.checks import INT32_MAX
from kvcore.config import SamplingParams, as_separators, require, require_bool, require_int


class Finish(enum.Enum):
    """Why a sequence stopped generating."""

    STEP = "step"  # its text reached a separator (the whole last token is kept)
    EOS = "eos"
    LENGTH = "length"  # max_tokens, or the context is full
    ENTROPY = "entropy"  # the detector's entropy test fired
    GZIP = "gzip"
    REPETITION = "repetition"
    NAN = "nan"  # the model returned logits without a finite distribution

    @property
    def degenerate(self) -> bool:
        """True when the candidate must not be offered to the scorer."""
        return self in (Finish.ENTROPY, Finish.GZIP, Finish.REPETITION, Finish.NAN)


class FeedOutput(enum.Enum):
    """What ``Engine.extend`` returns about teacher-forced tokens."""

    NONE = "none"
    LOGPROBS = "logprobs"  # f32 [tokens]: log p(token | before), nats, raw distribution
    HEAD = "head"  # f32 [labels]: the token head's logits at the last token (PRM)


@dataclass(frozen=True)
class GenerateSpec:
    """One generation: how to draw, when to stop, and the key of its random numbers.

    Attributes:
        sampling: temperature and filters; its ``max_tokens`` bounds this generation.
        rng_key: u64; token i of this generation draws with counter i under this key.
        stop_at_step: stop after the token whose bytes complete one of ``separators`` that does not
            begin the text, white space aside.
        detect: run the engine's detector on this generation.
        separators: as in ``SearchConfig``.
        top_logprobs: tell the log-probabilities of this many most likely tokens with every token.
    Raises:
        ValueError: a field of another type, or a key that is no u64.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    rng_key: int = 0
    stop_at_step: bool = False
    detect: bool = False
    separators: tuple[bytes, ...] = (b"\n\n",)
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        ok = isinstance(self.sampling, SamplingParams)
        require(ok, "sampling", "SamplingParams", self.sampling)
        require_int(self.rng_key, "rng_key", 0, 2**64 - 1)
        require_bool(self.stop_at_step, "stop_at_step")
        require_bool(self.detect, "detect")
        object.__setattr__(self, "separators", as_separators(self.separators))
        require_int(self.top_logprobs, "top_logprobs", 0, INT32_MAX)


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        tokens: ids generated, in order, the eos id included.
        text: their bytes, special tokens excluded.
        finish: why it stopped.
        mean_logprob: mean raw log-probability of ``tokens`` in nats.
        logprobs: of each token, nats.
        max_entropy: largest windowed mean entropy in nats, NaN if never tested.
        min_gzip_ratio: smallest gzip ratio at the positions tested, NaN if never tested.
        fired_at: token count at which the detector fired, 0 if it did not.
    """

    tokens: list[int]
    text: bytes
    finish: Finish
    mean_logprob: float
    logprobs: list[float]
    max_entropy: float
    min_gzip_ratio: float
    fired_at: int


@dataclass(frozen=True)
class StepEvent:
    """One thing that happened to one sequence during ``Engine.step``.

    Exactly one of these holds:
        * ``token`` or ``generation`` is set: a token was generated, and it was the last if
          ``generation`` is set as well (alone, without a token, when there was no finite
          distribution to draw from); ``logprob`` is the token's raw log-probability in nats,
          ``top_logprobs`` the ids and log-probabilities of the most likely ones, falling;
        * ``extended`` is True: the tokens of ``add`` or ``extend`` are in; ``values`` as requested.
        * ``error`` is set: this sequence failed (for instance NaN keys); others go on. It stays
          allocated until released.
    """

    seq: int
    token: int | None = None
    generation: Generation | None = None
    extended: bool = False
    values: torch.Tensor | None = None
    error: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass
class EngineStats:
    """Running totals of one engine. Counts are tokens unless named otherwise."""

    prompt_tokens: int = 0  # teacher-forced: prompts and extends
    generated_tokens: int = 0
    recomputed_tokens: int = 0  # replayed after a preemption
    preemptions: int = 0
    evictions: int = 0  # eviction events (one sequence, all lanes)
    evicted_slots: int = 0  # slots of one lane, overwritten ones included
    decode_steps: int = 0  # forwards
    forward_seconds: float = 0.0
    total_seconds: float = 0.0
    kv_bytes_peak: int = 0  # blocks in use, at most
    kv_bytes_peak_seq: int = 0  # largest footprint of a single sequence, bytes
