"""What the command line shows and writes, whatever ends the run. The search is a fake."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.cli_tools import (
    SOLUTION,
    STEPS,
    FakeSearch,
    check_result,
    committed,
    install_fake,
    make_model_dir,
    run,
)
from test_trace import FullDisk

import kvcore
from kvcore.cli import solve as solve_module
from kvcore.cli.report import format_bytes
from kvcore.cli.screen import Screen, printable
from kvcore.eval import Problem
from kvcore.eval.records import Record
from kvcore.search.results import (
    SCHEMA_VERSION,
    ProblemEnded,
    ProblemStarted,
)
from kvcore.search.trace import SCHEMA, TraceWriter, read_trace


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeSearch]:
    return install_fake(monkeypatch)


def test_json_of_one_question_has_exactly_the_promised_keys(
    fake: type[FakeSearch], model_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    assert run("solve", "--base", model_dir, "--question", "q?", "--json", out).exit_code == 0
    result = json.loads(out.read_text())
    check_result(result, alone=True)
    assert result["answer"] == "42"
    assert (result["id"], result["question"], result["finish"]) == ("0", "q?", "eos")
    assert (result["error"], result["gold"], result["correct"]) == (None, None, None)
    assert result["aborted"]["nan"] == 4
    assert result["settings"]["search"]["n"] == 8
    assert set(result["versions"]) == {"kvcore", "torch", "transformers", "python"}
    assert result["tokens"] == {"base": 30, "helper": 20, "scorer": 60}
    assert result["steps"][1] == {
        "source": "helper",
        "text": "So \\boxed{42}.",
        "score": None,
        "tokens": 2,
        "finish": "eos",
        "flag": "blank",
    }
    assert result["kv_bytes"] == {"peak": 2048, "full": 8192}
    assert list(tmp_path.glob("*.part")) == []


def test_json_of_several_questions_keeps_their_order(
    fake: type[FakeSearch], model_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    fake.script = staticmethod(lambda search: search.solutions.sort(key=lambda s: -s.problem))
    args = ["--question", "a", "--question", "b", "--json", str(out)]
    assert run("solve", "--base", model_dir, *args).exit_code == 0
    content = json.loads(out.read_text())
    assert list(content) == ["solutions", "settings", "versions"]
    assert len(content["solutions"]) == 2
    for result in content["solutions"]:
        check_result(result)


def test_output_shows_steps_answer_and_summary_without_colours(
    fake: type[FakeSearch], model_dir: Path
) -> None:
    result = run("solve", "--base", model_dir, "--question", "q?", "--budget", "64")
    out = result.stdout
    assert out.isascii()
    assert "\x1b" not in out
    assert "note: different tokenizers" in out
    assert "[step 1, base, score 0.250]\nFirst [b]3[/b].\n" in out
    assert "[step 2, helper, not scored, blank]\nSo \\boxed{42}.\n" in out
    assert "answer: 42\n" in out
    assert "2 (base 1, helper 1)" in out
    assert "base 30, helper 20, scorer read 60" in out
    assert "10 (entropy 1, gzip 2, repetition 3, nan 4); early exit ends 15% of candidates" in out
    assert "2 KiB" in out and "8 KiB" in out and "25%" in out
    assert "never fired" not in out


def test_text_of_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07c\td\n\x9b") == "a\ufffd[2Jb\ufffd\ufffdc\td\n\ufffd"


def test_steps_are_coloured_by_source_on_a_terminal() -> None:
    console = Console(force_terminal=True, color_system="standard", width=80, record=True)
    with (
        console.capture() as capture,
        Screen(console, 1, lambda: 7, lambda s: Record.of(Problem("0", "q?", ""), s)) as screen,
    ):
        screen.on_event(ProblemStarted(0, "q?", 10, 0))
        for i, step in enumerate(STEPS):
            screen.on_event(committed(0, i, step))
        live = "\n".join(str(part) for part in screen._render().renderables[1:])
    assert "generating step 3, context 12 tokens" in live
    text = capture.get()
    assert "\x1b[36mFirst" in text
    assert "\x1b[33mSo " in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (57344, "56 KiB"), (3 << 30, "3 GiB")],
)
def test_bytes_are_shown_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


# ---- traces and failures -------------------------------------------------------------------------


def test_trace_has_settings_and_every_event(
    fake: type[FakeSearch], model_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    args = ["--question", "q?", "--budget", "64", "--trace", str(path)]
    assert run("solve", "--base", model_dir, *args).exit_code == 0
    trace = read_trace(path)
    assert trace.version == kvcore.__version__
    assert trace.settings["eviction"]["budget"] == 64
    assert trace.settings["questions"] == ["q?"]
    names = [event["event"] for event in trace.events]
    assert names == ["warning", "problem_start", "step", "step", "problem_end"]
    assert SCHEMA == SCHEMA_VERSION


def test_interrupt_keeps_trace_and_results_and_exits_130(
    fake: type[FakeSearch], model_dir: Path, tmp_path: Path
) -> None:
    def interrupt(search: FakeSearch) -> None:
        search.solutions[-1] = replace(search.solutions[-1], finish="interrupted")
        search.emit(ProblemEnded(search.solutions[-1]))
        raise KeyboardInterrupt

    fake.script = staticmethod(interrupt)
    path, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    args = ["--question", "p?", "--question", "q?", "--question", "r?"]
    args += ["--trace", str(path), "--json", str(out)]
    result = run("solve", "--base", model_dir, *args)
    assert result.exit_code == 130
    assert "interrupted: 2 of 3 questions solved" in result.stderr
    assert "Traceback" not in result.output
    last = read_trace(path).events[-1]
    assert (last["event"], last["problem"], last["finish"]) == ("problem_end", 0, "interrupted")
    solutions = json.loads(out.read_text())["solutions"]
    assert [s["finish"] for s in solutions] == ["interrupted", "eos", "eos"]


def test_full_disk_ends_the_run_and_keeps_the_trace(
    fake: type[FakeSearch], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["--question", "q?", "--question", "r?", "--trace", str(tmp_path / "t.jsonl")]
    assert run("solve", "--base", model_dir, *args).exit_code == 0
    disk = FullDisk((tmp_path / "t.jsonl").stat().st_size - 700, chunk=100)
    monkeypatch.setattr(
        solve_module, "TraceWriter", lambda path, **header: TraceWriter(disk, **header)
    )
    out = tmp_path / "out.json"
    result = run("solve", "--base", model_dir, *args, "--json", out)
    assert result.exit_code == 1
    [finished] = json.loads(out.read_text())["solutions"]
    check_result(finished)
    assert "error: trace disk: No space left on device; the first" in result.stderr
    assert "Traceback" not in result.output
    (tmp_path / "kept.jsonl").write_bytes(disk.data)
    kept = read_trace(tmp_path / "kept.jsonl")
    assert not kept.cut
    assert 5 <= len(kept.events) < 9
    assert f"the first {len(kept.events) + 1} lines are kept" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flag", ["--trace", "--json"])
def test_dev_full_is_a_failure(fake: type[FakeSearch], model_dir: Path, flag: str) -> None:
    result = run("solve", "--base", model_dir, "--question", "q?", flag, "/dev/full")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr


def test_unexpected_error_shows_a_traceback_only_with_debug(
    fake: type[FakeSearch], model_dir: Path
) -> None:
    def fail(search: FakeSearch) -> None:
        raise KeyError("inside")

    fake.script = staticmethod(fail)
    result = run("solve", "--base", model_dir, "--question", "q?")
    assert result.exit_code == 1
    assert "error: KeyError: 'inside' (--debug shows where)" in result.stderr
    assert "Traceback" not in result.output
    result = run("solve", "--base", model_dir, "--question", "q?", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr


def test_failed_question_is_a_failure_with_its_reason(
    fake: type[FakeSearch], model_dir: Path
) -> None:
    def fail(search: FakeSearch) -> None:
        search.solutions[0] = replace(SOLUTION, finish="error", error="prompt: expected less")

    fake.script = staticmethod(fail)
    result = run("solve", "--base", model_dir, "--question", "q?")
    assert result.exit_code == 1
    assert "error: prompt: expected less\n" in result.stderr


def test_version_and_doctor() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"kvcore {kvcore.__version__}\n")
    result = run("doctor")
    assert result.exit_code == 0
    assert kvcore.__version__ in result.stdout


def test_command_line_starts_without_torch() -> None:
    code = (
        "import sys, kvcore.cli; "
        "print([m for m in ('torch', 'transformers', 'math_verify') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
