"""Standard output that cannot stop a run."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from rich.console import Console


class SafeOutput:
    """A text stream over ``stream`` (None: there is none) that never raises.

    Characters that its encoding lacks are replaced. After the first failed write nothing is written
    any more; ``failure`` is then that error, or None if the reader just went away.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.failure: Exception | None = None
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                told = text.encode(self.encoding, errors="replace").decode(self.encoding)
                self._stream.write(told)
            except Exception as error:
                self._drop(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except Exception as error:
                self._drop(error)

    def isatty(self) -> bool:
        with contextlib.suppress(Exception):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError(errno.EBADF, "no standard output")
        return self._stream.fileno()

    def _drop(self, error: Exception) -> None:
        stream, self._stream = self._stream, None
        gone = isinstance(error, BrokenPipeError) or getattr(error, "errno", 0) == errno.EPIPE
        self.failure = None if gone else error
        # What is still buffered would be written, and fail, when the process ends.
        with contextlib.suppress(Exception):
            assert stream is not None
            target = stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, target)
            os.close(null)


def make_console() -> tuple[Console, SafeOutput]:
    """A console on standard output, and the stream under it."""
    output = SafeOutput(sys.stdout)
    return Console(file=output, highlight=False), output  # type: ignore[arg-type]


def quiet_transformers() -> None:
    """No warnings and no progress bars of transformers; errors reach the user another way."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """The first Ctrl-C inside raises KeyboardInterrupt; later ones are ignored until the end.

    What there is can so be shown and written. Does nothing outside the main thread, or where
    somebody else handles SIGINT.
    """
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is not signal.default_int_handler:
        yield
        return

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
