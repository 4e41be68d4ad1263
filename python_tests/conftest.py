"""Makes the tests see the installed kvcore, not the source tree, which has no extension."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if not list((ROOT / "kvcore").glob("_C*.so")):  # an in-place build may be used from the tree
    sys.path = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
