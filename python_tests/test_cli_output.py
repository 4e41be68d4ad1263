"""What the command line leaves behind whatever becomes of its output, its files and its user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import tiny_models
from support.cli_tools import FakeSearch, check_result, install_fake, make_model_dir, run

from kvcore.cli import demo as demo_module
from kvcore.cli.output import SafeOutput, one_interrupt
from kvcore.eval import grading
from kvcore.files import write_json

SMALL = ["--scorer", "random", "--max-step-tokens", "8", "--max-steps", "2", "-n", "2"]
SMALL += ["--kv-gb", "0.05", "--max-seqs", "16", "--max-tokens", "200"]
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_model(tmp_path_factory.mktemp("models") / "base", seed=1)


def command(base: Path, *args: object) -> list[str]:
    start = [sys.executable, "-m", "kvcore.cli", "solve", "--base", base]
    return [str(part) for part in [*start, *SMALL, *args]]


def test_p22_a_lone_surrogate_is_one_questions_error(base: Path, tmp_path: Path) -> None:
    file, out, trace = tmp_path / "q.jsonl", tmp_path / "out.json", tmp_path / "t.jsonl"
    questions = ["1 + 1?", "what is \ud83d?", "2 + 2?"]
    file.write_text("".join(json.dumps({"question": q, "id": q[0]}) + "\n" for q in questions))
    done = subprocess.run(
        command(base, "--questions", file, "--json", out, "--trace", trace),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "1 of 3 questions failed; question 2: --question: expected text that" in done.stderr
    first, second, third = json.loads(out.read_text(encoding="utf-8"))["solutions"]
    check_result(second)
    assert (second["finish"], second["id"]) == ("error", "w")
    assert "lone surrogate" in second["error"]
    assert first["steps"] and third["steps"] and first["error"] is third["error"] is None
    assert "ended by" in done.stdout


def test_bytes_of_the_command_line_that_are_no_text_are_one_questions_error(
    base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    args = command(base, "--question", "1?", "--json", out)
    done = subprocess.run(
        [*map(os.fsencode, args), b"--question", b"a\xff?"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    first, second = json.loads(out.read_text())["solutions"]
    assert first["steps"] and "lone surrogate" in second["error"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_standard_output_may_lack_characters(base: Path, tmp_path: Path, encoding: str) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        command(base, "--question", "\u4e16\u754c?", "--question", "b?", "--json", out),
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 0, done.stderr
    assert b"ended by" in done.stdout
    assert json.loads(out.read_text("utf-8"))["solutions"][0]["question"] == "\u4e16\u754c?"


def test_standard_output_may_be_closed_by_its_reader(base: Path, tmp_path: Path) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "t.jsonl"
    args = command(base, "--question", "1?", "--question", "2?", "--json", out, "--trace", trace)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(args, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert all(s["steps"] for s in json.loads(out.read_text())["solutions"])
    assert trace.read_text().count('"problem_end"') == 2


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_under_standard_output_is_said_at_the_end(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with open(FULL, "wb") as full:
        args = command(base, "--question", "1?", "--json", out)
        done = subprocess.run(args, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert b"standard output: OSError: [Errno 28] No space left" in done.stderr
    assert json.loads(out.read_text())["steps"]


class Picky:
    encoding = "ascii"

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.text = error, ""

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        text.encode(self.encoding)
        self.text += text
        return len(text)


def test_safe_output_replaces_and_gives_up_for_good() -> None:
    picky = Picky()
    assert SafeOutput(picky).write("a\u4e16\ud83d") == 3  # type: ignore[arg-type]
    assert picky.text == "a??"
    for error, said in [(BrokenPipeError(32, "x"), False), (OSError(28, "full"), True)]:
        output = SafeOutput(Picky(error))  # type: ignore[arg-type]
        assert [output.write("abc"), output.write("d")] == [3, 1]
        output.flush()
        assert (output.failure is error) == said
    assert SafeOutput(None).write("a") == 1


def test_only_the_first_interrupt_is_heeded() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with one_interrupt():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


# ---- the result file -----------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeSearch]:
    return install_fake(monkeypatch)


def test_gold_answers_are_graded_and_shown(fake: type[FakeSearch], tmp_path: Path) -> None:
    file, out = tmp_path / "q.jsonl", tmp_path / "out.json"
    rows = [{"question": "a", "answer": "42", "id": "x7"}, {"question": "b", "answer": "41"}]
    rows.append({"question": "c"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("solve", "--base", make_model_dir(tmp_path), "--questions", file, "--json", out)
    assert done.exit_code == 0, done.output
    told = json.loads(out.read_text())["solutions"]
    assert [s["id"] for s in told] == ["x7", "1", "2"]
    assert [s["gold"] for s in told] == ["42", "41", None]
    assert [s["correct"] for s in told] == [True, False, None]
    assert "right     1 of 2\n" in done.stdout
    assert "answer: 42 (right)" in done.stdout and "42 (wrong, expected 41)" in done.stdout


def test_a_text_that_cannot_be_graded_is_its_own_error(
    fake: type[FakeSearch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(answer: str, gold: str) -> bool:
        raise RecursionError("too deep")

    monkeypatch.setattr(grading, "answers_equal", fail)
    file, out = tmp_path / "q.jsonl", tmp_path / "out.json"
    file.write_text('{"question": "a", "answer": "4"}\n{"question": "b"}\n')
    done = run("solve", "--base", make_model_dir(tmp_path), "--questions", file, "--json", out)
    assert done.exit_code == 1
    bad, good = json.loads(out.read_text())["solutions"]
    assert bad["error"] == "grading: RecursionError: too deep" and good["error"] is None


def test_a_run_that_breaks_still_writes_its_result(fake: type[FakeSearch], tmp_path: Path) -> None:
    def fail(search: FakeSearch) -> None:
        raise RuntimeError("engine stopped")

    fake.script = staticmethod(fail)
    out = tmp_path / "out.json"
    model = make_model_dir(tmp_path)
    done = run("solve", "--base", model, "--question", "a", "--question", "b", "--json", out)
    assert done.exit_code == 1 and "RuntimeError: engine stopped" in done.stderr
    assert len(json.loads(out.read_text())["solutions"]) == 2
    assert "ended by" in done.stdout


def test_a_vanished_folder_is_named(fake: type[FakeSearch], tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    fake.script = staticmethod(lambda search: folder.rmdir())
    out, model = folder / "out.json", make_model_dir(tmp_path)
    done = run("solve", "--base", model, "--question", "a", "--json", out)
    assert done.exit_code == 1
    assert f"error: --json: cannot write {out}: No such file or directory" in done.stderr
    assert "ended by" in done.stdout


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_trace_without_a_header_leaves_a_result(fake: type[FakeSearch], tmp_path: Path) -> None:
    out, model = tmp_path / "out.json", make_model_dir(tmp_path)
    args = ["--base", model, "--question", "a", "--trace", FULL, "--json", out]
    assert run("solve", *args).exit_code == 1
    told = json.loads(out.read_text())
    check_result(told, alone=True)
    assert told["finish"] == "error" and "No space left" in told["error"]


def test_two_writers_of_one_file_leave_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    contents = [{"by": i, "text": chr(97 + i) * 200_000} for i in range(4)]
    threads = [
        threading.Thread(target=lambda c=c: [write_json(path, c) for _ in range(20)])
        for c in contents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads(path.read_text()) in contents
    assert list(tmp_path.iterdir()) == [path]


def test_a_demo_without_a_trace_file_makes_a_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = demo_module.fresh_trace(), demo_module.fresh_trace()
    assert first != second
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (first, second))
