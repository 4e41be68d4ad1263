"""Settings: frozen, checked when made, free of torch.

Every class raises ``ValueError`` naming the field, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvcore.checks import (
    INT32_MAX,
    INT64_MAX,
    is_float32,
    is_number,
    require,
    require_bool,
    require_int,
)
from kvcore.policies.settings import EvictionConfig, pyramid_budgets

__all__ = [
    "DetectorConfig",
    "EngineConfig",
    "EvictionConfig",
    "SamplingParams",
    "SearchConfig",
    "check_template_args",
    "pyramid_budgets",
    "require",
    "require_bool",
    "require_int",
]

_CANDIDATES = 8  # of each model per step; KV-Rescue, appendix C
# Most that the detector keeps of a candidate; csrc/detect/degeneration_detector.h says the same.
MAX_DETECTOR_TOKENS = 2**20
MAX_GZIP_WINDOW = 2**15  # bytes: what deflate looks back


class _Carried(int):
    """A number of tokens that nobody has given here: a default, or carried over by ``replace``."""


_MAX_TOKENS = _Carried(512)


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How tokens are drawn (defaults: KV-Rescue, experiment setup).

    Filters apply in vLLM's order: repetition penalty, temperature, min-p, top-k, top-p. Entropies
    and log-probabilities that are reported stay those of the raw distribution.

    Attributes:
        temperature: 0 means greedy; at most 3.4e38 and otherwise at least 1.4e-45, the float32
            range.
        top_p: in (0, 1], at least 1.4e-45; 1 means off.
        top_k: 0 means off; at most 2**31 - 1.
        max_new_tokens: at most this many tokens for one generation or one candidate step. Also
            given and read as ``max_tokens``, its name in vLLM.
        min_p: in [0, 1]; tokens less likely than this times the likeliest are not drawn; 0 is off.
        repetition_penalty: divides positive logits, and multiplies negative ones, of the tokens
            that the sequence has, prompt included; a positive float32, 1 is off.
    Raises:
        ValueError: a value outside its range, or ``max_tokens`` and ``max_new_tokens`` that differ.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    min_p: float
    repetition_penalty: float

    def __init__(
        self,
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 20,
        max_new_tokens: int = _MAX_TOKENS,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        *,
        max_tokens: int = _MAX_TOKENS,
    ) -> None:
        ok = is_float32(temperature) and temperature >= 0
        require(ok, "temperature", "0 or a number in [1.4e-45, 3.4e38]", temperature)
        ok = is_float32(top_p) and 0 < top_p <= 1
        require(ok, "top_p", "a number in (0, 1], at least 1.4e-45", top_p)
        require_int(top_k, "top_k", 0, INT32_MAX)
        ok = is_float32(min_p) and 0 <= min_p <= 1
        require(ok, "min_p", "0 or a number in [1.4e-45, 1]", min_p)
        ok = is_float32(repetition_penalty) and repetition_penalty > 0
        require(ok, "repetition_penalty", "a number in [1.4e-45, 3.4e38]", repetition_penalty)
        given = [
            (name, value)
            for name, value in (("max_tokens", max_tokens), ("max_new_tokens", max_new_tokens))
            if not isinstance(value, _Carried)
        ]
        for name, value in given:
            require_int(value, name, 1, INT32_MAX)
        same = len({value for _, value in given}) <= 1
        require(same, "max_tokens", f"the same as max_new_tokens ({max_new_tokens})", max_tokens)
        values = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_new_tokens": _Carried(given[0][1] if given else max_new_tokens),
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
        for field_name, setting in values.items():
            object.__setattr__(self, field_name, setting)

    @property
    def max_tokens(self) -> int:
        """``max_new_tokens``."""
        return self.max_new_tokens


@dataclass(frozen=True)
class DetectorConfig:
    """When a candidate counts as degenerate (KV-Rescue, eq. 4 and appendix C).

    Attributes:
        entropy: test the mean of the last ``entropy_window`` token entropies against
            ``entropy_threshold`` nats, from token ``entropy_guard`` on.
        gzip: test gzip size / bytes of the last ``gzip_window`` bytes against ``gzip_threshold``.
        gzip_exact: test at every token instead of skipping checks that cannot fire; a
            ``gzip_window`` above 800 bytes is always tested so.
        repetition: test for a tail that repeats exactly (not in the paper, off by default): at
            least ``repetition_min_count`` copies of at most ``repetition_max_pattern_size`` tokens,
            together at least ``repetition_min_tokens`` long.
    """

    entropy: bool = True
    entropy_threshold: float = 7.0
    entropy_window: int = 12
    entropy_guard: int = 24
    gzip: bool = True
    gzip_threshold: float = 0.18
    gzip_window: int = 800
    gzip_exact: bool = False
    repetition: bool = False
    repetition_max_pattern_size: int = 64
    repetition_min_count: int = 3
    repetition_min_tokens: int = 80

    def __post_init__(self) -> None:
        for name in ("entropy", "gzip", "gzip_exact", "repetition"):
            require_bool(getattr(self, name), name)
        ok = is_float32(self.entropy_threshold) and self.entropy_threshold > 0
        expected = "a number > 0 that float32 holds"
        require(ok, "entropy_threshold", expected, self.entropy_threshold)
        require_int(self.entropy_window, "entropy_window", 1, MAX_DETECTOR_TOKENS)
        require_int(self.entropy_guard, "entropy_guard", 1, MAX_DETECTOR_TOKENS)
        ok = is_number(self.gzip_threshold) and 0 < self.gzip_threshold < 1
        require(ok, "gzip_threshold", "a number in (0, 1)", self.gzip_threshold)
        require_int(self.gzip_window, "gzip_window", 32, MAX_GZIP_WINDOW)
        require_int(
            self.repetition_max_pattern_size, "repetition_max_pattern_size", 1, MAX_DETECTOR_TOKENS
        )
        require_int(self.repetition_min_count, "repetition_min_count", 2, MAX_DETECTOR_TOKENS)
        require_int(self.repetition_min_tokens, "repetition_min_tokens", 1, MAX_DETECTOR_TOKENS)

    @property
    def active(self) -> bool:
        """Whether any test is on."""
        return self.entropy or self.gzip or self.repetition


@dataclass(frozen=True)
class EngineConfig:
    """Size and schedule of one engine.

    Attributes:
        max_seqs: rows of the cache: sequences that hold cache at once.
        context_len: longest sequence in tokens; None takes the model's own limit.
        kv_blocks: blocks in the pool (16 slots of one lane each); None sizes the pool by
            ``kv_bytes``.
        kv_bytes: bytes of keys, values and the steady cadence's lane states when ``kv_blocks`` is
            None.
        max_batched_tokens: most tokens of one forward; longer prompts are prefilled in chunks.
    """

    max_seqs: int = 256
    context_len: int | None = None
    kv_blocks: int | None = None
    kv_bytes: int = 2 << 30
    max_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        require_int(self.max_seqs, "max_seqs", 1, INT32_MAX)
        if self.context_len is not None:
            require_int(self.context_len, "context_len", 1, INT32_MAX)
        if self.kv_blocks is not None:
            require_int(self.kv_blocks, "kv_blocks", 1, INT32_MAX)
        require_int(self.kv_bytes, "kv_bytes", 1, INT64_MAX)
        require_int(self.max_batched_tokens, "max_batched_tokens", 1, INT32_MAX)


def as_separators(value: Any, field_name: str = "separators") -> tuple[bytes, ...]:
    """Byte strings that end a reasoning step; texts are taken as UTF-8.

    Args:
        value: one str or bytes, or several in a list or tuple.
    Raises:
        ValueError: none at all, an empty one, or something else.
    """
    given = value if isinstance(value, (list, tuple)) else (value,)
    require(len(given) > 0, field_name, "at least one separator", value)
    found = []
    for one in given:
        ok = isinstance(one, (str, bytes)) and len(one) > 0
        require(ok, field_name, "texts or bytes that are not empty", one)
        try:
            found.append(one if isinstance(one, bytes) else one.encode())
        except UnicodeEncodeError:
            require(False, field_name, "text that has a UTF-8 form", one)
    return tuple(found)


@dataclass(frozen=True)
class SearchConfig:
    """Stepwise search: best-of-N without a helper, KV-Rescue with one (Algorithm 1).

    Attributes:
        n: candidates of the base model per step (N_b).
        n_helper: candidates of the helper per step (N_h); 0 without a helper, ``None`` takes ``n``.
        n_total: candidates of both models together per step, in place of ``n`` and ``n_helper``:
            half are the base model's, which gets the odd one, and without a helper all.
        sampling: of both models; ``max_new_tokens`` bounds one step.
        max_steps: steps of one solution.
        max_tokens: context in tokens, prompt included, at which a solution is retired.
        detector: of base candidates; ``None`` switches early exit off. An engine made without a
            detector is lent this one while a search runs.
        seed: of the run; every draw is a function of (seed, problem, step, source, candidate,
            token).
        separators: what ends a step in a model's text: bytes, or text that stands for its UTF-8;
            one or several. White space in front of a step and a separator that it begins with do
            not end it, and the token that completes a separator is kept whole.
    """

    n: int = _CANDIDATES
    n_helper: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_steps: int = 1024
    max_tokens: int = 4096
    detector: DetectorConfig | None = field(default_factory=DetectorConfig)
    seed: int = 0
    n_total: int | None = None
    separators: tuple[bytes, ...] = (b"\n\n",)

    def __post_init__(self) -> None:
        ok = isinstance(self.sampling, SamplingParams)
        require(ok, "sampling", "SamplingParams", self.sampling)
        require_int(self.n, "n", 1, INT32_MAX)
        if self.n_helper is not None:
            require_int(self.n_helper, "n_helper", 0, INT32_MAX)
        require_int(self.max_steps, "max_steps", 1, INT32_MAX)
        require_int(self.max_tokens, "max_tokens", 2, INT32_MAX)
        require_int(self.seed, "seed", 0, INT64_MAX)
        if self.n_total is not None:
            require_int(self.n_total, "n_total", 1, INT32_MAX)
            require(self.n == _CANDIDATES, "n", "nothing beside n_total", self.n)
            require(self.n_helper is None, "n_helper", "nothing beside n_total", self.n_helper)
        object.__setattr__(self, "separators", as_separators(self.separators))

    def candidates(self, *, helper: bool) -> tuple[int, int]:
        """Candidates per step of the base model and of the helper; ``helper``: there is one."""
        if self.n_total is not None:
            theirs = self.n_total // 2 if helper else 0
            return self.n_total - theirs, theirs
        theirs = self.n if self.n_helper is None else self.n_helper
        return self.n, theirs if helper else 0

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values. A byte of a separator that is no UTF-8 becomes ``\\xNN``."""
        separators = [one.decode(errors="backslashreplace") for one in self.separators]
        return {**asdict(self), "separators": separators}


# Keywords of a chat template that are not the user's to give.
_RESERVED_TEMPLATE_ARGS = frozenset(
    (
        *("self", "messages", "conversation", "chat_template", "tools", "documents"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "processor_kwargs", "raise_exception", "strftime_now"),
    )
)


def check_template_args(args: Mapping[str, Any]) -> None:
    """Raises ValueError unless ``args`` can be handed to a chat template as keywords."""
    for name in args:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"template_args: expected names of variables, got {name!r}")
        if name in _RESERVED_TEMPLATE_ARGS:
            raise ValueError(f"template_args: {name!r} is set by kvcore itself")
