"""Checks of values, in the one form that all settings use; free of torch.

Every function raises ``ValueError`` naming the field, what was expected and what came.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

# Largest values of the types that settings become in the core.
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def require(condition: bool, field_name: str, expected: str, got: Any) -> None:
    """Raise ``ValueError`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(f"{field_name}: expected {expected}, got {got!r}")


def is_int(value: Any) -> bool:
    """An int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite int or float, no bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        return False


def as_float32(value: float) -> float:
    """``value`` as the core holds it; infinite beyond its range."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def is_float32(value: Any) -> bool:
    """A number that float32 holds, not rounded to infinity, nor to 0 unless it is 0."""
    if not is_number(value):
        return False
    rounded = as_float32(value)
    return math.isfinite(rounded) and (rounded != 0) == (value != 0)


def require_bool(value: Any, field_name: str) -> None:
    """Raise ``ValueError`` unless ``value`` is a bool."""
    require(isinstance(value, bool), field_name, "a bool", value)


def require_int(value: Any, field_name: str, low: int, high: int | None = None) -> None:
    """Raise ``ValueError`` unless ``value`` is an int in [low, high]."""
    too_high = is_int(value) and high is not None and value > high
    # The limit of a type is worth telling to those who ran into it only.
    bounded = high is not None and (too_high or high not in (INT32_MAX, INT64_MAX))
    bound = f"an integer in [{low}, {high}]" if bounded else f"an integer >= {low}"
    require(is_int(value) and value >= low and not too_high, field_name, bound, value)


def require_number(value: Any, field_name: str, low: float, high: float) -> None:
    """Raise ``ValueError`` unless ``value`` is a number in [low, high]."""
    ok = is_number(value) and low <= value <= high
    require(ok, field_name, f"a number in [{low:g}, {high:g}]", value)


def require_one_of(value: Any, field_name: str, names: Sequence[str]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``names``."""
    expected = " or ".join(repr(name) for name in names)
    require(isinstance(value, str) and value in names, field_name, expected, value)
