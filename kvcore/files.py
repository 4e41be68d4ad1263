"""Files that appear whole or not at all, and files that grow by whole lines."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol


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


class ByteFile(Protocol):
    """What lines go to. ``write`` may take only a part and says how much."""

    def write(self, data: bytes, /) -> int | None: ...
    def close(self) -> None: ...


class LineFile:
    """Appends whole lines to ``file``, a raw binary file at its end, which is taken over.

    Args:
        size: bytes that the file holds already.
    """

    def __init__(self, file: ByteFile, size: int = 0) -> None:
        self._file: ByteFile | None = file
        self._bytes = size

    def append(self, line: str) -> None:
        """Hands ``line`` and a newline to the operating system before it returns.

        A lone surrogate, which has no UTF-8 form, becomes a question mark.
        Raises:
            OSError: a failed write; the file then ends after its last whole line if it can be cut.
                A pipe or a device cannot: readers skip an unfinished last line.
        """
        data = line.encode("utf-8", errors="replace") + b"\n"
        if self._file is None:
            raise OSError(errno.EBADF, "already closed")
        try:
            rest = data
            while rest:
                taken = self._file.write(rest)
                if not taken:
                    raise OSError(errno.EAGAIN, "it takes no more data")
                rest = rest[taken:]
        except BaseException:
            truncate = getattr(self._file, "truncate", None)
            if truncate is not None:
                with contextlib.suppress(OSError):
                    truncate(self._bytes)
            raise
        self._bytes += len(data)

    def close(self) -> None:
        """Closes the file; does nothing the second time. Raises OSError."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def finite(value: Any) -> Any:
    """``value`` as JSON can hold it: NaN and infinities become None, at any depth. Copies."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


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
