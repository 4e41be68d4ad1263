"""Failures as a user of the command line sees them: one line, in the words of the flags."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping

import typer

USAGE_EXIT = 2
FAILURE_EXIT = 1
INTERRUPTED_EXIT = 130  # 128 + SIGINT, the convention of shells


class UsageError(Exception):
    """The command line is wrong: exit code 2."""


class Failure(Exception):
    """The command line is right, the run failed: exit code 1."""


# Fields of settings and arguments of the library -> flags.
FLAGS: Mapping[str, str] = {
    "base": "--base",
    "helper": "--helper",
    "scorer": "--scorer",
    "policy": "--evict",
    "budget": "--budget",
    "protect": "--protect",
    "n": "-n",
    "n_helper": "--n-helper",
    "n_total": "--n-total",
    "separators": "--separator",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "max_new_tokens": "--max-step-tokens",
    "max_steps": "--max-steps",
    "max_tokens": "--max-tokens",
    "context_len": "--max-tokens",
    "entropy_threshold": "--entropy-threshold",
    "entropy_window": "--entropy-window",
    "entropy_guard": "--entropy-guard",
    "gzip_threshold": "--gzip-threshold",
    "seed": "--seed",
    "threads": "--threads",
    "dtype": "--dtype",
    "kv_bytes": "--kv-gb",
    "kv_blocks": "--kv-gb",
    "max_seqs": "--max-seqs",
    "system_prompt": "--system-prompt",
    "template_args": "--template-arg",
    "problems": "--problems",
    "questions": "--question",
    "question": "--question",
}

_FIELD = re.compile(r"([a-z_]+)(?:\[\d+\])?(?=: )")


def in_flags(message: str, **others: str) -> str:
    """``message`` with the setting it begins with ("budget: expected ...") named by its flag.

    ``others``: flags of a command that has another one than ``FLAGS`` for a setting.
    """
    match = _FIELD.match(message)
    flag = None if match is None else {**FLAGS, **others}.get(match.group(1))
    if match is None or flag is None:
        return message
    return flag + message[match.end() :]


@contextlib.contextmanager
def bad_value_is(kind: type[UsageError] | type[Failure], **flags: str) -> Iterator[None]:
    """Turns a ``ValueError`` inside into ``kind``, its setting named as ``in_flags`` does."""
    try:
        yield
    except ValueError as error:
        raise kind(in_flags(str(error), **flags)) from error


def run_command(body: Callable[[], None], *, debug: bool) -> None:
    """Runs a command; whatever goes wrong becomes one line on stderr and an exit code.

    With ``debug`` the traceback is printed as well.
    """
    try:
        body()
    except typer.Exit:
        raise
    except UsageError as error:
        _leave(f"error: {error}", USAGE_EXIT, debug)
    except KeyboardInterrupt as error:
        _leave(str(error) or "interrupted", INTERRUPTED_EXIT, debug)
    except (Failure, OSError) as error:
        _leave(f"error: {error}", FAILURE_EXIT, debug)
    except Exception as error:
        hint = "" if debug else " (--debug shows where)"
        _leave(f"error: {type(error).__name__}: {error}{hint}", FAILURE_EXIT, debug)


def _leave(message: str, code: int, debug: bool) -> None:
    if debug:
        message = f"{traceback.format_exc()}\n{message}"
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        typer.echo(message, err=True)
    raise typer.Exit(code)
