"""Names of policies."""

from __future__ import annotations

from kvcore.config import EvictionConfig
from kvcore.policies.base import Policy
from kvcore.policies.h2o import H2O
from kvcore.policies.keydiff import KeyDiff
from kvcore.policies.knorm import KNorm
from kvcore.policies.random import RandomPolicy
from kvcore.policies.rkv import RKV
from kvcore.policies.snapkv import SnapKV
from kvcore.policies.streamingllm import StreamingLLM
from kvcore.policies.tova import Tova

_POLICIES: tuple[type[Policy], ...] = (
    RKV,
    SnapKV,
    H2O,
    Tova,
    KNorm,
    KeyDiff,
    StreamingLLM,
    RandomPolicy,
)


def available() -> tuple[str, ...]:
    """Names that ``EvictionConfig.policy`` takes; "full" keeps everything."""
    return ("full", *(p.name for p in _POLICIES))


def make_policy(config: EvictionConfig) -> Policy | None:
    """The policy that ``config`` names; None for "full".

    Raises:
        ValueError: no policy has that name, or it cannot work with these settings.
    """
    if not config.evicts:
        return None
    for policy in _POLICIES:
        if policy.name == config.policy:
            return policy(config)
    raise ValueError(f"policy: expected one of {', '.join(available())}, got {config.policy!r}")
