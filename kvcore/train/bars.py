"""Progress of a training on the terminal."""

from __future__ import annotations

from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvcore.train.loop import Report


class Bars:
    """One progress bar per model; plain lines where stdout is no terminal."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns)
        self._tasks: dict[str, Any] = {}
        self._plain = not self._progress.console.is_terminal
        self._told: dict[str, int] = {}

    def __enter__(self) -> Bars:
        if not self._plain:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def of(self, name: str) -> Report:
        def report(done: int, total: int, loss: float) -> None:
            shown = "" if loss != loss else f"loss {loss:.3f}"
            if self._plain:
                tenth = 10 * done // total
                if tenth != self._told.get(name):
                    self._told[name] = tenth
                    print(f"{name}: {done} of {total} {shown}", flush=True)
                return
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=total, loss="")
            self._progress.update(self._tasks[name], completed=done, total=total, loss=shown)

        return report
