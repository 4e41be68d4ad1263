"""What eviction costs on GSM8K and what KV-Rescue gives back: four ways to solve its questions.

    python bench/gsm8k_rescue.py --base DIR --helper DIR --data gsm8k.jsonl --json out.jsonl \\
        --problems 20 -n 4 --budget 64

    full      best-of-N of the base model, full cache
    evicted   best-of-N of the base model, evicted cache
    rescue    KV-Rescue: the evicted base model and the helper, early exit of degenerate candidates
    helper    best-of-N of the helper alone, full cache

All ways use the same scorer (by default the likelihood under the helper with a full cache), the
same seed and the same questions, which are all in flight together. The file, one JSON record a
line, gets every question as it is solved; a run with the same settings goes on where it ends. The
table is printed last.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcore.cli.errors import in_flags
from kvcore.config import EngineConfig, EvictionConfig, SamplingParams, SearchConfig
from kvcore.eval import Problem, Results, Run, ScorerSpec, load_problems
from kvcore.eval.records import Record, early_exit_share
from kvcore.eval.solving import Models, kept, solve_missing
from kvcore.native import set_threads
from kvcore.search import best_of_n_config

METHODS = ("full", "evicted", "rescue", "helper")
RUNS = {"evicted": "best-of-n"}  # where a run calls it otherwise
TITLES = {
    "full": "base, full KV",
    "evicted": "base, evicted",
    "rescue": "KV-Rescue",
    "helper": "helper, full KV",
}
COLUMNS = (
    "method",
    "accuracy",
    "steps",
    "helper steps",
    "base tokens",
    "helper tokens",
    "scorer tokens read",
    "aborted (entropy/gzip/repetition/NaN)",
    "early exit of base candidates",
    "evicted",
    "KV per sequence, peak",
    "full KV",
    "seconds",
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base", required=True, help="directory of the base model")
    add("--helper", required=True, help="directory of the helper")
    add("--data", required=True, help="GSM8K as JSONL (question, answer)")
    add("--json", required=True, type=Path, help="result file, continued if it exists")
    add("--problems", type=int, default=20, help="the first so many questions")
    add("--methods", default=",".join(METHODS), help=f"of {','.join(METHODS)}")
    add("--scorer", default="loglik", help="loglik, random or prm:DIR")
    add("-n", type=int, default=4, help="candidates per step, of each model")
    add("--policy", default="rkv")
    add("--budget", type=int, default=64)
    add("--cadence", help="steady or sawtooth; the library's default if not given")
    add("--protect-prompt", action="store_true")
    add("--max-tokens", type=int, default=2048, help="context, prompt included")
    add("--max-step-tokens", type=int, default=512)
    add("--max-steps", type=int, default=1024)
    add("--seed", type=int, default=0)
    add("--dtype", default=None, help="bfloat16 or float32; the checkpoints' own if not given")
    add("--threads", type=int, default=None)
    add("--kv-gb", type=float, default=4.0, help="GiB of keys and values per engine, at most")
    args = parser.parse_args()
    args.methods = args.methods.split(",")
    unknown = [m for m in args.methods if m not in METHODS]
    if unknown:
        parser.error(f"--methods: expected some of {', '.join(METHODS)}, got {unknown[0]!r}")
    return args


def describe(args: argparse.Namespace, method: str, problems: Sequence[Problem]) -> Run:
    """The run of one way. Raises ValueError naming what is wrong."""
    search = SearchConfig(
        n=args.n,
        sampling=SamplingParams(max_new_tokens=args.max_step_tokens),
        max_steps=args.max_steps,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    return Run(
        base=args.base,
        helper=args.helper,
        scorer=ScorerSpec.parse(args.scorer),
        problems=tuple(problems),
        method=RUNS.get(method, method),
        eviction=EvictionConfig(
            args.policy,
            args.budget,
            protect_prompt=args.protect_prompt,
            **({} if args.cadence is None else {"cadence": args.cadence}),
        ),
        search=search if method == "rescue" else best_of_n_config(search),
        engine=EngineConfig(
            # A root and the candidates of both models, once as such and once being scored.
            max_seqs=len(problems) * (4 * args.n + 4),
            kv_bytes=int(args.kv_gb * 2**30),
        ),
        dtype=args.dtype,
    )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What all ways of a result file have in common, besides the settings of each record."""
    return {"benchmark": "gsm8k_rescue", "data": Path(args.data).name}


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def solve(run: Run, method: str, results: Results, models: Models) -> dict[str, Record]:
    """All records of one way; solves what the result file lacks."""
    told = results.get(method, {"seconds": 0.0, "sessions": 0})
    done = len(kept(run, results, method))
    if done == len(run.problems):
        return solve_missing(run, results, method, models)
    before, begin = told["seconds"], time.monotonic()

    def seconds() -> float:
        return float(before + time.monotonic() - begin)

    def on_record(record: Record) -> None:
        nonlocal done
        done += 1
        verdict = "right" if record.correct else f"wrong ({record.error or record.finish})"
        say(
            f"{method} {done}/{len(run.problems)}: question {record.id} {verdict}, "
            f"{len(record.steps)} steps, {seconds():.0f} s"
        )

    try:
        return solve_missing(run, results, method, models, on_record=on_record)
    finally:
        results.put(method, {"seconds": seconds(), "sessions": told["sessions"] + 1})


def table(found: dict[str, dict[str, Record]], results: Results) -> str:
    """Means over questions, as a Markdown table; tokens and steps per question."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for method, records in found.items():
        if records:
            cells = _row(method, list(records.values()), results[method]["seconds"])
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _row(method: str, records: Sequence[Record], seconds: float) -> list[str]:
    count = len(records)
    steps = [step.source for record in records for step in record.steps]
    right = sum(bool(record.correct) for record in records)
    aborted = [
        str(sum(getattr(record.aborted, name) for record in records))
        for name in ("entropy", "gzip", "repetition", "nan")
    ]
    base, helper, read = (
        sum(getattr(record.tokens, name) for record in records) / count
        for name in ("base", "helper", "scorer")
    )
    if method == "helper":  # it plays the base's part in its search
        base, helper = helper, base
    share, early = steps.count("helper") / max(1, len(steps)), early_exit_share(records)
    return [
        TITLES[method],
        f"{right}/{count} ({right / count:.0%})",
        f"{len(steps) / count:.1f}",
        "-" if method != "rescue" else f"{share:.0%}",
        f"{base:.0f}",
        f"{helper:.0f}",
        f"{read:.0f}",
        "/".join(aborted),
        "-" if early is None else f"{early:.1%}",
        f"{sum(record.evictions for record in records) / count:.0f}",
        f"{max(record.kv_bytes.peak for record in records) / 2**20:.2f} MiB",
        f"{max(record.kv_bytes.full for record in records) / 2**20:.2f} MiB",
        f"{seconds:.0f}",
    ]


def main() -> int:
    args = parse_args()
    try:
        problems = load_problems(args.data, args.problems)
        if len(problems) < args.problems:
            raise ValueError(f"--problems: expected at most {len(problems)}, got {args.problems}")
        if args.threads is not None:
            set_threads(args.threads)
        runs = {method: describe(args, method, problems) for method in METHODS}
        models = Models()
        with Results(args.json, settings(args)) as results:
            found = {method: kept(run, results, method) for method, run in runs.items()}
            for method in args.methods:
                found[method] = solve(runs[method], method, results, models)
            print(table(found, results))
    except (ValueError, OSError) as error:
        say(f"error: {in_flags(str(error), policy='--policy')}")
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; {args.json} holds what was solved")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
