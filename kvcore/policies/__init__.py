"""Eviction policies: what a lane keeps, when it lets go, and how.

``Evictor`` and ``evict`` work on a cache and need torch: they are imported when first used.
"""

from typing import TYPE_CHECKING, Any

from kvcore.policies.base import FusedRKV, Needs, Policy, PolicySettings, setting, spare_newest
from kvcore.policies.registry import available, failures, make_policy, policies

if TYPE_CHECKING:
    from kvcore.policies.evictor import Evictor
    from kvcore.policies.selection import evict

__all__ = [
    "Evictor",
    "FusedRKV",
    "Needs",
    "Policy",
    "PolicySettings",
    "available",
    "evict",
    "failures",
    "make_policy",
    "policies",
    "setting",
    "spare_newest",
]


def __getattr__(name: str) -> Any:
    if name == "Evictor":
        from kvcore.policies.evictor import Evictor

        return Evictor
    if name == "evict":
        from kvcore.policies.selection import evict

        return evict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
