"""The GSM8K comparison runs every method, goes on where it ended, and guards its result file."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from support import tiny_models

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "gsm8k_rescue.py"
METHODS = ["full", "evicted", "rescue", "helper"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    tiny_models.save_model(folder / "base", seed=1)
    tiny_models.save_model(folder / "helper", "qwen3", seed=2)
    rows = [{"question": f"{i} + 1?", "answer": f"so\n#### {i + 1}"} for i in range(2)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@dataclass
class Outcome:
    returncode: int
    stdout: str
    stderr: str


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_rescue", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(folder: Path, *extra: str) -> Outcome:
    """Runs the script in this process."""
    paths = {"base": "base", "helper": "helper", "data": "gsm8k.jsonl", "json": "out.jsonl"}
    flags = [part for name, path in paths.items() for part in (f"--{name}", str(folder / path))]
    flags += ["--problems", "2", "-n", "2", "--budget", "16", "--max-tokens", "260"]
    flags += ["--max-step-tokens", "16", "--max-steps", "2", "--kv-gb", "0.05"]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(SCRIPT), *flags, *extra]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = load_script().main()
        except SystemExit as leave:  # argparse
            code = int(leave.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """The result file by method and id of the question."""
    _, *lines = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        method, _, one = line.pop("key").partition("/")
        if one:
            found.setdefault(method, {})[one] = line
    return found


def test_methods_are_compared_and_a_second_run_only_adds(folder: Path) -> None:
    first = compare(folder, "--methods", "full,rescue")
    assert first.returncode == 0, first.stderr
    before = records(folder)
    assert list(before) == ["full", "rescue"]
    second = compare(folder)
    assert second.returncode == 0, second.stderr
    after = records(folder)
    assert sorted(after) == sorted(METHODS)
    for name, kept in before.items():
        assert after[name] == kept
    for name, kept in after.items():
        assert sorted(kept) == ["0", "1"]
        for record in kept.values():
            assert record["error"] is None
            assert (record["tokens"]["helper"] > 0) == (name == "rescue")
            assert record["tokens"]["scorer"] > 0
    table = second.stdout.strip().splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in table[2:]] == [
        "base, full KV",
        "base, evicted",
        "KV-Rescue",
        "helper, full KV",
    ]
    assert len({line.count("|") for line in table}) == 1


def test_a_lost_question_is_solved_again_with_the_same_result(folder: Path) -> None:
    assert compare(folder).returncode == 0
    kept = records(folder)["rescue"]["1"]
    lines = (folder / "out.jsonl").read_text().splitlines(keepends=True)
    less = [line for line in lines if json.loads(line).get("key") != "rescue/1"]
    assert len(less) == len(lines) - 1
    (folder / "out.jsonl").write_text("".join(less))
    assert compare(folder).returncode == 0
    again = records(folder)["rescue"]["1"]
    assert again["text"] == kept["text"]
    assert again["tokens"] == kept["tokens"]


def test_results_of_other_settings_are_refused(folder: Path) -> None:
    assert compare(folder).returncode == 0
    done = compare(folder, "--seed", "1")
    assert done.returncode == 1
    assert "holds results of other settings" in done.stderr


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--problems", "3"], "--problems: expected at most 2, got 3"),
        (["--methods", "full,best"], "--methods: expected some of"),
        (["--data", "no.jsonl"], "expected a readable JSONL file"),
        (["--budget", "0"], "budget: expected an integer >= 1"),
        (["--scorer", "best"], "--scorer: expected loglik, random or prm:DIR"),
        (["--base", "no"], "--base: expected a model directory"),
    ],
)
def test_wrong_input_is_one_clear_message(folder: Path, extra: list[str], message: str) -> None:
    done = compare(folder, "--json", str(folder / "other.jsonl"), *extra)
    assert done.returncode == (2 if extra[0] == "--methods" else 1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
