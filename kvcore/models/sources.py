"""Where a model comes from: a directory, an embedded one, or the Hugging Face hub.

Needs neither torch nor transformers, so that a wrong name is refused before they are imported.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from kvcore.models.embedded import model_directory

_log = logging.getLogger(__name__)

# What a checkpoint's own format needs; nothing of subfolders, which hold other formats.
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_EXCLUDED = ("*/*",)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_SNAPSHOT = re.compile(r"models--(?:.+--)?(.+)\Z")
_SECONDS = 10.0  # that the hub may take to answer


class UnreachableModel(ValueError):
    """A hub model that is not on this machine and cannot be had; the message says how to get it."""


def resolve(source: str | Path, argument: str = "model") -> Path:
    """The checkpoint directory of ``source``; may download a model of the hub.

    Args:
        source: a directory, ``"demo:NAME"`` for an embedded model, or a hub id ``"owner/name"``. A
            directory of that name comes first. A hub model is downloaded once, to the cache of
            ``huggingface_hub``, and found there when the hub cannot be reached.
        argument: name used in error messages.
    Raises:
        ValueError: nothing of the kind, or an embedded model that is damaged (``DamagedWeights``).
        UnreachableModel: the hub does not have it, does not hand it out, or cannot be reached.
    """
    if not isinstance(source, (str, Path)) or str(source) == "":
        raise ValueError(f"{argument}: expected a directory, hub id or demo:NAME, got {source!r}")
    name = str(source)
    kind, separator, embedded = name.partition(":")
    if separator and kind == "demo":
        return model_directory(embedded, argument=argument)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{argument}: expected a model directory, got {name!r} (a file)")
    if not is_hub_id(name):
        raise ValueError(
            f"{argument}: expected a model directory, got {name!r} (nothing there: no such "
            "directory, and neither a hub id, owner/name, nor demo:NAME)"
        )
    return _download(name, argument)


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form ``owner/name``."""
    return _HUB_ID.match(name) is not None


def name_of(folder: Path) -> str:
    """What to call the model of a checkpoint directory: its name, or its name on the hub."""
    folder = folder.resolve() if folder.name in ("", ".", "..") else folder
    if folder.parent.name == "snapshots":
        match = _SNAPSHOT.match(folder.parent.parent.name)
        if match:
            return match.group(1)
    return folder.name


def _download(name: str, argument: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    _log.info("%s: looking for %s on the hub and in its cache", argument, name)
    try:
        found = snapshot_download(
            name,
            allow_patterns=list(PATTERNS),
            ignore_patterns=list(_EXCLUDED),
            etag_timeout=_SECONDS,
        )
    except HFValidationError as error:
        raise ValueError(f"{argument}: {name!r} is no hub id: {error}") from None
    except GatedRepoError as error:
        remedy = f"ask for access on its page, then run `hf auth login` and {_how(name)}"
        raise _unreachable(name, argument, "is given on request only", remedy) from error
    except RepositoryNotFoundError as error:
        remedy = "check the name; for a private model run `hf auth login` first"
        raise _unreachable(name, argument, "is not on the hub", remedy) from error
    except (LocalEntryNotFoundError, IncompleteSnapshotError) as error:
        reason = "is not wholly in the cache, and the hub cannot be reached"
        raise _unreachable(name, argument, reason, _how(name)) from error
    except Exception as error:  # HTTP, proxy and disk errors of several libraries
        told = " ".join(f"{type(error).__name__}: {error}".split())
        reason = f"could not be downloaded ({told[:300]})"
        raise _unreachable(name, argument, reason, _how(name)) from error
    return Path(found)


def _how(name: str) -> str:
    patterns = " ".join(f'--include "{pattern}"' for pattern in PATTERNS)
    return (
        f"where there is a network run `hf download {name} {patterns} --local-dir DIR`, copy DIR "
        "to this machine and give it instead of the id"
    )


def _unreachable(name: str, argument: str, reason: str, remedy: str) -> UnreachableModel:
    return UnreachableModel(
        f"{argument}: expected a model directory, got {name!r} (nothing there), and the hub model "
        f"of that name {reason}: {remedy}"
    )
