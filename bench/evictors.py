"""Every evictor in both cadences at the same bound, on the embedded demo or on GSM8K questions.

    python bench/evictors.py demo --json demo.jsonl
    python bench/evictors.py gsm8k --base DIR --data gsm8k.jsonl --json FILE
    python bench/evictors.py gsm8k --base DIR --helper DIR --data gsm8k.jsonl --json FILE

One sample per problem (N = 1) of the base model with its cache evicted; with a helper also
KV-Rescue of one candidate each. A lane never holds more than budget + room slots: in the sawtooth
the room is headroom above the ``protect`` newest, in the steady cadence all of it holds the newest
entries. The policy "random" is the control. The file, one JSON record a line, gets every problem as
it is solved; a command with the same settings goes on where it ends, so that policies and budgets
can be added. The table is printed last.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcore.config import EngineConfig, EvictionConfig, SamplingParams, SearchConfig
from kvcore.demo import settings as demo
from kvcore.demo.rows import Settings, describe, load_models
from kvcore.eval import Results, Run, ScorerSpec, load_problems
from kvcore.eval.records import Record
from kvcore.eval.solving import Models, kept, solve_missing
from kvcore.native import set_threads
from kvcore.policies import available
from kvcore.search import best_of_n_config

POLICIES = tuple(name for name in available() if name != "full")
CADENCES = ("sawtooth", "steady")


@dataclass(frozen=True)
class Task:
    """What is compared.

    Attributes:
        run: KV-Rescue of one candidate each, or the base model alone where there is no helper.
        room, protect: as in the module's description.
        settings: what its runs have in common.
    """

    run: Run
    room: int
    protect: int
    settings: dict[str, Any]
    models: Models

    def alone(self, eviction: EvictionConfig | None) -> Run:
        """The base model, one candidate per step, which needs no judge; None: a full cache."""
        method = "full" if eviction is None else "best-of-n"
        search = best_of_n_config(self.run.search)
        run = replace(self.run, method=method, search=search, scorer=ScorerSpec("random"))
        return run if eviction is None else replace(run, eviction=eviction)


def demo_task(args: argparse.Namespace) -> Task:
    models = load_models()
    settings = Settings(64, 1, "rkv", args.problems, args.seed)
    run = describe("rescue", models, settings, settings.draw())
    common = {"task": "demo", "seed": args.seed}
    return Task(run, demo.HEADROOM, demo.PROTECT, common, models.loaded)


def gsm8k_task(args: argparse.Namespace) -> Task:
    problems = tuple(load_problems(args.data, args.problems))
    run = Run(
        base=args.base,
        helper=args.helper,
        scorer=ScorerSpec("random" if args.helper is None else "loglik"),
        problems=problems,
        method="best-of-n" if args.helper is None else "rescue",
        search=SearchConfig(
            n=1,
            n_helper=1,
            sampling=SamplingParams(temperature=args.temperature, max_new_tokens=args.max_tokens),
            max_tokens=args.max_tokens,
            seed=args.seed,
        ),
        engine=EngineConfig(max_seqs=12 * len(problems), kv_bytes=4 << 30),
        dtype=args.dtype,
    )
    common = {"task": "gsm8k", "data": Path(args.data).name, "base": Path(args.base).name}
    return Task(run, 128, 8, common, Models())


def eviction_of(task: Task, policy: str, cadence: str, budget: int) -> EvictionConfig:
    if cadence == "steady":
        return EvictionConfig(policy, budget, cadence=cadence, protect=task.room)
    return EvictionConfig(policy, budget, cadence=cadence, protect=task.protect, headroom=task.room)


def solve(run: Run, name: str, results: Results, models: Models) -> list[Record]:
    """Raises RuntimeError if a problem failed."""
    begin, done = time.monotonic(), len(kept(run, results, name))
    new = done < len(run.problems)

    def on_record(record: Record) -> None:
        nonlocal done
        done += 1
        if record.error is not None:
            raise RuntimeError(f"{name}: problem {record.id}: {record.error}")
        if sys.stderr.isatty():
            print(f"\r  {done}/{len(run.problems)}", end="\r", file=sys.stderr)

    records = list(solve_missing(run, results, name, models, on_record=on_record).values())
    if new:
        print(f"{name}: {cell(records)}, {time.monotonic() - begin:.0f} s", flush=True)
    return records


def name_of(policy: str, cadence: str, budget: int, *, rescue: bool) -> str:
    return f"{policy} {cadence} {budget}" + (" rescue" if rescue else "")


def table(runs: dict[str, list[Record]], budgets: Sequence[int], *, rescue: bool) -> list[str]:
    """Right answers (and runaways) by policy, one column per budget and cadence."""
    columns = [(budget, cadence) for budget in budgets for cadence in CADENCES]
    lines = [
        "| evictor | " + " | ".join(f"B={b}, {c}" for b, c in columns) + " |",
        "|" + " --- |" * (len(columns) + 1),
    ]
    for policy in POLICIES:
        names = [name_of(policy, cadence, budget, rescue=rescue) for budget, cadence in columns]
        cells = [cell(runs[name]) if name in runs else "" for name in names]
        if any(cells):
            lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return lines


def cell(records: Sequence[Record]) -> str:
    right, count = sum(bool(record.correct) for record in records), len(records)
    away = sum(record.finish != "eos" for record in records)
    return f"{right}/{count} ({right / count:.0%}), {away} ran away"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("task", choices=("demo", "gsm8k"))
    add("--json", required=True, type=Path, help="results, continued if the file exists")
    add("--problems", type=int, default=None, help="170 of the demo, 50 of GSM8K")
    add("--budgets", default="64,128")
    add("--policies", default=",".join(POLICIES))
    add("--cadences", default=",".join(CADENCES))
    add("--ways", default="alone,rescue", help="rescue needs a helper")
    add("--base", help="directory of the base model")
    add("--helper", help="directory of the helper")
    add("--data", help="GSM8K as JSONL (question, answer)")
    add("--dtype", default=None, help="bfloat16 or float32; the checkpoint's own if not given")
    add("--max-tokens", type=int, default=640, help="context, prompt included")
    add("--temperature", type=float, default=0.8, help="of GSM8K; 0 is greedy")
    add("--seed", type=int, default=0)
    add("--threads", type=int)
    args = parser.parse_args()
    args.problems = args.problems or (170 if args.task == "demo" else 50)
    if args.task == "gsm8k" and (args.base is None or args.data is None):
        parser.error("gsm8k needs --base and --data")
    for flag, known in (
        ("policies", POLICIES),
        ("cadences", CADENCES),
        ("ways", ("alone", "rescue")),
    ):
        chosen = getattr(args, flag).split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            parser.error(f"--{flag}: expected some of {', '.join(known)}, got {unknown[0]!r}")
        setattr(args, flag, chosen)
    args.budgets = [int(budget) for budget in args.budgets.split(",")]
    return args


def main() -> None:
    args = parse_args()
    if args.threads is not None:
        set_threads(args.threads)
    task = demo_task(args) if args.task == "demo" else gsm8k_task(args)
    ways = [way == "rescue" for way in args.ways if way == "alone" or task.run.helper is not None]
    plan = {"full": task.alone(None)}
    for rescue in ways:
        for budget in args.budgets:
            for policy in args.policies:
                for cadence in args.cadences:
                    eviction = eviction_of(task, policy, cadence, budget)
                    run = replace(task.run, eviction=eviction) if rescue else task.alone(eviction)
                    plan[name_of(policy, cadence, budget, rescue=rescue)] = run
    with Results(args.json, task.settings) as results:
        runs = {name: solve(run, name, results, task.models) for name, run in plan.items()}
    print(f"\nfull KV: {cell(runs['full'])}")
    for rescue in ways:
        print("\n" + ("KV-Rescue, 1 + 1" if rescue else "alone") + "\n")
        print("\n".join(table(runs, args.budgets, rescue=rescue)))


if __name__ == "__main__":
    main()
