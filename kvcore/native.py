"""The compiled core. Import ``_C`` from here, never directly.

torch comes first: the core runs its loops on the OpenMP runtime that the process already carries,
and looks for it once. The core then uses as many threads as torch, unless KVCORE_NUM_THREADS says
otherwise; ``follow_torch_threads`` keeps it so when torch's number changes.
"""

import os

import torch

import kvcore

try:
    from kvcore import _C
except ImportError as error:
    raise ImportError(
        f"kvcore._C cannot be loaded ({error}). kvcore was imported from "
        f"{os.path.dirname(kvcore.__file__)}; if that is a source tree, install it with "
        "'pip install .' and run from another directory"
    ) from error

if _C.version() != kvcore.__version__:
    raise ImportError(
        f"kvcore is version {kvcore.__version__}, its extension {_C.version()}: "
        "reinstall with 'pip install --force-reinstall --no-deps .'"
    )

_MAX_THREADS = 1024  # of the core


def follow_torch_threads() -> None:
    """Make the core use as many threads as torch does now, unless KVCORE_NUM_THREADS is set."""
    wanted = min(torch.get_num_threads(), _MAX_THREADS)
    if wanted != _C.num_threads() and not os.environ.get("KVCORE_NUM_THREADS"):
        _C.set_num_threads(wanted)


follow_torch_threads()

InternalError = _C.InternalError
OutOfBlocks = _C.OutOfBlocks
KvStore = _C.KvStore

__all__ = ["_C", "InternalError", "KvStore", "OutOfBlocks", "follow_torch_threads"]
