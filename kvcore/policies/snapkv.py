"""SnapKV at decode time: attention of the last queries alone (arXiv 2404.14469)."""

from __future__ import annotations

from kvcore.policies.rkv import RKV


class SnapKV(RKV):
    """R-KV's importance without its redundancy: what the R-KV code runs as ``snapkv``."""

    name = "snapkv"

    @property
    def mix(self) -> float:
        return 1.0
