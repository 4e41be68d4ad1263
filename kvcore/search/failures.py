"""What went wrong with one problem, in words; the words never raise, whatever the exception is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class ProblemFailed(Exception):
    """One problem cannot go on; its text is the solution's ``error``."""


class SearchFailed(BaseException):
    """The receiver of events raised ``error``: no problem's failure, so nothing catches it but the
    search itself, which ends.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class ScorerError(Exception):
    """A scorer failed; says which and why. Ends the problem it was asked about."""

    def __init__(self, scorer: str, reason: str) -> None:
        super().__init__(f"scorer {scorer!r}: {reason}")


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


@contextlib.contextmanager
def named(who: str) -> Iterator[None]:
    """An exception inside becomes a ProblemFailed that names ``who``."""
    try:
        yield
    except Exception as error:
        # Errors of this library name argument, expected and got: their type adds nothing.
        reason = str(error) if type(error) in (ValueError, ScorerError) else told(error)
        reason = reason.removeprefix(f"{who}: ") or type(error).__name__
        raise ProblemFailed(f"{who}: {reason}") from error
