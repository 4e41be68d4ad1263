"""How the embedded models are run: what is evicted and how steps are sampled."""

from __future__ import annotations

from kvcore.config import EngineConfig, EvictionConfig, SamplingParams

PROTECT = 16  # newest entries: the step that is being written
HEADROOM = 32

# A right step has at most 12 tokens, a right solution with its prompt at most 460.
MAX_STEP_TOKENS = 24
MAX_TOKENS = 640

SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, top_k=20, max_new_tokens=MAX_STEP_TOKENS)


def engine_config() -> EngineConfig:
    """Of every engine."""
    return EngineConfig(max_seqs=640, context_len=MAX_TOKENS + 16, kv_bytes=1 << 30)


def eviction_config(policy: str, budget: int) -> EvictionConfig:
    """Of the base model.

    Raises:
        ValueError: a budget or policy that cannot be.
    """
    return EvictionConfig(policy=policy, budget=budget, protect=PROTECT, headroom=HEADROOM)
