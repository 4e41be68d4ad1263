"""A model that works elsewhere: an engine in a thread of its own, which takes its time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

VERBS = ("add", "fork", "extend", "adopt", "release", "tokens", "cache_len", "kv_bytes", "text")


class SlowPort:
    """Speaks for ``engine``. Its verbs answer at once, and its events come late: each step of the
    engine waits for ``before()`` first, which runs in the port's thread.

    Attributes:
        failure: raised by the next ``step`` instead of handing out events.
        waiting: the thread is in ``before``.
    """

    def __init__(self, engine: Any, before: Callable[[], None] = lambda: time.sleep(0.01)) -> None:
        self.engine = engine
        self.model, self.eviction, self.stats = engine.model, engine.eviction, engine.stats
        self.context_len, self.max_seqs = engine.context_len, engine.max_seqs
        self.detector = engine.detector
        self.failure: Exception | None = None
        self.waiting = False
        self.heard: list[bool] = []  # whether anybody listened, at every change
        self._before = before
        self._lock = threading.Lock()
        self._work = threading.Semaphore(0)
        self._events: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._stepping = False
        self._wake: Callable[[], None] | None = None
        for verb in VERBS:
            setattr(self, verb, self._guarded(verb))
        threading.Thread(target=self._run, daemon=True).start()

    def _guarded(self, verb: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._lock:
                result = getattr(self.engine, verb)(*args)
            if verb in ("add", "fork", "extend"):
                self._work.release()
            return result

        return call

    @property
    def has_work(self) -> bool:
        with self._lock:
            return self._stepping or not self._events.empty() or self.engine.has_work

    @property
    def ready(self) -> bool:
        return self.failure is not None or not self._events.empty()

    def listen(self, wake: Callable[[], None] | None) -> None:
        self._wake = wake
        self.heard.append(wake is not None)

    def fail(self, failure: Exception) -> None:
        self.failure = failure
        self._ring()

    def step(self) -> list[Any]:
        if self.failure is not None:
            raise self.failure
        events = []
        while not self._events.empty():
            events += self._events.get()
        return events

    def _ring(self) -> None:
        wake = self._wake
        if wake is not None:
            wake()

    def _run(self) -> None:
        while True:
            self._work.acquire()
            while True:
                with self._lock:
                    self._stepping = self.engine.has_work
                if not self._stepping:
                    break
                self.waiting = True
                self._before()
                self.waiting = False
                with self._lock:
                    events = self.engine.step()
                    if events:
                        self._events.put(events)
                    self._stepping = False
                if events:
                    self._ring()
