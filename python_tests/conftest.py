"""Makes the tests see the installed kvcore, not the source tree, which has no extension."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

if not list((ROOT / "kvcore").glob("_C*.so")):  # an in-place build may be used from the tree
    sys.path = [entry for entry in sys.path if Path(entry).resolve() != ROOT]


@pytest.fixture(params=[True, False], ids=["dlpack", "attributes"])
def way(request: pytest.FixtureRequest) -> Iterator[bool]:
    """How the extension reads tensors."""
    from kvcore.native import _C

    before = _C.uses_dlpack()
    _C.set_uses_dlpack(request.param)
    yield request.param
    _C.set_uses_dlpack(before)


@pytest.fixture
def ctrl_c() -> Iterator[int]:
    """SIGINT interrupts, as at a terminal: a shell's background jobs are started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.SIGINT
    signal.signal(signal.SIGINT, before)
