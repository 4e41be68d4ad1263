"""Runs the demo: ways to solve the same problems, one table, one solved problem."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvcore import __version__
from kvcore.cli.errors import Failure, UsageError, bad_value_is
from kvcore.cli.output import make_console, quiet_transformers
from kvcore.cli.screen import COLOURS
from kvcore.demo.rows import METHODS, Row, Settings, load_models, recovered, run_row, title
from kvcore.demo.settings import eviction_config
from kvcore.demo.task import STEP_END, Problem
from kvcore.eval.records import Record
from kvcore.files import write_json
from kvcore.native import set_threads
from kvcore.search import ProblemEnded, TraceEvent
from kvcore.search.failures import told
from kvcore.search.trace import TraceWriter


def fresh_trace() -> Path:
    """A new empty file of this user alone, in the folder of temporary files."""
    handle, name = tempfile.mkstemp(prefix="kvcore-demo-", suffix=".jsonl")
    os.close(handle)
    return Path(name)


def run_demo(
    settings: Settings, *, trace: Path | None, json_file: Path | None, threads: int | None
) -> None:
    """Raises Failure if the embedded models are damaged, OSError if a file cannot be written."""
    if threads is not None:
        with bad_value_is(UsageError):
            set_threads(threads)
    quiet_transformers()
    console, output = make_console()
    with bad_value_is(Failure):
        models = load_models()
    chosen = settings.draw()
    eviction = eviction_config(settings.policy, settings.budget)
    console.print(
        f"{settings.problems} held-out problems, {settings.n} candidates per step and model. The "
        f"base model's cache\nis evicted by {settings.policy}: every layer and head keeps "
        f"{settings.budget} + {eviction.protect} entries.",
        markup=False,
    )
    path = trace or fresh_trace()
    rows: list[Row] = []
    records: dict[str, list[Record]] = {}
    header = {"demo": asdict(settings)}
    with (
        TraceWriter(path, settings=header, version=__version__) as writer,
        _Bars(console, settings.problems) as bars,
    ):
        for method in METHODS:
            bars.begin(title(method, settings.n))

            def on_event(event: TraceEvent, method: str = method) -> None:
                if method == "rescue":
                    writer.write(event.to_json())
                if isinstance(event, ProblemEnded):
                    bars.advance()

            row, records[method] = run_row(method, models, settings, chosen, on_event=on_event)
            rows.append(row)
            bars.end(row)
    if json_file is not None:
        result = {
            "rows": [row.to_json() for row in rows],
            "recovered": recovered(rows),
            "recovered_half": recovered(rows, "rescue_half"),
            "settings": asdict(settings),
        }
        write_json(json_file, result)
    _print_table(console, rows)
    _print_example(console, chosen, rows, records)
    console.print(f"trace of KV-Rescue: {path}", markup=False, soft_wrap=True)
    if output.failure is not None:
        raise Failure(f"standard output: {told(output.failure)}")


class _Bars:
    """Progress of one row at a time; a line per finished row where stdout is no terminal."""

    def __init__(self, console: Console, problems: int) -> None:
        self._console = console
        self._problems = problems
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[result]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, name: str) -> None:
        self._task = self._progress.add_task(name, total=self._problems, result="")

    def advance(self) -> None:
        self._progress.advance(self._task)

    def end(self, row: Row) -> None:
        solved = f"{sum(row.right)} right"
        self._progress.update(self._task, result=solved)
        if not self._console.is_terminal:
            self._console.print(f"{row.title}: {solved}, {row.seconds:.1f} s")


def _print_table(console: Console, rows: Sequence[Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, name in enumerate(
        ("", "right", "base\ntokens", "helper\ntokens", "steps", "helper\nsteps", "early\nexits",
         "ran\naway", "KV\nKiB", "time")
    ):  # fmt: skip
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.title,
            f"{row.accuracy:.0%}",
            f"{row.base_tokens / 1000:.1f}k",
            f"{row.helper_tokens / 1000:.1f}k",
            f"{row.mean_steps:.1f}",
            f"{row.helper_steps / max(1, row.steps):.0%}",
            f"{row.aborted:,}",
            f"{row.unended:,}",
            f"{row.kv_bytes / 1024:.0f}",
            f"{row.seconds:.0f} s",
            style="bold" if row.n_helper else "",
        )
    console.print(table)
    helped = [row for row in rows if row.n_helper]
    for row in helped:
        share = recovered(rows, row.method)
        if share is not None:
            console.print(f"{row.title} recovered {share:.0%} of the accuracy that eviction lost.")
    ended = " and ".join(f"{row.early_exits:.1%}" for row in helped)
    console.print(f"Early exit ends {ended} of their base candidates.")
    if recovered(rows) is None:
        console.print("Eviction lost nothing here: there is nothing to recover.")


def _print_example(
    console: Console,
    chosen: Sequence[Problem],
    rows: Sequence[Row],
    records: dict[str, list[Record]],
) -> None:
    """One problem that KV-Rescue solved, if possible one that the evicted model did not."""
    right = {row.method: row.right for row in rows}
    solved = [i for i, ok in enumerate(right["rescue"]) if ok]
    if not solved:
        return
    i = min(solved, key=lambda i: (right["evicted"][i], len(records["rescue"][i].steps)))
    problem, solution = chosen[i], records["rescue"][i]
    console.print()
    console.print(Text(f"Problem {i + 1}: ", style="bold"), Text(problem.question, style="dim"))
    steps = Text("KV-Rescue: ")
    for step in solution.steps:
        steps.append(step.text.strip(), style=COLOURS[step.source])
        steps.append(" | " if step.text.endswith(STEP_END) else "")
    steps.append(f" (right; {', '.join(_legend(solution))})", style="dim")
    console.print(steps)
    if not right["evicted"][i]:
        console.print(_first_mistake(problem, records["evicted"][i]))


def _legend(solution: Record) -> list[str]:
    sources = [step.source for step in solution.steps]
    return [f"{sources.count(s)} steps by the {s} in {COLOURS[s]}" for s in ("base", "helper")]


def _first_mistake(problem: Problem, solution: Record) -> Text:
    texts = [step.text for step in solution.steps]
    for i, text in enumerate(texts):
        expected = problem.expected(texts[:i]).strip()
        if text.strip() != expected:
            return Text.assemble(
                "Evicted alone went wrong at step ",
                f"{i + 1}: ",
                (text.strip(), "red"),
                f" instead of {expected}; its steps: {len(texts)}.",
            )
    return Text(f"Evicted alone did not end: {len(texts)} steps.")
