"""The compiled core. Import ``_C`` from here, never directly.

torch comes first: the core runs its loops on the OpenMP runtime that the process already carries,
and looks for it once. The core then uses as many threads as torch, unless KVCORE_NUM_THREADS says
otherwise; ``follow_torch_threads`` keeps it so when torch's number changes.
"""

import os

import torch

import kvcore
from kvcore.config import require_int

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

# Bytes of the gzip file of ``golden_text()`` by the classic zlib; zlib-ng makes 143 more.
GOLDEN_GZIP_BYTES = 11943


def golden_text() -> bytes:
    """20,000 bytes that compressors of the same level bring to different sizes."""
    text, state = bytearray(b"abcdefghijklmnop"), 13
    while len(text) < 20_000:  # short pieces of what is there, each followed by a letter
        state = (state * 1103515245 + 12345) % 2**31
        begin = (state >> 8) % len(text)
        text += text[begin : begin + 2 + (state >> 20) % 3]
        text.append(97 + (state >> 16) % 26)
    return bytes(text[:20_000])


def check_gzip_size(size: int) -> None:
    """Refuses a compressor that is not the classic zlib, under which the detector was calibrated.

    Args:
        size: bytes of the gzip file of ``golden_text()``.
    Raises:
        ImportError: it is not ``GOLDEN_GZIP_BYTES``.
    """
    if size != GOLDEN_GZIP_BYTES:
        raise ImportError(
            f"zlib: expected the classic zlib, which compresses kvcore's test text to "
            f"{GOLDEN_GZIP_BYTES} bytes, got one that makes {size} (zlib-ng?): degenerate text "
            "would be ended at other tokens. Install the classic zlib in a directory of its own "
            "and run 'KVCORE_ZLIB_ROOT=DIR pip install --force-reinstall --no-deps .'"
        )


check_gzip_size(_C.gzip_size(golden_text()))

_MAX_THREADS = 1024  # of the core


def follow_torch_threads() -> None:
    """Make the core use as many threads as torch does now, unless KVCORE_NUM_THREADS is set."""
    wanted = min(torch.get_num_threads(), _MAX_THREADS)
    if wanted != _C.num_threads() and not os.environ.get("KVCORE_NUM_THREADS"):
        _C.set_num_threads(wanted)


follow_torch_threads()


def set_threads(threads: int) -> None:
    """Makes torch and the core use this many threads, from now on and whatever
    KVCORE_NUM_THREADS says. Outputs of the core never depend on it.

    Raises:
        ValueError: not an integer from 1 to 1024; nothing was changed.
    """
    require_int(threads, "threads", 1, _MAX_THREADS)
    _C.set_num_threads(threads)
    torch.set_num_threads(threads)


InternalError = _C.InternalError
OutOfBlocks = _C.OutOfBlocks
KvStore = _C.KvStore

__all__ = [
    "_C",
    "InternalError",
    "KvStore",
    "OutOfBlocks",
    "follow_torch_threads",
    "set_threads",
]
