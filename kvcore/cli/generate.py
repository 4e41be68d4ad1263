"""``kvcore generate``: continue a prompt, with a bounded cache if asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcore.cli.errors import Failure, UsageError, bad_value_is, run_command
from kvcore.cli.eviction import EvictionFlags, with_eviction
from kvcore.cli.output import SafeOutput, one_interrupt
from kvcore.cli.settings import at_least, kv_bytes, model_directory, one_of, parse_template_args
from kvcore.config import EngineConfig, EvictionConfig, SamplingParams

if TYPE_CHECKING:
    from kvcore.engine import Engine, Output

_DEFAULT = SamplingParams()
_ENGINE = EngineConfig()


@dataclass(frozen=True)
class Job:
    """One run of ``kvcore generate``.

    Attributes:
        prompt: text, or the messages of a conversation.
        sampling: "model" for what the checkpoint says.
        threads: of torch and of kvcore's kernels; None leaves both alone.
    """

    model: Path
    prompt: str | list[dict[str, str]]
    sampling: SamplingParams | str
    n: int
    stop: tuple[str, ...]
    seed: int
    template_args: dict[str, Any]
    eviction: EvictionConfig
    engine: EngineConfig
    dtype: str | None
    threads: int | None


@with_eviction
def generate(
    *,
    model: Annotated[
        Path, typer.Option(metavar="DIR|ID", help="Directory, hub id or demo:NAME of the model.")
    ],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What to continue.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The same from a file; - is standard input."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Give the prompt as a user's message in the chat template."),
    ] = False,
    system_prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message; implies --chat.")
    ] = None,
    template_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Keyword of the chat template; implies --chat; may be repeated. VALUE is JSON, "
            "else text.",
        ),
    ] = None,
    eviction: EvictionFlags,
    n: Annotated[
        int, typer.Option("-n", "--n", help="Continuations; several are shown when all have ended.")
    ] = 1,
    max_tokens: Annotated[
        int | None,
        typer.Option(help=f"Longest continuation (default {_DEFAULT.max_tokens})."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help=f"0 is greedy (default {_DEFAULT.temperature}).")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help=f"In (0, 1]; 1 is off (default {_DEFAULT.top_p}).")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help=f"0 is off (default {_DEFAULT.top_k}).")] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Share of the likeliest token's probability, in [0, 1]; 0 is off."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Of tokens that are there already, > 0; 1 is off.")
    ] = None,
    own_sampling: Annotated[
        bool,
        typer.Option("--own-sampling", help="Sample as the model's generation_config.json says."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of every random draw.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be repeated."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="bfloat16|float32", help="The checkpoint's own if not given."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; all cores if not given.")
    ] = None,
    kv_gb: Annotated[
        float, typer.Option(help="Keys and values, at most, in GiB.")
    ] = _ENGINE.kv_bytes / 2**30,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Continue a prompt and show the text as it comes.

    The last line, on standard error, says how fast it was, and what the KV cache held against what
    a full one would hold.
    """
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }

    def check() -> Job:
        settings = {name: value for name, value in given.items() if value is not None}
        if own_sampling and settings:
            flag = "--" + min(settings).replace("_", "-")
            raise UsageError(f"{flag}: expected nothing besides --own-sampling")
        names = {name: "--" + name.replace("_", "-") for name in given}
        with bad_value_is(UsageError, **names):
            sampling = SamplingParams(**settings)  # type: ignore[arg-type]
        if any(text == "" for text in stop or ()):
            raise UsageError("--stop: expected a text that is not empty, got ''")
        at_least(n, 1, "-n")
        at_least(seed, 0, "--seed")
        arguments = parse_template_args(template_arg or ())
        text: Any = _read_prompt(prompt, prompt_file)
        if chat or system_prompt or arguments:
            text = [{"role": "user", "content": text}]
            if system_prompt:
                text.insert(0, {"role": "system", "content": system_prompt})
        return Job(
            eviction=eviction.config(seed=seed),
            dtype=one_of(dtype, ("bfloat16", "float32", "float16", "auto"), "--dtype"),
            threads=at_least(threads, 1, "--threads"),
            engine=EngineConfig(max_seqs=n + 1, kv_bytes=kv_bytes(kv_gb)),
            prompt=text,
            sampling="model" if own_sampling else sampling,
            n=n,
            stop=tuple(stop or ()),
            seed=seed,
            template_args=arguments,
            model=model_directory(model, "--model"),
        )

    run_command(lambda: _run(check()), debug=debug)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text of ``--prompt`` or ``--prompt-file``. Raises UsageError."""
    if (prompt is None) == (file is None):
        got = "neither" if prompt is None else "both"
        raise UsageError(f"--prompt: expected either --prompt or --prompt-file, got {got}")
    text, flag = prompt, "--prompt"
    if file is not None:
        flag = "--prompt-file"
        try:
            data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
            text = data.decode("utf-8")
        except OSError as error:
            raise UsageError(f"{flag}: cannot read {str(file)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{flag}: expected UTF-8, got {str(file)!r}: {error}") from error
    if not text:
        raise UsageError(f"{flag}: expected some text, got none")
    return text


def _run(job: Job) -> None:
    """Generates and tells. Raises Failure, or KeyboardInterrupt with what there was."""
    import transformers

    from kvcore.engine import Engine
    from kvcore.native import set_threads

    if job.threads is not None:
        set_threads(job.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    out = SafeOutput(sys.stdout)
    with bad_value_is(Failure, model="--model", prompts="--prompt", sampling="--own-sampling"):
        engine = Engine.from_pretrained(
            job.model, eviction=job.eviction, dtype=job.dtype, config=job.engine
        )
        begin = time.perf_counter()
        with one_interrupt():
            try:
                outputs = _several(engine, job, out) if job.n > 1 else [_one(engine, job, out)]
            except KeyboardInterrupt:
                count, seconds = engine.stats.generated_tokens, time.perf_counter() - begin
                raise KeyboardInterrupt(f"\ninterrupted: {_speed(count, seconds)}") from None
        seconds = time.perf_counter() - begin
    out.flush()
    typer.echo(_summary(outputs, seconds), err=True)
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise Failure(str(failed[0].error))
    if out.failure is not None:
        raise Failure(f"standard output: {out.failure}")


def _one(engine: Engine, job: Job, out: SafeOutput) -> Output:
    pieces = engine.stream(
        job.prompt, job.sampling, stop=job.stop, seed=job.seed, template_args=job.template_args
    )
    while True:
        try:
            out.write(_shown(next(pieces), out))
            out.flush()
        except StopIteration as end:
            out.write("\n")
            output: Output = end.value
            return output
        except RuntimeError as error:
            raise Failure(str(error)) from error


def _several(engine: Engine, job: Job, out: SafeOutput) -> list[Output]:
    outputs = engine.generate(
        job.prompt,
        job.sampling,
        n=job.n,
        stop=job.stop,
        seed=job.seed,
        template_args=job.template_args,
    )
    for output in outputs:
        out.write(f"--- {output.index + 1} of {job.n}\n{_shown(output.text, out)}\n")
    return outputs


def _shown(text: str, out: SafeOutput) -> str:
    """``text`` as it is, unless it could steer a terminal."""
    from kvcore.cli.screen import printable

    return printable(text) if out.isatty() else text


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.1f} s ({tokens / max(seconds, 1e-9):.1f} tokens/s)"


def _summary(outputs: Sequence[Output], seconds: float) -> str:
    from kvcore.cli.report import format_bytes

    tokens = sum(len(output.token_ids) for output in outputs)
    held = sum(output.cache.bytes for output in outputs)
    full = sum(output.cache.full_bytes for output in outputs)
    ends = ", ".join(sorted({output.finish_reason for output in outputs}))
    share = f" ({held / full:.0%})" if full else ""
    return (
        f"{_speed(tokens, seconds)}, end: {ends}; KV {format_bytes(held)} held, a full cache "
        f"{format_bytes(full)}{share}"
    )
