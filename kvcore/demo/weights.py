"""The embedded models as the demo finds and writes them (see ``kvcore.models.embedded``)."""

from __future__ import annotations

from pathlib import Path

from kvcore.models import embedded
from kvcore.models.embedded import MANIFEST, DamagedWeights, file_digest, write_manifest

__all__ = [
    "MANIFEST",
    "ROOT",
    "DamagedWeights",
    "file_digest",
    "model_directory",
    "write_manifest",
]

ROOT = embedded.ROOT


def model_directory(name: str, root: Path | None = None) -> Path:
    """As ``kvcore.models.embedded.model_directory``; None takes this module's ``ROOT``."""
    return embedded.model_directory(name, root or ROOT)
