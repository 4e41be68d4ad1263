"""What a run came to: the JSON result and the summary table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.eval.datasets import Problem
from kvcore.eval.records import Record, early_exit_share, versions
from kvcore.files import finite, write_json
from kvcore.search.results import Aborted, FinishReason, KvBytes, Solution, Tokens

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def not_started(problem: Problem, reason: str | None) -> Record:
    """A problem of which nothing was tried; ``reason`` is None for an interruption."""
    finish: FinishReason = "interrupted" if reason is None else "error"
    question = problem.question
    solution = Solution(
        0, question, "", (), (), Tokens(), Aborted(), finish, reason, 0, KvBytes(), 0.0
    )
    return Record.of(problem, solution)


def write_records(
    path: Path, records: Sequence[Record], *, several: bool, settings: Mapping[str, Any]
) -> None:
    """``several``: ``{"solutions": [...]}`` in the given order; else the one record as itself.

    ``settings`` and the versions stand beside, once. The file appears whole or not at all.
    Raises OSError.
    """
    objects = [record.to_json() for record in records]
    for told in objects:
        del told["settings"], told["versions"]
    content = {"solutions": objects} if several else objects[0]
    write_json(path, finite({**content, "settings": settings, "versions": versions()}))


def format_bytes(count: float) -> str:
    """``count`` with a binary unit and three significant digits."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"


def _steps_text(records: Sequence[Record]) -> str:
    steps = [step for record in records for step in record.steps]
    sources = Counter(step.source for step in steps)
    text = f"{sources.total()} (base {sources['base']}, helper {sources['helper']})"
    flags = Counter(step.flag for step in steps if step.flag)
    if flags:
        text += "; " + ", ".join(f"{name} {count}" for name, count in sorted(flags.items()))
    return text


def _aborted_text(records: Sequence[Record]) -> str:
    names = ("entropy", "gzip", "repetition", "nan")
    counts = {name: sum(getattr(r.aborted, name) for r in records) for name in names}
    fired = [f"{name} {count}" for name, count in counts.items() if count]
    text = f"{sum(counts.values())}" + (f" ({', '.join(fired)})" if fired else "")
    share = early_exit_share(records)
    return text if share is None else f"{text}; early exit ends {share:.0%} of candidates"


def summary_rows(records: Sequence[Record], seconds: float) -> list[tuple[str, str]]:
    """The figures of the whole run, named; ``seconds`` is its wall time after loading."""
    graded = [record.correct for record in records if record.gold is not None]
    base = sum(r.tokens.base for r in records)
    helper = sum(r.tokens.helper for r in records)
    scorer = sum(r.tokens.scorer for r in records)
    peak = max((r.kv_bytes.peak for r in records), default=0)
    full = max((r.kv_bytes.full for r in records), default=0)
    rate = (base + helper) / seconds if seconds > 0 else 0.0
    kv = f"{format_bytes(peak)} at most for one sequence, full cache {format_bytes(full)}"
    if full:
        kv += f" ({peak / full:.0%})"
    right = [("right", f"{sum(map(bool, graded))} of {len(graded)}")] if graded else []
    return [
        *right,
        ("steps", _steps_text(records)),
        ("tokens", f"base {base}, helper {helper}, scorer read {scorer}"),
        ("aborted", _aborted_text(records)),
        ("speed", f"{rate:.1f} tokens/s, {seconds:.1f} s"),
        ("base KV", kv),
        ("evicted", f"{sum(r.evictions for r in records)} entries per lane"),
        (
            "ended by",
            ", ".join(f"{k} {v}" for k, v in Counter(r.finish for r in records).items()),
        ),
    ]
