"""Runs a job: load, search, show, write."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from rich.console import Console

from kvcore import __version__
from kvcore.cli.errors import Failure, UsageError, bad_value_is, in_flags
from kvcore.cli.output import make_console, one_interrupt
from kvcore.cli.report import Outcome, judged, not_started, summary_rows, write_outcomes
from kvcore.cli.screen import Screen
from kvcore.cli.settings import Job
from kvcore.config import EngineConfig
from kvcore.engine import Engine
from kvcore.models import LoadedModel, load_model, load_prm
from kvcore.native import set_threads
from kvcore.search import DEFAULT_SYSTEM_PROMPT, Search, Solution, TraceEvent
from kvcore.search.failures import told
from kvcore.search.prompt import default_unless
from kvcore.search.scorers import (
    EngineScorer,
    LoglikScorer,
    PrmScorer,
    RandomScorer,
    Scorer,
)
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
                    _write(job, [not_started(job.problems, str(error))])
                raise
            trace = stack.enter_context(writer)
        _search(job, _load(job, console), console, trace)
    if output.failure is not None:
        raise Failure(f"standard output: {told(output.failure)}")


@dataclass(frozen=True)
class _Models:
    base: Engine
    helper: Engine | None
    scorer: Scorer | EngineScorer


def _load(job: Job, console: Console) -> _Models:
    if job.threads is not None:
        with bad_value_is(UsageError):
            set_threads(job.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with bad_value_is(Failure):
        with _loading(console, f"base {job.base}"):
            model = load_model(job.base, dtype=job.dtype, argument="base")
            base = Engine(
                model,
                _engine_config(job, model),
                eviction=job.eviction,
                detector=job.search.detector,
            )
        if job.search.max_tokens > model.context_len:
            console.print(
                f"note: the base model's context ends at {model.context_len} tokens", markup=False
            )
        helper = None
        if job.helper is not None:
            with _loading(console, f"helper {job.helper}"):
                small = load_model(job.helper, dtype=job.dtype, argument="helper")
                helper = Engine(small, _engine_config(job, small))
        _tell_plain_prompts(job, [base] if helper is None else [base, helper], console)
        return _Models(base, helper, _scorer(job, base, helper, console))


def _tell_plain_prompts(job: Job, engines: Sequence[Engine], console: Console) -> None:
    """Says that the system prompt which nobody asked for is left out. Others a search tells."""
    tokenizers = [engine.model.tokenizer for engine in engines]
    if job.system_prompt is None and default_unless(DEFAULT_SYSTEM_PROMPT, tokenizers) is None:
        console.print(
            "note: no chat template: models are given the question alone, as plain text",
            markup=False,
        )


def _scorer(
    job: Job, base: Engine, helper: Engine | None, console: Console
) -> Scorer | EngineScorer:
    if job.scorer.kind == "random":
        return RandomScorer(job.search.seed)
    if job.scorer.path is not None:
        with _loading(console, f"scorer {job.scorer.path}"):
            model = load_prm(job.scorer.path, dtype=job.dtype, argument="scorer")
            return PrmScorer(Engine(model, _engine_config(job, model)))
    prompt = DEFAULT_SYSTEM_PROMPT if job.system_prompt is None else job.system_prompt
    if helper is not None:
        return LoglikScorer(system_prompt=prompt)
    if not base.eviction.evicts:
        return LoglikScorer(base, system_prompt=prompt)
    # Likelihoods from an evicted cache would judge by what was forgotten.
    judge = Engine(base.model, _engine_config(job, base.model))
    return LoglikScorer(judge, system_prompt=prompt)


def _engine_config(job: Job, model: LoadedModel) -> EngineConfig:
    """The model's own context, up to what a solution can make anybody read.

    A solution has at most ``max_tokens`` base tokens. The same text may have more tokens elsewhere
    (another tokenizer, another template, a separator for each step), but hardly more than four
    times as many. Tables are sized by the context: a context of a million costs memory in each row.
    """
    most = 4 * (job.search.max_tokens + job.search.sampling.max_new_tokens) + 4096
    return replace(job.engine, context_len=min(most, model.context_len))


@contextlib.contextmanager
def _loading(console: Console, what: str) -> Iterator[None]:
    if not console.is_terminal:
        yield
        return
    with console.status(f"loading {what}"):
        yield


def _search(job: Job, models: _Models, console: Console, trace: TraceWriter | None) -> None:
    base, helper = models.base, models.helper
    engines = [base] if helper is None else [base, helper]
    screen = Screen(
        console, job.problems, lambda: sum(engine.stats.generated_tokens for engine in engines)
    )

    def on_event(event: TraceEvent) -> None:
        if trace is not None:
            trace.write(event.to_json())
        screen.on_event(event)

    with bad_value_is(UsageError):
        search = Search(
            base,
            job.questions,
            scorer=models.scorer,
            helper=helper,
            config=job.search,
            system_prompt=DEFAULT_SYSTEM_PROMPT if job.system_prompt is None else job.system_prompt,
            template_args=job.template_args,
            on_event=on_event,
        )
    begin = time.monotonic()
    stopped: BaseException | None = None
    with one_interrupt():
        try:
            with screen:
                for _ in search.run():
                    pass
        except BaseException as error:
            stopped = error
        seconds = time.monotonic() - begin
        _finish(job, search.solutions, seconds, screen, stopped)


def _finish(
    job: Job,
    solutions: Sequence[Solution],
    seconds: float,
    screen: Screen,
    stopped: BaseException | None,
) -> None:
    """Writes and shows what a run came to, then raises what it failed with, if it did."""
    outcomes = [judged(job.problems, s) for s in sorted(solutions, key=lambda s: s.problem)]
    if not outcomes and len(job.problems) == 1:
        reason = None if isinstance(stopped, (KeyboardInterrupt, type(None))) else told(stopped)
        outcomes = [not_started(job.problems, reason)]
    unwritten = None if job.json is None else _write(job, outcomes)
    screen.table(summary_rows(outcomes, seconds))
    done = sum(o.solution.finish not in ("interrupted", "error") for o in outcomes)
    if isinstance(stopped, KeyboardInterrupt):
        ended = f"interrupted: {done} of {len(job.questions)} questions solved"
        raise KeyboardInterrupt(ended if unwritten is None else f"{ended}; {unwritten}")
    if unwritten is not None:
        raise unwritten from stopped
    if stopped is not None:
        raise stopped
    failed = [outcome.solution for outcome in outcomes if outcome.solution.error is not None]
    if failed:
        reason = in_flags(str(failed[0].error))
        if len(job.questions) > 1:
            counts = f"{len(failed)} of {len(job.questions)} questions failed"
            reason = f"{counts}; question {failed[0].problem + 1}: {reason}"
        raise Failure(reason)


def _write(job: Job, outcomes: Sequence[Outcome]) -> Failure | None:
    """Writes the result file; returns the failure if it cannot be written."""
    assert job.json is not None
    run = {
        "settings": job.as_json(),
        "versions": {
            "kvcore": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    try:
        write_outcomes(job.json, outcomes, several=len(job.questions) > 1, run=run)
    except OSError as error:
        return Failure(f"--json: cannot write {job.json}: {error.strerror or error}")
    return None
