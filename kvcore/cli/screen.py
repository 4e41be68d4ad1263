"""The run on the terminal: committed steps as they come, and one live line per problem in flight.

Where stdout is not a terminal nothing is live and nothing is coloured.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvcore.eval.records import Record
from kvcore.search.results import (
    ProblemEnded,
    ProblemStarted,
    Solution,
    StepCommitted,
    TraceEvent,
    Warned,
)

COLOURS = {"base": "cyan", "helper": "yellow"}
_REFRESH_PER_SECOND = 8
_MAX_LIVE_LINES = 8
# Text of a model must not steer the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """``text`` with control characters other than tab and newline made visible."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


@dataclass
class _Progress:
    """A problem in flight."""

    name: str
    steps: int = 0
    context: int = 0
    slots: int = 0
    evicted: int = 0


class Screen:
    """Shows a search.

    Args:
        problems: how many.
        tokens: generated so far, by all models.
        record: of a problem that has ended.
    """

    def __init__(
        self,
        console: Console,
        problems: int,
        tokens: Callable[[], int],
        record: Callable[[Solution], Record],
    ) -> None:
        self._console = console
        self._problems = problems
        self._tokens = tokens
        self._record = record
        self._running: dict[int, _Progress] = {}
        self._ended = 0
        self._start = time.monotonic()
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console,
                get_renderable=self._render,
                refresh_per_second=_REFRESH_PER_SECOND,
                transient=True,
            )

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_event(self, event: TraceEvent) -> None:
        if isinstance(event, Warned):
            self.line(f"note: {event.message}", "magenta")
        elif isinstance(event, ProblemStarted):
            name = self._name(event.problem)
            self._running[event.problem] = _Progress(name, context=event.prompt_tokens)
            if self._many:
                self.line(f"{name}: {printable(event.question)}", "bold")
        elif isinstance(event, StepCommitted):
            self._on_step(event)
        elif isinstance(event, ProblemEnded):
            self._on_end(event.solution)

    def line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Named values; a framed table on a terminal, one per line elsewhere."""
        if not self._console.is_terminal:
            width = max(len(name) for name, _ in rows)
            for name, value in rows:
                self.line(f"{name:<{width}}  {value}")
            return
        table = Table(show_header=False)
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        self._console.print(table)

    @property
    def _many(self) -> bool:
        return self._problems > 1

    def _name(self, problem: int) -> str:
        return f"question {problem + 1}"

    def _on_step(self, event: StepCommitted) -> None:
        progress = self._running.get(event.problem)
        if progress is not None:
            progress.steps = event.step + 1
            progress.context = event.context
            progress.slots = event.base_slots
            progress.evicted = event.evictions
        score = "not scored" if event.score is None else f"score {event.score:.3f}"
        where = f"{self._name(event.problem)}, " if self._many else ""
        flag = f", {event.flag}" if event.flag else ""
        head = f"[{where}step {event.step + 1}, {event.source}, {score}{flag}]"
        body = printable(event.text).rstrip("\n")
        text = Text.assemble((head, "dim"), "\n", (body, COLOURS[event.source]))
        self._console.print(text, soft_wrap=True)

    def _on_end(self, solution: Solution) -> None:
        self._running.pop(solution.problem, None)
        self._ended += 1
        prefix = f"{self._name(solution.problem)}: " if self._many else ""
        if solution.error is not None:
            self.line(f"{prefix}failed: {printable(solution.error)}", "red")
            return
        record = self._record(solution)
        answer = record.answer
        shown = "no answer found" if answer is None else f"answer: {printable(answer)}"
        if record.correct is not None:
            gold = printable(str(record.gold))
            shown += " (right)" if record.correct else f" (wrong, expected {gold})"
        if record.finish != "eos":
            shown += f" (cut off by {record.finish})"
        self.line(f"{prefix}{shown}", "bold green" if answer is not None else "bold red")

    def _render(self) -> Group:
        seconds = max(time.monotonic() - self._start, 1e-9)
        tokens = self._tokens()
        total = f"{self._ended}/{self._problems} done, {tokens} tokens"
        self._spinner.update(text=f"{total}, {tokens / seconds:.1f} tokens/s, {seconds:.0f} s")
        lines = [Text(_progress_text(p), style="dim") for p in self._running.values()]
        hidden = len(lines) - _MAX_LIVE_LINES
        if hidden > 0:
            lines = [*lines[:_MAX_LIVE_LINES], Text(f"  and {hidden} more", style="dim")]
        return Group(self._spinner, *lines)


def _progress_text(p: _Progress) -> str:
    text = f"  {p.name}: generating step {p.steps + 1}, context {p.context} tokens"
    if p.slots:
        text += f", cache {p.slots} entries"
    if p.evicted:
        text += f", {p.evicted} evicted"
    return text
