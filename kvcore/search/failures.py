"""What went wrong with one problem, in words. Never raises, whatever the exception is."""

from __future__ import annotations

import contextlib


class ProblemFailed(Exception):
    """One problem cannot go on; its text is the solution's ``error``."""


def told(error: BaseException) -> str:
    """The exception's type and text; the type alone if it has no text or cannot say it."""
    name = type(error).__name__
    with contextlib.suppress(Exception):
        text = str(error)
        return f"{name}: {text}" if text else name
    return name


def shown(value: object) -> str:
    """``repr(value)``; the type's name if it has none."""
    with contextlib.suppress(Exception):
        return repr(value)
    return f"an object of type {type(value).__name__}"


def lone_surrogate(text: str) -> int | None:
    """Place of the first character without a UTF-8 form (half of a surrogate pair), or None."""
    return next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
