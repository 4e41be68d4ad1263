"""``--log-level``: what the package logs, on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any

import typer

LEVELS = ("debug", "info", "warning", "error")


class _ToStderr(logging.StreamHandler[Any]):
    """Shows records on what is standard error at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def show_logs(level: str | None) -> None:
    """Show records of ``level`` and above; None shows none. Raises typer.BadParameter."""
    if level is not None and level.lower() not in LEVELS:
        raise typer.BadParameter(f"expected one of {', '.join(LEVELS)}, got {level!r}")
    logger = logging.getLogger("kvcore")
    for handler in [h for h in logger.handlers if isinstance(h, _ToStderr)]:
        logger.removeHandler(handler)
    if level is not None:
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
