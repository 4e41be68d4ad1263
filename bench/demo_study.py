"""What eviction costs the demo's base model and what KV-Rescue gives back, measured at length.

    python bench/demo_study.py --json study.jsonl

Held-out problems, several seeds (other problems and other draws each). Four tables:

    methods    full KV, evicted best-of-N, helper alone, KV-Rescue (mean and spread over seeds)
    oracle     a problem counts as solved if the evicted base model or the helper solved it
               (KV-Rescue, figure 1a)
    budgets    accuracy and the share of helper steps by budget (figure 6)
    ablation   best-of-N, + interleaving, + early exit (table 2)

The file, one JSON object a line, gets every run as it ends; a study with the same settings goes on
where it ends. The tables are printed last, as Markdown.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from kvcore.demo import settings as demo
from kvcore.demo.rows import METHODS, Models, Settings, load_models, run_row, title
from kvcore.eval import Results
from kvcore.native import set_threads

BUDGETS = (16, 32, 64, 96, 128, 160)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", required=True, type=Path, help="results, continued if the file exists")
    add("--weights", type=Path, help="folder of base, helper and prm; the package's if not given")
    add("--problems", type=int, default=170, help="per seed")
    add("--seeds", type=int, default=3)
    add("--budget", type=int, default=demo.BUDGET)
    add("--budgets", default=",".join(map(str, BUDGETS)))
    add("-n", type=int, default=demo.N)
    add("--policy", default=demo.POLICY)
    add("--split", default="test", help="calibration, to choose settings by; never test")
    add("--threads", type=int)
    args = parser.parse_args()
    args.budgets = [int(budget) for budget in args.budgets.split(",") if budget]
    return args


class Study:
    """Runs by name; each result is kept in the JSON file and never computed twice."""

    def __init__(self, args: argparse.Namespace, models: Models) -> None:
        self.args = args
        self._models = models
        names = ("problems", "n", "policy", "split")
        try:
            self.runs = Results(args.json, {name: getattr(args, name) for name in names})
        except (ValueError, OSError) as error:
            sys.exit(f"error: --json: {error}")

    def run(self, method: str, budget: int, seed: int, *, detector: bool = True) -> dict[str, Any]:
        evicts = method not in ("full", "helper")
        name = f"{method} seed={seed}" + (f" budget={budget}" if evicts else "")
        if method == "rescue" and not detector:
            name += " without early exit"
        if name not in self.runs:
            args = self.args
            settings = Settings(budget, args.n, args.policy, args.problems, seed, args.split)
            config = demo.search_config(args.n, seed)
            config = config if detector else replace(config, detector=None)
            row, _ = run_row(method, self._models, settings, settings.draw(), config=config)
            right = "".join(str(int(ok)) for ok in row.right)
            self.runs.put(name, {**row.to_json(), "right": right})
            print(f"{name}: {row.accuracy:.1%}, {row.seconds:.0f} s", flush=True)
        return self.runs[name]


def spread(values: list[float], form: str = ".1%") -> str:
    """Mean and standard deviation over seeds."""
    if len(values) < 2:
        return format(values[0], form)
    return f"{mean(values):{form}} ± {stdev(values):{form}}"


def rule(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [rule(*header), rule(*["---"] * len(header)), *(rule(*row) for row in rows), ""]


def methods_table(study: Study, seeds: range, budget: int) -> list[str]:
    rows = []
    for method in METHODS:
        runs = [study.run(method, budget, seed) for seed in seeds]

        def of(key: str, form: str, runs: list[dict[str, Any]] = runs) -> str:
            return spread([run[key] for run in runs], form)

        share = [run["helper_steps"] / run["steps"] for run in runs]
        rows.append(
            (
                title(method, study.args.n),
                of("accuracy", ".1%"),
                of("base_tokens", ",.0f"),
                of("helper_tokens", ",.0f"),
                of("steps", ".1f"),
                spread(share),
                of("aborted", ",.0f"),
                of("unended", ".0f"),
                of("kv_bytes", ",.0f"),
                of("seconds", ".0f"),
            )
        )
    header = (
        "method",
        "accuracy",
        "base tokens",
        "helper tokens",
        "steps",
        "helper steps",
        "aborted",
        "runaway",
        "KV bytes per sequence",
        "seconds",
    )
    return table(header, rows)


def gaps(study: Study, seeds: range, budget: int) -> list[str]:
    full, evicted, helper, rescue = (
        [study.run(method, budget, seed) for seed in seeds]
        for method in ("full", "evicted", "helper", "rescue")
    )
    lost = [f["accuracy"] - e["accuracy"] for f, e in zip(full, evicted, strict=True)]
    back = [
        (r["accuracy"] - e["accuracy"]) / gap
        for r, e, gap in zip(rescue, evicted, lost, strict=True)
    ]
    saved = [1 - r["base_tokens"] / e["base_tokens"] for r, e in zip(rescue, evicted, strict=True)]
    behind = [f["accuracy"] - h["accuracy"] for f, h in zip(full, helper, strict=True)]
    either = [
        mean(a == "1" or b == "1" for a, b in zip(e["right"], h["right"], strict=True))
        for e, h in zip(evicted, helper, strict=True)
    ]
    return [
        f"- eviction loses {spread(lost)} of accuracy",
        f"- KV-Rescue recovers {spread(back)} of the loss",
        f"- KV-Rescue generates {spread(saved)} fewer base tokens than evicted best-of-N",
        f"- the helper alone is {spread(behind)} below the base model with a full cache",
        f"- oracle choice between the answers of evicted base and helper: {spread(either)}",
        "",
    ]


def budgets_table(study: Study, budgets: list[int]) -> list[str]:
    rows = []
    for budget in budgets:
        evicted, rescue = (study.run(method, budget, 0) for method in ("evicted", "rescue"))
        helper = study.run("helper", budget, 0)
        either = mean(
            a == "1" or b == "1" for a, b in zip(evicted["right"], helper["right"], strict=True)
        )
        rows.append(
            (
                str(budget),
                f"{evicted['accuracy']:.1%}",
                f"{either:.1%}",
                f"{rescue['accuracy']:.1%}",
                f"{rescue['helper_steps'] / rescue['steps']:.0%}",
                f"{1 - rescue['base_tokens'] / evicted['base_tokens']:.0%}",
                f"{rescue['kv_bytes']:,.0f}",
            )
        )
    header = (
        "budget",
        "evicted",
        "oracle of evicted and helper",
        "KV-Rescue",
        "helper steps",
        "base tokens saved",
        "KV bytes per sequence",
    )
    return table(header, rows)


def ablation_table(study: Study, seeds: range, budget: int) -> list[str]:
    variants = (
        ("evicted best-of-N", "evicted", False),
        ("+ interleaving", "rescue", False),
        ("+ early exit (KV-Rescue)", "rescue", True),
    )
    rows = []
    for name, method, detector in variants:
        runs = [study.run(method, budget, seed, detector=detector) for seed in seeds]
        rows.append(
            (
                name,
                spread([run["accuracy"] for run in runs]),
                spread([run["unended"] / study.args.problems for run in runs]),
                spread([run["base_tokens"] / study.args.problems for run in runs], ".0f"),
                spread([run["steps"] for run in runs], ".1f"),
                spread([float(run["aborted"]) for run in runs], ",.0f"),
            )
        )
    header = ("", "accuracy", "runaway", "base tokens per problem", "steps", "aborted")
    return table(header, rows)


def main() -> None:
    args = parse_args()
    if args.threads is not None:
        set_threads(args.threads)
    study = Study(args, load_models(args.weights))
    seeds = range(args.seeds)
    text = [
        f"{args.problems} {args.split} problems per seed, {args.seeds} seeds, N = {args.n}, "
        f"policy {args.policy}, budget {args.budget} + {demo.PROTECT} newest entries; mean ± "
        "standard deviation over seeds.",
        "",
        *methods_table(study, seeds, args.budget),
        *gaps(study, seeds, args.budget),
        "## Ablation",
        "",
        *ablation_table(study, seeds, args.budget),
    ]
    if args.budgets:
        text += ["## Budgets (seed 0)", "", *budgets_table(study, args.budgets)]
    print("\n".join(text))


if __name__ == "__main__":
    main()
