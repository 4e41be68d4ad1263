"""Random use of engines with interruptions at random places, for as long as one likes:

    python fuzz_engine.py --seconds 60 --seed 0

Every engine has the seed that is printed when something is found.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from support.engine_fuzz import fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0, help="of the first engine")
    parser.add_argument("--changes", type=int, default=160, help="random things per engine")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    total: Counter[str] = Counter()
    seed = arguments.seed
    while time.monotonic() < end:
        total.update(fuzz(seed, arguments.changes))
        seed += 1
    print(f"{seed - arguments.seed} engines from seed {arguments.seed}: {dict(total)}")


if __name__ == "__main__":
    main()
