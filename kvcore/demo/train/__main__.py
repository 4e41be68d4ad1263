"""Rebuilds the demo's three models from seeds.

    python -m kvcore.demo.train --out DIR

Base and helper are trained side by side, then they solve training problems whose steps are
labelled, then the process reward model is trained on those. A training that was stopped goes on
where it stopped when the command is run again with the same folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvcore.demo.train.card import MODELS
from kvcore.demo.train.pipeline import run
from kvcore.demo.train.plan import Plan


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvcore.demo.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder of the models and of what resumes them")
    add("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads in all")
    add("--share", type=float, default=1.0, help="share of all steps, to try it out (1)")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads: expected an integer >= 1, got {args.threads}")
    if not 0 < args.share <= 1:
        parser.error(f"--share: expected a number in (0, 1], got {args.share}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: expected a folder, got the file {str(args.out)!r}")
    return args


def main() -> int:
    args = parse_args()
    try:
        run(Plan().scaled(args.share), args.out, args.threads)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(f"{', '.join(MODELS)} are in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
