"""Runs a job: load, search, show, write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from rich.console import Console

from kvcore import __version__
from kvcore.cli.errors import Failure, UsageError, bad_value_is, in_flags
from kvcore.cli.output import make_console, one_interrupt, quiet_transformers
from kvcore.cli.report import not_started, summary_rows, write_records
from kvcore.cli.screen import Screen
from kvcore.cli.settings import Job
from kvcore.eval.records import Record
from kvcore.eval.solving import Engines, Models, Solving, make_engines
from kvcore.native import set_threads
from kvcore.search import DEFAULT_SYSTEM_PROMPT, TraceEvent
from kvcore.search.failures import told
from kvcore.search.prompt import default_unless
from kvcore.search.trace import TraceError, TraceWriter


def run_job(job: Job) -> None:
    """Solves the job's questions.

    Raises:
        Failure: a model is refused, or some question failed.
        OSError: the trace or the result cannot be written; what was written is kept.
        KeyboardInterrupt: interrupted.
    After an interruption or a failed trace, what there was is shown and written before it raises.
    """
    console, output = make_console()
    with contextlib.ExitStack() as stack:
        trace = None
        if job.trace is not None:
            try:
                writer = TraceWriter(job.trace, settings=job.as_json(), version=__version__)
            except TraceError as error:
                if job.json is not None:
                    _write(job, [not_started(job.problems[0], str(error))])
                raise
            trace = stack.enter_context(writer)
        _search(job, _load(job, console), console, trace)
    if output.failure is not None:
        raise Failure(f"standard output: {told(output.failure)}")


def _load(job: Job, console: Console) -> Engines:
    """Loads what the job names, so that each model is announced while it is waited for."""
    if job.threads is not None:
        with bad_value_is(UsageError):
            set_threads(job.threads)
    quiet_transformers()
    models, loaded = Models(), []
    with bad_value_is(Failure):
        for role, source in (("base", job.base), ("helper", job.helper)):
            if source is not None:
                with _loading(console, f"{role} {source}"):
                    loaded.append(models.language(source, job.dtype, role))
        if job.scorer is not None and job.scorer.path is not None:
            with _loading(console, f"scorer {job.scorer.path}"):
                models.reward(job.scorer.path, job.dtype, "scorer")
        engines = make_engines(job, models)
    context = loaded[0].context_len
    if job.search.max_tokens > context:
        console.print(f"note: the base model's context ends at {context} tokens", markup=False)
    # Others that go without a template a search tells of.
    tokenizers = [model.tokenizer for model in loaded]
    if job.system_prompt is None and default_unless(DEFAULT_SYSTEM_PROMPT, tokenizers) is None:
        console.print(
            "note: no chat template: models are given the question alone, as plain text",
            markup=False,
        )
    return engines


@contextlib.contextmanager
def _loading(console: Console, what: str) -> Iterator[None]:
    if not console.is_terminal:
        yield
        return
    with console.status(f"loading {what}"):
        yield


def _search(job: Job, engines: Engines, console: Console, trace: TraceWriter | None) -> None:
    def on_event(event: TraceEvent) -> None:
        if trace is not None:
            trace.write(event.to_json())
        screen.on_event(event)

    with bad_value_is(UsageError):
        solving = Solving(job, engines, on_event=on_event)
    screen = Screen(
        console,
        len(job.problems),
        lambda: engines.generated_tokens,
        solving.record,
    )
    begin = time.monotonic()
    stopped: BaseException | None = None
    with one_interrupt():
        try:
            with screen:
                for _ in solving.records():
                    pass
        except BaseException as error:
            stopped = error
        seconds = time.monotonic() - begin
        _finish(job, solving.ended(), seconds, screen, stopped)


def _finish(
    job: Job,
    records: Sequence[Record],
    seconds: float,
    screen: Screen,
    stopped: BaseException | None,
) -> None:
    """Writes and shows what a run came to, then raises what it failed with, if it did."""
    if not records and len(job.problems) == 1:
        reason = None if isinstance(stopped, (KeyboardInterrupt, type(None))) else told(stopped)
        records = [not_started(job.problems[0], reason)]
    unwritten = None if job.json is None else _write(job, records)
    screen.table(summary_rows(records, seconds))
    done = sum(record.finish not in ("interrupted", "error") for record in records)
    if isinstance(stopped, KeyboardInterrupt):
        ended = f"interrupted: {done} of {len(job.problems)} questions solved"
        raise KeyboardInterrupt(ended if unwritten is None else f"{ended}; {unwritten}")
    if unwritten is not None:
        raise unwritten from stopped
    if stopped is not None:
        raise stopped
    failed = [record for record in records if record.error is not None]
    if failed:
        reason = in_flags(str(failed[0].error))
        if len(job.problems) > 1:
            counts = f"{len(failed)} of {len(job.problems)} questions failed"
            place = records.index(failed[0]) + 1
            reason = f"{counts}; question {place}: {reason}"
        raise Failure(reason)


def _write(job: Job, records: Sequence[Record]) -> Failure | None:
    """Writes the result file; returns the failure if it cannot be written."""
    assert job.json is not None
    try:
        write_records(job.json, records, several=len(job.problems) > 1, settings=job.as_json())
    except OSError as error:
        return Failure(f"--json: cannot write {job.json}: {error.strerror or error}")
    return None
