"""The command line on real (tiny, random) models, in its own process where signals matter."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models
from support.cli_tools import check_result
from typer.testing import CliRunner, Result

from kvcore.cli.app import app
from kvcore.search.trace import read_trace

SMALL = ["--max-step-tokens", "24", "--max-steps", "3", "--max-tokens", "300", "-n", "2"]
SMALL += ["--kv-gb", "0.05", "--max-seqs", "16"]
SAWTOOTH = ["--cadence", "sawtooth", "--headroom", "16"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "base": tiny_models.save_model(root / "base", seed=1),
        "helper": tiny_models.save_model(root / "helper", "qwen3", seed=2),
        "prm": tiny_models.save_prm(root / "prm", seed=3),
    }


def solve(*args: object) -> Result:
    return CliRunner().invoke(app, ["solve", "--scorer", "loglik", *map(str, args)])


def test_rescue_gives_the_promised_result_twice(models: dict[str, Path], tmp_path: Path) -> None:
    results: list[dict[str, Any]] = []
    for name in ("a", "b"):
        out, trace = tmp_path / f"{name}.json", tmp_path / f"{name}.jsonl"
        flags = ["--base", models["base"], "--helper", models["helper"], "--question", "2 + 2?"]
        flags += ["--budget", 16, *SAWTOOTH, "--n-helper", 1, "--seed", 5]
        done = solve(*flags, *SMALL, "--json", out, "--trace", trace)
        assert done.exit_code == 0, done.output
        results.append(json.loads(out.read_text()))
        events = read_trace(trace).events
        assert [e["event"] for e in events if e["event"] != "candidate"] == [
            "problem_start",
            *["step"] * len(results[-1]["steps"]),
            "problem_end",
        ]
        assert sum(e["event"] == "candidate" for e in events) == 3 * len(results[-1]["steps"])
        assert events[-1]["text"] == results[-1]["text"]
    check_result(results[0], alone=True)
    assert results[0]["steps"]
    assert results[0]["evictions"] > 0
    assert 0 < results[0]["kv_bytes"]["peak"] < results[0]["kv_bytes"]["full"]
    assert results[0]["tokens"]["scorer"] > 0
    for result in results:
        del result["seconds"]
    assert results[0] == results[1]


@pytest.mark.parametrize("scorer", ["random", "loglik", "prm"])
@pytest.mark.parametrize("budget", [None, 16])
def test_best_of_n_runs_with_every_scorer(
    models: dict[str, Path], tmp_path: Path, scorer: str, budget: int | None
) -> None:
    flags = ["--base", models["base"], "--question", "2 + 2?", "--json", tmp_path / "out.json"]
    flags += ["--scorer", f"prm:{models['prm']}" if scorer == "prm" else scorer]
    flags += [] if budget is None else ["--budget", budget, *SAWTOOTH]
    done = solve(*flags, *SMALL)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out.json").read_text())
    check_result(result, alone=True)
    assert result["tokens"]["helper"] == 0
    assert (result["evictions"] > 0) == (budget is not None)


def test_questions_of_a_file_are_solved_together(models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i} + {i}?"}) + "\n" for i in range(3)))
    out = tmp_path / "out.json"
    flags = ["--base", models["base"], "--helper", models["helper"], "--questions", file]
    assert solve(*flags, *SMALL, "--json", out).exit_code == 0
    several = json.loads(out.read_text())["solutions"]
    assert solve("--base", models["base"], "--helper", models["helper"], "--question", "0 + 0?",
                 *SMALL, "--json", out).exit_code == 0  # fmt: skip
    alone = json.loads(out.read_text())
    assert len(several) == 3
    assert several[0]["text"] == alone["text"]


def test_helper_with_another_tokenizer_is_said_once(
    models: dict[str, Path], tmp_path: Path
) -> None:
    other = shutil.copytree(models["helper"], tmp_path / "other")
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.add_tokens(["answer"])
    tokenizer.save_pretrained(other)
    done = solve("--base", models["base"], "--helper", other, "--question", "2?", *SMALL)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("different tokenizers") == 1


def test_question_longer_than_the_context_is_a_failure(models: dict[str, Path]) -> None:
    done = solve("--base", models["base"], "--question", "x" * 400, *SMALL, "--scorer", "random")
    assert done.exit_code == 1
    assert "error: --question: expected 1 to 299 prompt tokens" in done.stderr
    assert "Traceback" not in done.output


def test_one_failed_question_leaves_the_others(models: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--base", models["base"], "--scorer", "random", "--json", out]
    done = solve(*flags, *SMALL, "--question", "2?", "--question", "x" * 400)
    assert done.exit_code == 1
    assert "1 of 2 questions failed; question 2: " in done.stderr
    first, second = json.loads(out.read_text())["solutions"]
    assert first["steps"] and not second["steps"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True}, "sliding"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
@pytest.mark.parametrize("role", ["base", "helper"])
def test_refused_model_is_named_with_the_reason(
    models: dict[str, Path], tmp_path: Path, change: dict[str, Any], message: str, role: str
) -> None:
    folder = shutil.copytree(models["base"], tmp_path / "refused")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    directories = {"base": models["base"], "helper": models["helper"], role: folder}
    flags = [part for name, path in directories.items() for part in (f"--{name}", path)]
    done = solve(*flags, "--question", "2?", *SMALL)
    assert done.exit_code == 1, done.output
    assert f"error: --{role}: " in done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_scorer_must_be_a_reward_model(models: dict[str, Path]) -> None:
    done = solve("--base", models["base"], "--scorer", models["helper"], "--question", "2?", *SMALL)
    assert done.exit_code == 1
    assert "error: --scorer: " in done.stderr


def test_damaged_weights_are_a_failure(models: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(models["base"], tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"not weights")
    done = solve("--base", folder, "--question", "2?", *SMALL)
    assert done.exit_code == 1
    assert "error: --base: cannot load weights" in done.stderr


def test_eviction_that_never_fired_is_said(models: dict[str, Path]) -> None:
    done = solve("--base", models["base"], "--question", "2?", *SMALL, "--budget", 4096)
    assert done.exit_code == 0, done.output
    assert "eviction was asked for (rkv, budget 4096) and never fired" in done.stdout


def test_ctrl_c_in_a_run_keeps_a_readable_trace(models: dict[str, Path], tmp_path: Path) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    command = [sys.executable, "-m", "kvcore.cli", "solve", "--base", models["base"]]
    command += ["--scorer", "random", "--question", "count", "--max-step-tokens", "8"]
    command += ["--max-tokens", "4096", "--no-detector", "--trace", trace, "--json", out]
    # A background job inherits an ignored SIGINT, which its children would ignore as well.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 300
        while not trace.exists() or len(trace.read_text().splitlines()) < 30:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stderr.strip() == "interrupted: 0 of 1 questions solved"
    events = read_trace(trace).events
    assert events[-1]["event"] == "problem_end"
    assert events[-1]["finish"] == "interrupted"
    assert len(json.loads(out.read_text())["steps"]) == events[-1]["steps"] > 0
