"""A search that plays a script, for tests of the command line around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from kvcore.cli import solve as solve_module
from kvcore.cli.app import app
from kvcore.cli.settings import Job
from kvcore.engine.events import EngineStats
from kvcore.eval import solving as solving_module
from kvcore.search import Prompt
from kvcore.search.results import (
    Aborted,
    CandidateCount,
    KvBytes,
    ProblemEnded,
    ProblemStarted,
    Solution,
    Step,
    StepCommitted,
    TokenCount,
    Tokens,
    Warned,
)

STEPS = (
    Step("base", 1, "First [b]3[/b].\n\n", (5, 6, 7), 0.25, "step"),
    Step("helper", 0, "So \\boxed{42}.", (8, 9), None, "eos", flag="blank"),
)
SOLUTION = Solution(
    problem=0,
    question="q?",
    text="".join(step.text for step in STEPS),
    token_ids=(5, 6, 7, 8, 9),
    steps=STEPS,
    tokens=Tokens(TokenCount(30, 4), TokenCount(20, 5), TokenCount(0, 60)),
    aborted=Aborted(entropy=1, gzip=2, repetition=3, nan=4),
    finish="eos",
    error=None,
    evictions=100,
    kv_bytes=KvBytes(peak=2048, full=8192),
    seconds=1.5,
    candidates=CandidateCount(base=40, helper=20),
)
RESULT_KEYS = {
    "version": None,
    "id": None,
    "question": None,
    "answer": None,
    "gold": None,
    "correct": None,
    "finish": None,
    "error": None,
    "text": None,
    "steps": None,
    "tokens": {"base", "helper", "scorer"},
    "aborted": {"entropy", "gzip", "repetition", "nan"},
    "kv_bytes": {"peak", "full"},
    "evictions": None,
    "seconds": None,
    "candidates": {"base", "helper"},
    "fed": {"base", "helper", "scorer"},
}


def run(*args: str | Path, scorer: str | None = "random") -> Result:
    """One command. ``solve`` gets ``scorer``, unless it is None or ``args`` have a later one."""
    given = [str(arg) for arg in args]
    if given[:1] == ["solve"] and scorer is not None:
        given[1:1] = ["--scorer", scorer]
    return CliRunner().invoke(app, given)


def make_model_dir(parent: Path) -> Path:
    """A directory that passes for a checkpoint until it is opened."""
    folder = parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


class FakeSearch:
    """Plays a script instead of a search: one solution per question, then what ``script`` does."""

    script: Callable[[FakeSearch], None] = staticmethod(lambda search: None)

    def __init__(self, base: Any, prompts: Sequence[Prompt], **options: Any) -> None:
        self.options = options
        self.emit = options["on_event"]
        self.questions = [prompt.question for prompt in prompts]
        self.solutions: list[Solution] = []
        base.stats.generated_tokens = 30

    def run(self) -> Iterator[Solution]:
        self.emit(Warned("different tokenizers"))
        # The last question finishes first: order of the result is not order of finishing.
        for problem, question in reversed(list(enumerate(self.questions))):
            self.emit(ProblemStarted(problem, question, 10, 0))
            for i, step in enumerate(STEPS):
                self.emit(committed(problem, i, step))
            solution = replace(SOLUTION, problem=problem, question=question)
            self.solutions.append(solution)
            self.emit(ProblemEnded(solution))
            yield solution
        self.script(self)


def committed(problem: int, number: int, step: Step) -> StepCommitted:
    return StepCommitted(
        problem=problem,
        step=number,
        source=step.source,
        index=step.index,
        tokens=step.tokens,
        text=step.text,
        score=step.score,
        finish=step.finish,
        flag=step.flag,
        context=12,
        base_slots=12,
        base_bytes=100,
        helper_slots=0,
        helper_bytes=0,
        evictions=0,
    )


def install_fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeSearch]:
    """Replaces models and search; the class returned can be given a script."""

    class Fake(FakeSearch):
        pass

    def load(job: Job, console: Console) -> Any:
        engine = SimpleNamespace(stats=EngineStats())
        return SimpleNamespace(solver=engine, helper=None, scorer=None, generated_tokens=30)

    monkeypatch.setattr(solve_module, "_load", load)
    monkeypatch.setattr(solving_module, "Search", Fake)
    return Fake


def check_result(result: dict[str, Any], *, alone: bool = False) -> None:
    """``alone``: the only question of its run, with the run's own keys beside."""
    beside = ["settings", "versions"] if alone else []
    assert list(result) == [*RESULT_KEYS, *beside]
    for name, keys in RESULT_KEYS.items():
        assert keys is None or set(result[name]) == keys
    assert all(
        set(step) == {"source", "text", "score", "tokens", "finish", "flag"}
        for step in result["steps"]
    )
