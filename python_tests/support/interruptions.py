"""Raises an exception at a chosen line of kvcore, as Ctrl-C or a lack of memory would."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvcore

PACKAGE = str(Path(kvcore.__file__).parent)
PLACES = ("engine", "policies", "models/attention.py", "cache.py", "ops.py")


class Interruption:
    """Raises ``error`` before the ``countdown``-th line that runs in the places above.

    Attributes:
        where: the line, once it was raised.
        lines: that were seen.
    """

    def __init__(self, error: BaseException, countdown: int) -> None:
        self._error = error
        self._left = countdown
        self._prefixes = tuple(f"{PACKAGE}/{place}" for place in PLACES)
        self.where: str | None = None
        self.lines = 0

    def __enter__(self) -> Interruption:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if self._left > 0 and frame.f_code.co_filename.startswith(self._prefixes):
            return self._on_line
        return None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if event == "line" and self._left > 0:
            self.lines += 1
            self._left -= 1
            if self._left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise self._error
        return self._on_line
