"""Eviction policies: what a lane keeps when it reaches its limit."""

from kvcore.policies.base import Policy, evict
from kvcore.policies.registry import available, make_policy
from kvcore.policies.steady import elect

__all__ = ["Policy", "available", "elect", "evict", "make_policy"]
