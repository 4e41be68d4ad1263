"""Threads that nobody has to wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_Task = Callable[[], None]


class Workers:
    """Runs tasks in up to ``limit`` threads, in the order given.

    The threads are daemons: neither ``close`` nor the end of the process waits for a task that does
    not return. Started when there is something to do.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def run(self, task: _Task) -> None:
        """Queues a task, which must not raise. Raises RuntimeError if no thread can be started."""
        if len(self._threads) < self._limit:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:
                if not self._threads:
                    raise
        self._tasks.put(task)

    def close(self) -> None:
        """Drops the tasks that have not begun; does not wait for those that have."""
        self._closed.set()
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None or self._closed.is_set():
                return
            task()
            del task  # what it holds may go while the thread waits
