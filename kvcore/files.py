"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A new path beside ``path``; the file made there takes its place when the block ends.

    Until then, and where the block raises, ``path`` is as it was. A link goes on pointing where it
    did, and what it points to is replaced; an existing file's permissions are kept. Of two writers
    at once the last one's file stands, whole. A device or a pipe cannot be replaced and is yielded
    itself.
    Raises:
        OSError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    if mode is not None and not stat.S_ISREG(mode):
        yield target
        return
    part = target.with_name(f".kvcore-{secrets.token_hex(8)}.part")
    try:
        yield part
        _to_disk(part)
        if mode is not None:
            os.chmod(part, stat.S_IMODE(mode))
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes ``content`` as ``replacing`` does; text as UTF-8.

    A lone surrogate, which has no UTF-8 form, becomes a question mark. Raises OSError.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
    with replacing(path) as part:
        part.write_bytes(data)


def write_json(path: str | Path, content: Any, *, indent: int = 2) -> None:
    """Writes ``content`` as JSON, with a newline at its end, as ``write_whole`` does."""
    write_whole(path, json.dumps(content, ensure_ascii=False, indent=indent) + "\n")


def _mode(path: Path) -> int | None:
    """Kind and permissions; None where there is nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _to_disk(path: Path) -> None:
    """Else a machine that stops could leave the new name with nothing behind it."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
