"""Every evictor in both cadences at the same bound, on the embedded demo or on GSM8K questions.

    python bench/evictors.py demo --json docs/results/evictors_demo.json
    python bench/evictors.py gsm8k --base DIR --data gsm8k.jsonl --json FILE
    python bench/evictors.py gsm8k --base DIR --helper DIR --data gsm8k.jsonl --json FILE

One sample per problem (N = 1) of the base model with its cache evicted; with a helper also
KV-Rescue of one candidate each. A lane never holds more than budget + room slots: in the sawtooth
the room is headroom above the ``protect`` newest, in the steady cadence all of it holds the newest
entries. The policy "random" is the control. The JSON file is written after every run; a command
with the same settings goes on where it ends, so that policies and budgets can be added. The table
is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcore.config import EngineConfig, EvictionConfig, SamplingParams, SearchConfig
from kvcore.demo import settings as demo
from kvcore.demo.rows import Settings, load_models
from kvcore.engine import Engine
from kvcore.eval import is_correct, load_problems
from kvcore.models import LoadedModel, load_model
from kvcore.native import set_threads
from kvcore.policies import available
from kvcore.search import LoglikScorer, PrmScorer, Prompt, RandomScorer, Search, Solution
from kvcore.search.best_of_n import best_of_n_config

POLICIES = tuple(name for name in available() if name != "full")
CADENCES = ("sawtooth", "steady")


class Task:
    """Problems, models and settings; ``room`` and ``protect`` as in the module's description."""

    room: int
    protect: int
    config: SearchConfig
    prompts: list[Prompt]
    base: LoadedModel
    helper: LoadedModel | None
    prm: LoadedModel | None = None

    def is_right(self, problem: int, text: str) -> bool:
        raise NotImplementedError

    def engine_config(self) -> EngineConfig:
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What decides the results, besides a run's own policy, cadence and budget."""
        raise NotImplementedError


class Demo(Task):
    room, protect = demo.HEADROOM, demo.PROTECT

    def __init__(self, args: argparse.Namespace) -> None:
        models = load_models()
        self.base, self.helper, self.prm = models.base, models.helper, models.prm
        self.config = demo.search_config(1, args.seed)
        self._problems = Settings(64, 1, "rkv", args.problems, args.seed).draw()
        self.prompts = [Prompt(problem.question) for problem in self._problems]

    def is_right(self, problem: int, text: str) -> bool:
        return self._problems[problem].is_solved_by(text)

    def engine_config(self) -> EngineConfig:
        return demo.engine_config()

    def settings(self) -> dict[str, Any]:
        return {"task": "demo", "problems": len(self.prompts), "seed": self.config.seed}


class Gsm8k(Task):
    room, protect = 128, 8

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.base = load_model(args.base, dtype=args.dtype, argument="--base")
        self.helper = None
        if args.helper is not None:
            self.helper = load_model(args.helper, dtype=args.dtype, argument="--helper")
        self.config = SearchConfig(
            n=1,
            n_helper=1,
            sampling=SamplingParams(temperature=args.temperature, max_new_tokens=args.max_tokens),
            max_tokens=args.max_tokens,
            seed=args.seed,
        )
        self._problems = load_problems(args.data, args.problems)
        self.prompts = [Prompt(problem.question) for problem in self._problems]

    def is_right(self, problem: int, text: str) -> bool:
        return is_correct(text, self._problems[problem].gold)

    def engine_config(self) -> EngineConfig:
        tokens = self._args.max_tokens
        return EngineConfig(max_seqs=12 * len(self.prompts), context_len=tokens, kv_bytes=4 << 30)

    def settings(self) -> dict[str, Any]:
        args = self._args
        return {
            "task": "gsm8k",
            "base": Path(args.base).name,
            "helper": None if args.helper is None else Path(args.helper).name,
            "dtype": args.dtype,
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
            "problems": len(self.prompts),
            "seed": args.seed,
        }


def eviction_of(task: Task, policy: str, cadence: str, budget: int) -> EvictionConfig:
    steady = cadence == "steady"
    return EvictionConfig(
        policy=policy,
        budget=budget,
        protect=task.room if steady else task.protect,
        headroom=task.room,
        cadence=cadence,
    )


def make_search(task: Task, eviction: EvictionConfig | None, *, rescue: bool) -> Search:
    config = task.config if rescue else best_of_n_config(task.config)
    base = Engine(task.base, task.engine_config(), eviction=eviction, detector=config.detector)
    helper, scorer = None, RandomScorer(0)  # a single candidate needs no judge
    if rescue:
        assert task.helper is not None
        helper = Engine(task.helper, task.engine_config())
        config = replace(config, n_helper=1)
        scorer = LoglikScorer()
        if task.prm is not None:
            scorer = PrmScorer(Engine(task.prm, task.engine_config()))
    return Search(
        base,
        task.prompts,
        scorer=scorer,
        helper=helper,
        config=config,
        max_in_flight=len(task.prompts),
    )


def run(task: Task, eviction: EvictionConfig | None, *, rescue: bool) -> dict[str, Any]:
    search = make_search(task, eviction, rescue=rescue)
    begin, solutions = time.monotonic(), dict[int, Solution]()
    for solution in search.run():
        solutions[solution.problem] = solution
        if solution.error is not None:
            raise RuntimeError(f"problem {solution.problem}: {solution.error}")
        if sys.stderr.isatty():
            print(f"\r  {len(solutions)}/{len(task.prompts)}", end="\r", file=sys.stderr)
    done = [solutions[i] for i in range(len(task.prompts))]
    sources = [step.source for s in done for step in s.steps]
    return {
        "right": "".join(str(int(task.is_right(s.problem, s.text))) for s in done),
        "tokens": sum(s.tokens.base.generated for s in done),
        "runaway": sum(s.finish != "eos" for s in done),
        "evicted": sum(s.evictions for s in done),
        "kv_bytes_peak": max(s.kv_bytes.peak for s in done),
        "helper_steps": sources.count("helper") / max(1, len(sources)),
        "seconds": time.monotonic() - begin,
    }


class Results:
    """Runs by name, kept in a file."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self.settings = settings
        self.runs: dict[str, dict[str, Any]] = {}
        if path.exists():
            told = json.loads(path.read_text())
            if told["settings"] != settings:
                raise ValueError(f"--json: {path} holds results of other settings")
            self.runs = told["runs"]

    def add(self, name: str, found: dict[str, Any]) -> None:
        self.runs[name] = found
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps({"settings": self.settings, "runs": self.runs}, indent=1) + "\n")
        os.replace(part, self._path)


def name_of(policy: str, cadence: str, budget: int, *, rescue: bool) -> str:
    return f"{policy} {cadence} {budget}" + (" rescue" if rescue else "")


def table(runs: dict[str, dict[str, Any]], budgets: Sequence[int], *, rescue: bool) -> list[str]:
    """Right answers (and runaways) by policy, one column per budget and cadence."""
    columns = [(budget, cadence) for budget in budgets for cadence in CADENCES]
    lines = [
        "| evictor | " + " | ".join(f"B={b}, {c}" for b, c in columns) + " |",
        "|" + " --- |" * (len(columns) + 1),
    ]
    for policy in POLICIES:
        cells = []
        for budget, cadence in columns:
            found = runs.get(name_of(policy, cadence, budget, rescue=rescue))
            cells.append("" if found is None else cell(found))
        if any(cells):
            lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return lines


def cell(found: dict[str, Any]) -> str:
    right, count = found["right"].count("1"), len(found["right"])
    return f"{right}/{count} ({right / count:.0%}), {found['runaway']} ran away"


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
    task = Demo(args) if args.task == "demo" else Gsm8k(args)
    results = Results(args.json, task.settings())
    ways = [way == "rescue" for way in args.ways if way == "alone" or task.helper is not None]
    plan: list[tuple[str, EvictionConfig | None, bool]] = [("full", None, False)]
    for rescue in ways:
        for budget in args.budgets:
            for policy in args.policies:
                for cadence in args.cadences:
                    eviction = eviction_of(task, policy, cadence, budget)
                    name = name_of(policy, cadence, budget, rescue=rescue)
                    plan.append((name, eviction, rescue))
    for name, eviction, rescue in plan:
        if name not in results.runs:
            results.add(name, run(task, eviction, rescue=rescue))
            found = results.runs[name]
            print(f"{name}: {cell(found)}, {found['seconds']:.0f} s", flush=True)
    print(f"\nfull KV: {cell(results.runs['full'])}")
    for rescue in ways:
        print("\n" + ("KV-Rescue, 1 + 1" if rescue else "alone") + "\n")
        print("\n".join(table(results.runs, args.budgets, rescue=rescue)))


if __name__ == "__main__":
    main()
