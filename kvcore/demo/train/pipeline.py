"""Everything that ``python -m kvcore.demo.train`` does, in order, resumed where it stopped."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

import transformers

from kvcore.config import EvictionConfig
from kvcore.demo.settings import eviction_config
from kvcore.demo.train.card import MODELS, write_card
from kvcore.demo.train.labels import Labelled, read_labels, sample_labels, write_labels
from kvcore.demo.train.language import Recipe, train_language_model
from kvcore.demo.train.plan import Plan
from kvcore.demo.train.reward import train_reward_model
from kvcore.demo.weights import write_manifest
from kvcore.models import load_model
from kvcore.native import set_threads
from kvcore.train.bars import Bars
from kvcore.train.loop import Report


def _quieten(threads: int) -> None:
    """Thread count, and no progress bars but ours."""
    set_threads(threads)
    transformers.utils.logging.disable_progress_bar()


def _train_in_process(recipe: Recipe, out: Path, threads: int, channel: Any) -> None:
    _quieten(threads)
    parent = os.getppid()

    def report(*told: Any) -> None:
        if os.getppid() != parent:  # it was killed; whoever resumes must find nobody at work
            raise SystemExit(1)
        channel.put((recipe.name, told))

    try:
        train_language_model(recipe, out, report)
    except ValueError as error:  # of a checkpoint; anything else keeps its traceback
        channel.put((recipe.name, str(error)))


def train_side_by_side(
    recipes: list[Recipe], out: Path, threads: int, report: Callable[[str], Report]
) -> None:
    """Trains language models, one process each.

    Raises:
        ValueError: a checkpoint cannot be resumed.
        RuntimeError: a process died.
    """
    context = multiprocessing.get_context("spawn")
    channel = context.Queue()
    share = max(1, threads // len(recipes))
    processes = [
        context.Process(target=_train_in_process, args=(recipe, out, share, channel), daemon=True)
        for recipe in recipes
    ]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes) or not channel.empty():
            try:
                name, told = channel.get(timeout=0.5)
            except Empty:
                continue
            if isinstance(told, str):
                raise ValueError(told)
            report(name)(*told)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()
    for process, recipe in zip(processes, recipes, strict=True):
        if process.exitcode != 0:
            raise RuntimeError(f"training of {recipe.name} ended with code {process.exitcode}")


def make_labels(plan: Plan, out: Path, report: Report) -> list[Labelled]:
    """Labelled solutions from ``out/labels.jsonl``, which is made if it is not there."""
    path = out / "state" / "labels.jsonl"
    total = sum(count for _, count in plan.solutions)
    if path.exists():
        labelled = read_labels(path)
        if len(labelled) >= 0.99 * total:
            report(len(labelled), len(labelled), float("nan"))
            return labelled
    base, helper = (load_model(out / name, dtype="float32") for name in ("base", "helper"))
    labelled = []
    for i, (budget, count) in enumerate(plan.solutions):
        eviction = EvictionConfig() if budget is None else eviction_config("rkv", budget)
        for solution in sample_labels(base, helper, eviction, count, plan.seed + i):
            labelled.append(solution)
            report(len(labelled), total, float("nan"))
    write_labels(path, labelled)
    return labelled


def run(plan: Plan, out: Path, threads: int) -> None:
    """Everything, resumed where it stopped."""
    out.mkdir(parents=True, exist_ok=True)
    _quieten(threads)
    with Bars() as bars:
        train_side_by_side([plan.seedling], out, threads, bars.of)
        train_side_by_side([plan.base, plan.helper], out, threads, bars.of)
        labelled = make_labels(plan, out, bars.of("labels"))
        reward = train_reward_model(
            labelled,
            plan.reward,
            out,
            bars.of("prm"),
            drilled=plan.drilled,
            tokens=plan.reward_tokens,
            seed=plan.seed,
        )
    write_card(plan, out, labelled, reward)
    write_manifest(out, MODELS)
