"""The demo's settings: what is evicted, how steps are sampled, when a candidate is degenerate."""

from __future__ import annotations

from kvcore.config import DetectorConfig, EngineConfig, EvictionConfig, SamplingParams, SearchConfig

POLICY = "rkv"
BUDGET = 32
PROTECT = 16  # newest entries: the step that is being written
HEADROOM = 32
N = 4
PROBLEMS = 100

# A right step has at most 12 tokens, a right solution at most 24 steps, with its prompt 460 tokens.
# Whoever needs three times as many steps has run away.
MAX_STEP_TOKENS = 24
MAX_STEPS = 72
MAX_TOKENS = 1000

SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, top_k=20, max_new_tokens=MAX_STEP_TOKENS)

DETECTOR = DetectorConfig(
    entropy=True, entropy_threshold=0.8, entropy_window=1, entropy_guard=1, gzip=False
)


def engine_config() -> EngineConfig:
    """Of every engine of the demo."""
    return EngineConfig(max_seqs=640, context_len=MAX_TOKENS + 16, kv_bytes=1 << 30)


def eviction_config(policy: str, budget: int) -> EvictionConfig:
    """Of the base model.

    Raises:
        ValueError: a budget or policy that cannot be.
    """
    return EvictionConfig(policy, budget, cadence="sawtooth", protect=PROTECT, headroom=HEADROOM)


def search_config(n: int, seed: int) -> SearchConfig:
    return SearchConfig(
        n=n,
        sampling=SAMPLING,
        max_steps=MAX_STEPS,
        max_tokens=MAX_TOKENS,
        detector=DETECTOR,
        seed=seed,
    )
