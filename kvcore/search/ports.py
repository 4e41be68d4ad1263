"""Engines as a search sees them: who waits for which sequence, and what is still allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcore.engine.events import FeedOutput, GenerateSpec, StepEvent

if TYPE_CHECKING:
    from kvcore.engine import Engine

Handler = Callable[[StepEvent], None]


class EnginePort:
    """One engine with a handler per sequence. Events of other people's sequences are dropped.

    Everything allocated through a port can be given back at once, whatever state it is in.
    Not thread-safe.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._handlers: dict[int, Handler] = {}  # in order of creation: parents before children

    @property
    def live(self) -> int:
        """Sequences allocated through this port and not released."""
        return len(self._handlers)

    def add(self, tokens: Sequence[int], handler: Handler) -> int:
        seq = self.engine.add(tokens)
        self._handlers[seq] = handler
        return seq

    def fork(
        self, seq: int, specs: Sequence[GenerateSpec | None], handlers: Sequence[Handler]
    ) -> list[int]:
        children = self.engine.fork(seq, specs)
        self._handlers.update(zip(children, handlers, strict=True))
        return children

    def extend(self, seq: int, tokens: Sequence[int], output: FeedOutput = FeedOutput.NONE) -> None:
        self.engine.extend(seq, tokens, output)

    def adopt(self, parent: int, child: int) -> None:
        """``parent`` goes on as ``child``, under its own handle and handler."""
        self.engine.adopt(parent, child)
        del self._handlers[child]

    def release(self, seq: int) -> None:
        """Gives ``seq`` back; does nothing if it already was. ``close`` repeats what raised."""
        if seq in self._handlers:
            self.engine.release(seq)
            del self._handlers[seq]

    def step(self) -> bool:
        """One step of the engine, its events handed out. Returns False if it had no work."""
        if not self.engine.has_work:
            return False
        events = self.engine.step()
        # A handler may release sequences whose events come later in the list, and a freed handle
        # may be given out again: an event counts only for the handler that was there before.
        pairs = [(self._handlers.get(event.seq), event) for event in events]
        for handler, event in pairs:
            if handler is not None and self._handlers.get(event.seq) is handler:
                handler(event)
        return True

    def close(self) -> None:
        """Releases everything, children before parents. Raises the first failure after the last."""
        failure: Exception | None = None
        for seq in reversed(list(self._handlers)):
            try:
                self.release(seq)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure


class Ports:
    """The ports of one search: one per engine, however many roles the engine plays."""

    def __init__(self) -> None:
        self._ports: dict[int, EnginePort] = {}

    def get(self, engine: Engine) -> EnginePort:
        return self._ports.setdefault(id(engine), EnginePort(engine))

    def step(self) -> bool:
        """One step of every engine that has work. Returns False if none had any."""
        worked = False
        for port in list(self._ports.values()):
            worked = port.step() or worked
        return worked

    def close(self) -> None:
        failure: Exception | None = None
        for port in self._ports.values():
            try:
                port.close()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
