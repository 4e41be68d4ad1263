"""SnapKV at decode time: attention of the last queries alone (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.policies.rkv import RKV, QuerySettings


@dataclass(frozen=True)
class SnapKVSettings(QuerySettings):
    """Those of R-KV without redundancy."""


class SnapKV(RKV):
    """R-KV's importance without its redundancy: what the R-KV code runs as ``snapkv``."""

    name = "snapkv"
    summary = "what recent queries attend to (SnapKV at decode time)"
    settings_type = SnapKVSettings
    order = 1

    @property
    def redundancy(self) -> tuple[float, float]:
        return 1.0, 0.5  # which weighs nothing
