"""Traces: one JSON object per line, written as things happen, readable after any interruption.

The first line is the header, ``{"event": "trace", "schema": 1, "kvcore": ..., "settings": {...}}``;
every other line is an event of the search. docs/trace.md lists them. A reader ignores events and
fields it does not know; a change that would break such a reader raises ``SCHEMA``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.files import ByteFile, LineFile, finite

SCHEMA = 1


class TraceError(OSError):
    """A trace could not be written. The first ``events`` lines are kept."""

    def __init__(self, name: str, reason: str, events: int) -> None:
        super().__init__(f"trace {name}: {reason}; the first {events} lines are kept")
        self.events = events


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
        if isinstance(target, (str, Path)):
            self.name = str(target)
            try:
                # Unbuffered: a buffer would lose whole events when the process dies.
                self._file = LineFile(open(target, "wb", buffering=0))  # noqa: SIM115
            except OSError as error:
                raise TraceError(self.name, error.strerror or str(error), 0) from error
        else:
            self.name = str(getattr(target, "name", "file"))
            self._file = LineFile(target)
        self.write(
            {"event": "trace", "schema": SCHEMA, "kvcore": version, "settings": dict(settings)}
        )

    def write(self, event: Mapping[str, Any]) -> None:
        """Appends one event, which must have an ``event`` name."""
        if not isinstance(event.get("event"), str):
            raise ValueError(f"event: expected a mapping with a string 'event', got {event!r}")
        line = json.dumps(finite(event), ensure_ascii=False, separators=(",", ":"))
        self._told(lambda: self._file.append(line))
        self.lines += 1

    def close(self) -> None:
        """Closes the file; does nothing the second time."""
        self._told(self._file.close)

    def _told(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise TraceError(self.name, error.strerror or str(error), self.lines) from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
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
