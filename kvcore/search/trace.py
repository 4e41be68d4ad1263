"""Traces: one JSON object per line, written as things happen, readable after any interruption.

The first line is the header, ``{"event": "trace", "schema": 1, "kvcore": ..., "settings": {...}}``;
every other line is an event of the search. docs/trace.md lists them. A reader ignores events and
fields it does not know; a change that would break such a reader raises ``SCHEMA``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

SCHEMA = 1


class TraceError(OSError):
    """A trace could not be written. The first ``events`` lines are kept."""

    def __init__(self, name: str, reason: str, events: int) -> None:
        super().__init__(f"trace {name}: {reason}; the first {events} lines are kept")
        self.events = events


class ByteFile(Protocol):
    """What a trace is written to. ``write`` may take only a part and says how much."""

    def write(self, data: bytes, /) -> int | None: ...
    def close(self) -> None: ...


def finite(value: Any) -> Any:
    """``value`` as JSON can hold it: NaN and infinities become None, at any depth. Copies."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


class TraceWriter:
    """Writes a trace. Every line is handed to the operating system before ``write`` returns.

    Args:
        target: a path (an existing file is overwritten) or a raw binary file, which is taken over.
        settings: the run's settings, JSON values; written into the header.
        version: kvcore's version, for the header.
    Raises:
        TraceError: on any failed write, from the constructor on; the file then ends after the last
            whole line where it can be truncated. Later writes raise again.
    """

    def __init__(
        self, target: str | Path | ByteFile, *, settings: Mapping[str, Any], version: str
    ) -> None:
        self.lines = 0
        self._bytes = 0
        self._file: ByteFile | None = None
        if isinstance(target, (str, Path)):
            self.name = str(target)
            try:
                # Unbuffered: a buffer would lose whole events when the process dies.
                self._file = open(target, "wb", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise TraceError(self.name, error.strerror or str(error), 0) from error
        else:
            self.name = str(getattr(target, "name", "file"))
            self._file = target
        self.write(
            {"event": "trace", "schema": SCHEMA, "kvcore": version, "settings": dict(settings)}
        )

    def write(self, event: Mapping[str, Any]) -> None:
        """Appends one event, which must have an ``event`` name."""
        if not isinstance(event.get("event"), str):
            raise ValueError(f"event: expected a mapping with a string 'event', got {event!r}")
        line = json.dumps(finite(event), ensure_ascii=False, separators=(",", ":"))
        # A lone surrogate has no UTF-8 form; JSON readers take the replacement character instead.
        data = line.encode("utf-8", errors="replace") + b"\n"
        if self._file is None:
            raise TraceError(self.name, "already closed", self.lines)
        try:
            rest = data
            while rest:
                taken = self._file.write(rest)
                if not taken:
                    raise OSError(errno.EAGAIN, "it takes no more data")
                rest = rest[taken:]
        except OSError as error:
            self._drop_partial_line()
            raise TraceError(self.name, error.strerror or str(error), self.lines) from error
        self.lines += 1
        self._bytes += len(data)

    def close(self) -> None:
        """Closes the file; does nothing the second time."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                reason = error.strerror or str(error)
                raise TraceError(self.name, reason, self.lines) from error

    def _drop_partial_line(self) -> None:
        truncate = getattr(self._file, "truncate", None)
        if truncate is not None:
            # A pipe or a device cannot be cut: readers skip an unfinished last line.
            with contextlib.suppress(OSError):
                truncate(self._bytes)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Trace:
    """A trace as read.

    Attributes:
        version: of the kvcore that wrote it.
        settings: of the run.
        events: in order, the header excluded.
        cut: True when the last line was incomplete (an interrupted write) and was left out.
    """

    version: str
    settings: dict[str, Any]
    events: list[dict[str, Any]]
    cut: bool


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected a JSON object ({error})") from None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError(f"{where}: expected an object with a string 'event', got {line[:60]!r}")
    return event


def read_trace(path: str | Path) -> Trace:
    """Reads a trace, whole or interrupted.

    Raises:
        ValueError: not a trace, of a newer schema, or damaged before its last line.
        OSError: the file cannot be read.
    """
    text = Path(path).read_bytes().decode("utf-8", errors="replace")
    *lines, rest = text.split("\n")
    if not lines:
        raise ValueError(f"{path}: expected a kvcore trace, got a file without a whole line")
    events = [_parse_line(line, f"{path}, line {i}") for i, line in enumerate(lines, 1)]
    header = events[0]
    if header["event"] != "trace":
        raise ValueError(f"{path}: expected a kvcore trace, got {lines[0][:60]!r}")
    if header.get("schema") != SCHEMA:
        raise ValueError(f"{path}: expected trace schema {SCHEMA}, got {header.get('schema')!r}")
    return Trace(
        version=str(header.get("kvcore", "")),
        settings=dict(header.get("settings", {})),
        events=events[1:],
        cut=rest != "",
    )
