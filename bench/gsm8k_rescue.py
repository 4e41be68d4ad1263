"""What eviction costs on GSM8K and what KV-Rescue gives back: four ways to solve its questions.

    python bench/gsm8k_rescue.py --base DIR --helper DIR --data gsm8k.jsonl --json out.json \\
        --problems 20 -n 4 --budget 64

    full      best-of-N of the base model, full cache
    evicted   best-of-N of the base model, evicted cache
    rescue    KV-Rescue: the evicted base model and the helper, early exit of degenerate candidates
    helper    best-of-N of the helper alone, full cache

All ways use the same scorer (by default the likelihood under the helper with a full cache), the
same seed and the same questions, which are all in flight together. The JSON file is written after
every solved question; a run with the same settings goes on where the file ends. The table is
printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kvcore
from kvcore.config import EngineConfig, EvictionConfig, SamplingParams, SearchConfig
from kvcore.engine import Engine
from kvcore.eval import Problem, extract_answer, is_correct, load_problems
from kvcore.models import LoadedModel, load_model, load_prm
from kvcore.native import set_threads
from kvcore.search import Prompt, Search, Solution
from kvcore.search.best_of_n import best_of_n_config
from kvcore.search.scorers import LoglikScorer, PrmScorer, RandomScorer

METHODS = ("full", "evicted", "rescue", "helper")
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


class Bench:
    """Builds each method's engines; loads each model once, when first needed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._loaded: dict[str, LoadedModel] = {}
        self.search = SearchConfig(
            n=args.n,
            sampling=SamplingParams(max_new_tokens=args.max_step_tokens),
            max_steps=args.max_steps,
            max_tokens=args.max_tokens,
            seed=args.seed,
        )
        self.eviction = EvictionConfig(
            policy=args.policy, budget=args.budget, protect_prompt=args.protect_prompt
        )

    def settings(self) -> dict[str, Any]:
        """What decides the results; a result file belongs to one such set."""
        args = self.args
        return {
            "base": Path(args.base).name,
            "helper": Path(args.helper).name,
            "data": Path(args.data).name,
            "problems": args.problems,
            "scorer": args.scorer,
            "dtype": args.dtype,
            "search": self.search.to_json(),
            "eviction": asdict(self.eviction),
        }

    def search_for(self, method: str, problems: dict[int, Problem]) -> Search:
        """A search of ``problems`` (by their number in the data) in the way of ``method``."""
        evicted = method in ("evicted", "rescue")
        base = self._engine(
            "helper" if method == "helper" else "base", self.eviction if evicted else None
        )
        helper = self._engine("helper") if method == "rescue" else None
        config = self.search if method == "rescue" else best_of_n_config(self.search)
        prompts = [Prompt(problem.question, key=key) for key, problem in problems.items()]
        return Search(
            base,
            prompts,
            scorer=self._scorer(method, base),
            helper=helper,
            config=config,
            max_in_flight=len(prompts),
        )

    def _scorer(self, method: str, base: Engine) -> Any:
        kind, _, path = self.args.scorer.partition(":")
        if kind == "random":
            return RandomScorer(self.args.seed)
        if kind == "prm" and path:
            return PrmScorer(self._engine("scorer"))
        if kind != "loglik":
            raise ValueError(
                f"--scorer: expected loglik, random or prm:DIR, got {self.args.scorer!r}"
            )
        if method == "rescue":
            return LoglikScorer()
        return LoglikScorer(base if method == "helper" else self._engine("helper"))

    def _engine(self, role: str, eviction: EvictionConfig | None = None) -> Engine:
        args = self.args
        if role not in self._loaded:
            say(f"loading {role}")
            if role == "scorer":
                path = args.scorer.partition(":")[2]
                self._loaded[role] = load_prm(path, dtype=args.dtype)
            else:
                path = getattr(args, role)
                self._loaded[role] = load_model(path, dtype=args.dtype, argument=f"--{role}")
        model = self._loaded[role]
        config = EngineConfig(
            # A root and the candidates of both models, once as such and once being scored.
            max_seqs=args.problems * (4 * args.n + 4),
            context_len=min(args.max_tokens, model.context_len),
            kv_bytes=int(args.kv_gb * 2**30),
        )
        return Engine(model, config, eviction=eviction, detector=self.search.detector)


def record_of(solution: Solution, problem: Problem) -> dict[str, Any]:
    """What the result file keeps of one solved question."""
    told = solution.to_json()
    return {
        "id": problem.id,
        "gold": problem.gold,
        "answer": extract_answer(solution.text),
        "correct": solution.error is None and is_correct(solution.text, problem.gold),
        "finish": solution.finish,
        "error": solution.error,
        "sources": [step.source for step in solution.steps],
        "flags": [step.flag for step in solution.steps],
        "step_tokens": [len(step.tokens) for step in solution.steps],
        **{name: told[name] for name in ("tokens", "aborted", "evictions", "kv_bytes", "seconds")},
        "text": solution.text,
    }


def open_results(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The result file's content, or an empty one.

    Raises:
        ValueError: the file was made with other settings.
    """
    if not path.exists():
        return {"kvcore": kvcore.__version__, "settings": settings, "methods": {}}
    results: dict[str, Any] = json.loads(path.read_text())
    if results.get("settings") != json.loads(json.dumps(settings)):
        raise ValueError(f"--json: {path} holds results of other settings; name another file")
    return results


def save(path: Path, results: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(part, path)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def run_method(bench: Bench, method: str, problems: list[Problem], results: dict[str, Any]) -> None:
    """Solves what the result file lacks of one method, saving after every question."""
    empty = {"seconds": 0.0, "runs": 0, "problems": {}}
    kept = results["methods"].setdefault(method, empty)
    missing = {i: p for i, p in enumerate(problems) if str(i) not in kept["problems"]}
    if not missing:
        return
    search = bench.search_for(method, missing)
    kept["runs"] += 1
    before, begin = kept["seconds"], time.monotonic()
    for solution in search.run():
        record = record_of(solution, missing[solution.problem])
        kept["problems"][str(solution.problem)] = record
        kept["seconds"] = before + time.monotonic() - begin
        save(bench.args.json, results)
        verdict = "right" if record["correct"] else f"wrong ({solution.error or solution.finish})"
        say(
            f"{method} {len(kept['problems'])}/{len(problems)}: question {solution.problem} "
            f"{verdict}, {len(solution.steps)} steps, {kept['seconds']:.0f} s"
        )


def table(results: dict[str, Any]) -> str:
    """Means over questions, as a Markdown table; tokens and steps per question."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for method in METHODS:
        kept = results["methods"].get(method)
        if kept and kept["problems"]:
            lines.append("| " + " | ".join(_row(method, kept)) + " |")
    return "\n".join(lines)


def _row(method: str, kept: dict[str, Any]) -> list[str]:
    records = list(kept["problems"].values())
    count = len(records)
    steps = [source for r in records for source in r["sources"]]
    right = sum(r["correct"] for r in records)
    aborted = [
        str(sum(r["aborted"][name] for r in records))
        for name in ("entropy", "gzip", "repetition", "nan")
    ]
    # The helper alone plays the base's part in its search.
    own, other = ("helper", "base") if method == "helper" else ("base", "helper")
    generated = {
        own: sum(r["tokens"]["base"]["generated"] for r in records) / count,
        other: sum(r["tokens"]["helper"]["generated"] for r in records) / count,
    }
    share = steps.count("helper") / max(1, len(steps))
    peak = max(r["kv_bytes"]["peak"] for r in records) / 2**20
    full = max(r["kv_bytes"]["full"] for r in records) / 2**20
    return [
        TITLES[method],
        f"{right}/{count} ({right / count:.0%})",
        f"{len(steps) / count:.1f}",
        "-" if method != "rescue" else f"{share:.0%}",
        f"{generated['base']:.0f}",
        f"{generated['helper']:.0f}",
        f"{sum(r['tokens']['scorer']['processed'] for r in records) / count:.0f}",
        "/".join(aborted),
        f"{sum(r['evictions'] for r in records) / count:.0f}",
        f"{peak:.2f} MiB",
        f"{full:.2f} MiB",
        f"{kept['seconds']:.0f}",
    ]


def main() -> int:
    args = parse_args()
    try:
        problems = load_problems(args.data, args.problems)
        if len(problems) < args.problems:
            found = len(problems)
            raise ValueError(f"--problems: expected at most {found}, got {args.problems}")
        if args.threads is not None:
            set_threads(args.threads)
        bench = Bench(args)
        results = open_results(args.json, bench.settings())
        for method in args.methods:
            run_method(bench, method, problems, results)
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; {args.json} holds what was solved")
        return 130
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
