"""The embedded models: where they are, and whether they are whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "demo" / "weights"
MANIFEST = "manifest.json"


class DamagedWeights(ValueError):
    """A file of the embedded models is missing or is not the one that was installed."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"demo: {str(path)!r} {reason}; reinstall kvcore: "
            "pip install --force-reinstall --no-deps ."
        )


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(root: Path, names: Sequence[str]) -> None:
    """Notes the digest of every file of the named models in ``root``."""
    digests = {
        name: {p.name: file_digest(p) for p in sorted((root / name).iterdir()) if p.is_file()}
        for name in names
    }
    (root / MANIFEST).write_text(json.dumps(digests, indent=2) + "\n")


def model_directory(name: str, root: Path | None = None, argument: str = "demo") -> Path:
    """Directory of an embedded model, its files checked.

    Args:
        root: where the models lie; None takes the package's own.
        argument: name used in error messages.
    Raises:
        ValueError: no such model.
        DamagedWeights: a file is missing or damaged; names it.
    """
    root = root or ROOT
    manifest = root / MANIFEST
    try:
        models = json.loads(manifest.read_text())
    except OSError:
        raise DamagedWeights(manifest, "is missing") from None
    except ValueError:
        raise DamagedWeights(manifest, "is damaged") from None
    if name not in models:
        expected = ", ".join(f"demo:{known}" for known in models)
        raise ValueError(f"{argument}: expected one of {expected}, got {'demo:' + name!r}")
    for file, digest in models[name].items():
        path = root / name / file
        if not path.is_file():
            raise DamagedWeights(path, "is missing")
        if file_digest(path) != digest:
            raise DamagedWeights(path, "is damaged (its SHA-256 is not the installed one's)")
    return root / name
