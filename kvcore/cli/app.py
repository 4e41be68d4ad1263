"""Commands and their flags. torch and transformers are imported inside commands only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcore import __version__
from kvcore.cli.errors import UsageError, bad_value_is, run_command
from kvcore.cli.eviction import EvictionFlags, with_eviction
from kvcore.cli.generate import generate
from kvcore.cli.logs import LEVELS, show_logs
from kvcore.cli.settings import (
    Job,
    at_least,
    engine_config,
    model_directory,
    one_of,
    output_path,
    parse_separators,
    parse_template_args,
    read_questions,
    scorer_for,
)
from kvcore.config import (
    DetectorConfig,
    EngineConfig,
    SamplingParams,
    SearchConfig,
)
from kvcore.demo import settings as demo_settings
from kvcore.eval.runs import PRM_READS

_SAMPLING = SamplingParams()
_DETECTOR = DetectorConfig()
_SEARCH = SearchConfig()
_ENGINE = EngineConfig()

app = typer.Typer(
    name="kvcore",
    help="Reasoning models with a KV cache of fixed size, without losing their accuracy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcore {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option(metavar="|".join(LEVELS), help="Show on standard error what is logged."),
    ] = None,
) -> None:
    show_logs(log_level)


app.command()(generate)


@app.command()
def doctor(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Say what this installation can do on this machine. Fails if it can run no model."""

    def show() -> None:
        from kvcore.doctor import render, report, usable

        data = report()
        typer.echo(render(data))
        if not usable(data):
            raise typer.Exit(1)

    run_command(show, debug=debug)


@app.command()
@with_eviction
def solve(
    *,
    base: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Base model; its cache is evicted."),
    ],
    helper: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Small model with a full cache that also proposes steps (KV-Rescue). "
            "Without it: best-of-N.",
        ),
    ] = None,
    scorer: Annotated[
        str | None,
        typer.Option(
            metavar="prm:DIR|DIR|loglik|random",
            help="What chooses among candidate steps. A directory is a process reward model, which "
            "KV-Rescue takes. loglik, the likelihood under the helper, needs none and is worth "
            "little: on GSM8K it picked the helper's own text in 117 of 130 steps. Needed unless a "
            "step has one candidate.",
        ),
    ] = None,
    prm_read: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PRM_READS),
            help="Where a reward model's score is read: at its separator token (default), or at "
            "the last token of the empty line after the step.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="bfloat16|float32", help="Of all models; the checkpoint's own if not given."
        ),
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A question; may be repeated."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Questions from the field 'question' (or 'problem') of each line.",
        ),
    ] = None,
    system_prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Replaces the default, which asks for a boxed answer."),
    ] = None,
    template_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Keyword of the chat templates, for instance enable_thinking=false; may be "
            "repeated. VALUE is JSON, else text.",
        ),
    ] = None,
    eviction: EvictionFlags,
    n: Annotated[
        int | None,
        typer.Option("-n", "--n", help=f"Base candidates per step (default {_SEARCH.n})."),
    ] = None,
    n_helper: Annotated[
        int | None,
        typer.Option(help="Helper candidates per step; as many as -n if not given."),
    ] = None,
    n_total: Annotated[
        int | None,
        typer.Option(
            help="In place of both: candidates per step in total, half of each model; the base "
            "model gets the odd one."
        ),
    ] = None,
    separator: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Ends a step; may be repeated. \\n, \\r, \\t, \\xNN and \\\\ are "
            "understood; an empty line if not given.",
        ),
    ] = None,
    max_step_tokens: Annotated[
        int, typer.Option(help="Longest step in tokens.")
    ] = _SAMPLING.max_new_tokens,
    max_steps: Annotated[int, typer.Option(help="Most steps of a solution.")] = _SEARCH.max_steps,
    max_tokens: Annotated[
        int,
        typer.Option(help="Context in tokens, prompt included, at which a solution ends."),
    ] = _SEARCH.max_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _SAMPLING.temperature,
    top_p: Annotated[float, typer.Option(help="In (0, 1]; 1 is off.")] = _SAMPLING.top_p,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = _SAMPLING.top_k,
    seed: Annotated[int, typer.Option(help="Of every random draw of the run.")] = _SEARCH.seed,
    detector: Annotated[
        bool | None,
        typer.Option(
            "--detector/--no-detector",
            help="Early exit of degenerate candidates; on with --helper, else off.",
        ),
    ] = None,
    entropy_threshold: Annotated[
        float, typer.Option(help="Mean entropy in nats.")
    ] = _DETECTOR.entropy_threshold,
    entropy_window: Annotated[
        int, typer.Option(help="Tokens that the entropy is averaged over.")
    ] = _DETECTOR.entropy_window,
    entropy_guard: Annotated[
        int, typer.Option(help="First token of a step that is tested.")
    ] = _DETECTOR.entropy_guard,
    gzip_threshold: Annotated[
        float, typer.Option(help="Compressed over plain size.")
    ] = _DETECTOR.gzip_threshold,
    repetition: Annotated[
        bool,
        typer.Option("--repetition", help="Also end candidates whose tail repeats exactly."),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads; all cores if not given."),
    ] = None,
    kv_gb: Annotated[
        float,
        typer.Option(help="Keys and values of each model, at most, in GiB."),
    ] = _ENGINE.kv_bytes / 2**30,
    max_seqs: Annotated[
        int,
        typer.Option(help="Sequences of each model at once, at most."),
    ] = _ENGINE.max_seqs,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every event as a JSON line, as it happens."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the result."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Solve questions step by step: several candidates per step, the best one is committed.

    With --helper this is KV-Rescue, without it best-of-N.
    """

    def check() -> Job:
        if n is not None and n_total is not None:
            raise UsageError(f"-n: expected nothing beside --n-total, got {n}")
        with bad_value_is(UsageError):
            sampling = SamplingParams(
                temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_step_tokens
            )
            tests = DetectorConfig(
                entropy_threshold=entropy_threshold,
                entropy_window=entropy_window,
                entropy_guard=entropy_guard,
                gzip_threshold=gzip_threshold,
                repetition=repetition,
            )
            search = SearchConfig(
                n=_SEARCH.n if n is None else n,
                n_helper=n_helper,
                n_total=n_total,
                separators=parse_separators(separator or ()),
                sampling=sampling,
                max_steps=max_steps,
                max_tokens=max_tokens,
                detector=tests if (helper is not None if detector is None else detector) else None,
                seed=seed,
            )
        if n_helper and helper is None:
            raise UsageError(f"--n-helper: expected 0 without --helper, got {n_helper}")
        candidates = sum(search.candidates(helper=helper is not None))
        return Job(
            base=model_directory(base, "--base"),
            helper=None if helper is None else model_directory(helper, "--helper"),
            method="best-of-n" if helper is None else "rescue",
            problems=read_questions(question or (), questions),
            eviction=eviction.config(seed=seed),
            search=search,
            engine=engine_config(max_seqs=max_seqs, max_tokens=max_tokens, kv_gb=kv_gb),
            system_prompt=system_prompt,
            template_args=parse_template_args(template_arg or ()),
            dtype=one_of(dtype, ("bfloat16", "float32", "float16", "auto"), "--dtype"),
            threads=at_least(threads, 1, "--threads"),
            trace=output_path(trace, "--trace"),
            json=output_path(json_file, "--json"),
            scorer=scorer_for(scorer, prm_read, candidates),
        )

    def run() -> None:
        job = check()
        from kvcore.cli.solve import run_job  # torch

        run_job(job)

    run_command(run, debug=debug)


@app.command()
def demo(
    budget: Annotated[
        int, typer.Option(help="Scored entries kept per lane of the base model.")
    ] = demo_settings.BUDGET,
    n: Annotated[
        int, typer.Option("-n", "--n", help="Candidates per step, of each model.")
    ] = demo_settings.N,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Eviction policy; names as of solve --evict.")
    ] = demo_settings.POLICY,
    problems: Annotated[
        int, typer.Option(help="Held-out problems per row.")
    ] = demo_settings.PROBLEMS,
    seed: Annotated[int, typer.Option(help="Of the problems and of every random draw.")] = 0,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; all cores if not given.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Trace of KV-Rescue; a fresh file in the folder of temporary files if not given.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the table.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Show on small embedded models what eviction costs and what KV-Rescue gives back."""

    def run() -> None:
        for flag, path in (("--trace", trace), ("--json", json_file)):
            output_path(path, flag)
        at_least(threads, 1, "--threads")
        from kvcore.cli.demo import run_demo  # torch
        from kvcore.demo.rows import Settings

        with bad_value_is(UsageError, policy="--policy"):
            settings = Settings(budget, n, policy, problems, seed)
        run_demo(settings, trace=trace, json_file=json_file, threads=threads)

    run_command(run, debug=debug)


def main() -> None:
    """Entry point of the ``kvcore`` script. Exit codes: 0, 1 failure, 2 usage, 130 interrupted."""
    app()
