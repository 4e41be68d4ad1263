"""Models as a search sees them: their verbs, who waits for which sequence, what is allocated.

A search steps what is ready. When nothing is, it waits on one bell, which ports and scorers that
work elsewhere ring as soon as they have something for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from kvcore.config import DetectorConfig, EvictionConfig
from kvcore.engine.events import EngineStats, FeedOutput, GenerateSpec, StepEvent

Handler = Callable[[StepEvent], None]


class ModelFacts(Protocol):
    """What a search reads of a model, as in ``LoadedModel``."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def vocab(self) -> int: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def has_head(self) -> bool: ...


class ModelPort(Protocol):
    """A model that a search works with: an ``Engine``, or what speaks for a model elsewhere.

    ``kvcore.engine.Engine`` has the contract of every member. No call waits for another thread or
    machine: verbs name sequences at once, ``step`` hands out events as far as there are any, and
    ``has_work`` holds until the last event of what was asked has been handed out. A port whose
    model works on its own is a ``WakingPort`` as well.
    """

    detector: DetectorConfig | None

    @property
    def model(self) -> ModelFacts: ...
    @property
    def eviction(self) -> EvictionConfig: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def context_len(self) -> int: ...
    @property
    def max_seqs(self) -> int: ...
    @property
    def has_work(self) -> bool: ...

    def add(self, tokens: Sequence[int], /) -> int: ...
    def fork(self, seq: int, specs: Sequence[GenerateSpec | None], /) -> list[int]: ...
    def extend(self, seq: int, tokens: Sequence[int], output: FeedOutput = ..., /) -> None: ...
    def adopt(self, parent: int, child: int, /) -> None: ...
    def release(self, seq: int, /) -> None: ...
    def step(self) -> list[StepEvent]: ...
    def tokens(self, seq: int, /) -> list[int]: ...
    def cache_len(self, seq: int, /) -> int: ...
    def kv_bytes(self, seq: int, /) -> int: ...
    def text(self, tokens: Sequence[int], /) -> bytes: ...


@runtime_checkable
class WakingPort(Protocol):
    """What a port has besides when its model works in a thread, process or machine of its own."""

    @property
    def ready(self) -> bool:
        """``step`` has something to hand out now."""
        ...

    def listen(self, wake: Callable[[], None] | None) -> None:
        """From now on ``wake`` is called, from any thread, whenever ``ready`` becomes true; None
        ends that.
        """
        ...


class Source(Protocol):
    """Something that a search waits for. Everything but ``wake`` happens in the search's thread."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> bool:
        """Hands out what there is; never waits. Returns False if there was nothing to do."""
        ...

    def close(self) -> None: ...


class Lease:
    """What one search has on one port: its sequences, with a handler each.

    Events of other people's sequences are dropped. Everything allocated can be given back at once,
    whatever state it is in.
    """

    def __init__(self, port: ModelPort, wake: Callable[[], None]) -> None:
        self.port = port
        self._waking = port if isinstance(port, WakingPort) else None
        self._wake = wake
        self._handlers: dict[int, Handler] = {}  # in order of creation: parents before children

    @property
    def has_work(self) -> bool:
        return self.port.has_work

    def add(self, tokens: Sequence[int], handler: Handler) -> int:
        if self._waking is not None:
            self._waking.listen(self._wake)
        seq = self.port.add(tokens)
        self._handlers[seq] = handler
        return seq

    def fork(
        self, seq: int, specs: Sequence[GenerateSpec | None], handlers: Sequence[Handler]
    ) -> list[int]:
        children = self.port.fork(seq, specs)
        self._handlers.update(zip(children, handlers, strict=True))
        return children

    def extend(self, seq: int, tokens: Sequence[int], output: FeedOutput = FeedOutput.NONE) -> None:
        self.port.extend(seq, tokens, output)

    def adopt(self, parent: int, child: int) -> None:
        """``parent`` goes on as ``child``, under its own handle and handler."""
        self.port.adopt(parent, child)
        del self._handlers[child]

    def release(self, seq: int) -> None:
        """Gives ``seq`` back; does nothing if it already was. ``close`` repeats what raised."""
        if seq in self._handlers:
            self.port.release(seq)
            del self._handlers[seq]

    def step(self) -> bool:
        ready = self.port.has_work if self._waking is None else self._waking.ready
        if not ready:
            return False
        events = self.port.step()
        # A handler may release sequences whose events come later in the list, and a freed handle
        # may be given out again: an event counts only for the handler that was there before.
        pairs = [(self._handlers.get(event.seq), event) for event in events]
        for handler, event in pairs:
            if handler is not None and self._handlers.get(event.seq) is handler:
                handler(event)
        return True

    def close(self) -> None:
        """Releases everything, children before parents. Raises the first failure after the last."""
        _all_of([partial(self.release, seq) for seq in reversed(self._handlers)])
        if self._waking is not None:
            self._waking.listen(None)


class Ports:
    """All that one search waits for: a lease per port, however many roles it plays, and scorers
    that work in other threads.
    """

    def __init__(self) -> None:
        self._bell = threading.Event()
        self._leases: dict[int, Lease] = {}
        self._sources: list[Source] = []

    def get(self, port: ModelPort) -> Lease:
        if id(port) not in self._leases:
            self._leases[id(port)] = Lease(port, self.wake)
            self.watch(self._leases[id(port)])
        return self._leases[id(port)]

    def watch(self, source: Source) -> None:
        """Steps ``source`` with the others. It rings (``wake``) when something has come."""
        self._sources.append(source)

    def wake(self) -> None:
        """There is something to step. May be called from any thread."""
        self._bell.set()

    def advance(self) -> bool:
        """Steps everything once; waits if nothing was ready and something is still to come.

        Returns False when nothing is: no source has work.
        """
        self._bell.clear()  # before looking: what comes after the look rings again
        worked = [source.step() for source in self._sources]
        if any(worked):
            return True
        if not any(source.has_work for source in self._sources):
            return False
        self._bell.wait()
        return True

    def close(self) -> None:
        """Closes every source, the last one first. Raises the first failure after the last."""
        _all_of([source.close for source in reversed(self._sources)])


def _all_of(acts: Sequence[Callable[[], None]]) -> None:
    """Does everything, then raises the first failure."""
    failures: list[Exception] = []
    for act in acts:
        try:
            act()
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
