"""Where the demo's entropy threshold comes from: base candidates that each threshold would end.

    python bench/demo_calibration.py --problems 200

Solves problems of the calibration set by KV-Rescue with a detector that never fires, and asks of
every base candidate whether the task's checker calls it right and how high its windowed mean
entropy rose. A good threshold ends few right candidates and many wrong ones. The test set is never
looked at.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from kvcore.demo import settings as demo
from kvcore.demo.rows import Settings, load_models, run_row
from kvcore.search import CandidateEnded, StepCommitted, TraceEvent

NEVER = 1e9
WINDOWS = (1, 2, 3, 4)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--problems", type=int, default=200)
    add("--budget", type=int, default=demo.BUDGET)
    add("--weights", type=Path, help="folder of base, helper and prm; the package's if not given")
    args = parser.parse_args()
    models = load_models(args.weights)
    settings = Settings(args.budget, demo.N, demo.POLICY, args.problems, 0, "calibration")
    chosen = settings.draw()
    print("| window | threshold | right candidates ended | wrong candidates ended |")
    print("| --- | --- | --- | --- |")
    for window in WINDOWS:
        detector = replace(
            demo.DETECTOR, entropy_window=window, entropy_guard=window, entropy_threshold=NEVER
        )
        config = replace(demo.search_config(demo.N, 0), detector=detector)
        committed: dict[int, list[str]] = {i: [] for i in range(len(chosen))}
        waiting: dict[int, list[CandidateEnded]] = {}
        right: list[float] = []
        wrong: list[float] = []

        def on_event(
            event: TraceEvent,
            committed: dict[int, list[str]] = committed,
            waiting: dict[int, list[CandidateEnded]] = waiting,
            right: list[float] = right,
            wrong: list[float] = wrong,
        ) -> None:
            if isinstance(event, CandidateEnded) and event.source == "base":
                waiting.setdefault(event.problem, []).append(event)
            elif isinstance(event, StepCommitted):
                expected = chosen[event.problem].expected(committed[event.problem]).strip()
                for candidate in waiting.pop(event.problem, []):
                    ok = candidate.text.strip() == expected
                    (right if ok else wrong).append(candidate.max_entropy)
                committed[event.problem].append(event.text)

        run_row("rescue", models, settings, chosen, config=config, on_event=on_event)
        for threshold in THRESHOLDS:
            ended = [
                sum(x > threshold for x in entropies) / len(entropies)
                for entropies in (right, wrong)
            ]
            print(f"| {window} | {threshold} | {ended[0]:.2%} | {ended[1]:.1%} |", flush=True)
        print(f"<!-- {len(right)} right and {len(wrong)} wrong base candidates -->")


if __name__ == "__main__":
    main()
