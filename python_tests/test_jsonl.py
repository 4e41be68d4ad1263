"""A file of results is continued after whatever ended the run before."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.eval import Results

SETTINGS = {"model": "m", "search": {"n": 4, "detector": None}, "seeds": (0, 1)}
FOUND = {"a/1": {"text": "x\ny \u2028 \r z", "n": 1}, "a/2": {"score": math.nan}, "b": {}}
READ = {**FOUND, "a/2": {"score": None}}


def filled(path: Path) -> bytes:
    with Results(path, SETTINGS) as results:
        for key, found in FOUND.items():
            results.put(key, found)
        assert dict(results) == READ
    return path.read_bytes()


def test_results_are_read_back_whatever_the_order_of_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    header, *lines = filled(path).splitlines(keepends=True)
    assert json.loads(header)["settings"] == json.loads(json.dumps(SETTINGS))
    for seed in range(6):
        random.Random(seed).shuffle(lines)
        path.write_bytes(header + b"".join(lines))
        with Results(path, SETTINGS) as results:
            assert dict(results) == READ
        assert path.read_bytes() == header + b"".join(lines)


def test_a_file_torn_at_any_byte_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    data = filled(path)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        whole = data[:size].count(b"\n")
        with Results(path, SETTINGS) as results:
            assert dict(results) == dict(list(READ.items())[: max(0, whole - 1)])
            for key, found in FOUND.items():
                if key not in results:
                    results.put(key, found)
        assert path.read_bytes() == data


def test_of_two_results_with_one_key_the_later_counts(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for value in (1, 2):
        with Results(path, SETTINGS) as results:
            results.put("a", {"value": value})
            assert results["a"] == {"value": value}
    with Results(path, SETTINGS) as results:
        assert dict(results) == {"a": {"value": 2}}


def test_a_result_is_in_the_file_when_put_returns(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    program = (
        "import os, sys; from kvcore.eval import Results; "
        "r = Results(sys.argv[1], {}); r.put('a', {'x': 1}); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode == 9
    with Results(path, {}) as results:
        assert dict(results) == {"a": {"x": 1}}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model": "other"}, r"settings.model: expected 'other', got 'm'"),
        ({"search": {"n": 5, "detector": None}}, r"settings.search.n: expected 5, got 4"),
        ({"search": {"n": 4, "detector": {}}}, r"settings.search.detector: expected {}, got None"),
        ({"more": 1}, r"settings.more: expected 1, got None"),
    ],
)
def test_results_of_other_settings_are_refused_by_name(
    tmp_path: Path, change: dict[str, object], name: str
) -> None:
    path = tmp_path / "r.jsonl"
    data = filled(path)
    with pytest.raises(ValueError) as caught:
        Results(path, {**SETTINGS, **change})
    assert str(caught.value).startswith(f"{path} holds results of other settings")
    assert name in str(caught.value)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "text",
    [
        "notes",
        "notes\n",
        "[1]\n",
        '{"settings": {}, "runs": {}}',
        '{"settings": {}, "runs": {}}\n',
        "\x00\x00",
        "\n",
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected results of kvcore, got"):
        Results(path, SETTINGS)
    assert path.read_text() == text


def test_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"results": 7, "settings": {}}\n')
    with pytest.raises(ValueError, match="results: expected format 1, got 7"):
        Results(path, {})


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"key": 3}', b"", b"\xff"])
def test_damage_before_the_last_line_is_named_by_its_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "r.jsonl"
    header, first, *rest = filled(path).splitlines(keepends=True)
    data = header + first + line + b"\n" + b"".join(rest)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="line 3: expected an object with a 'key'"):
        Results(path, SETTINGS)
    assert path.read_bytes() == data


def test_a_file_that_another_process_continues_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    program = (
        "import sys; from kvcore.eval import Results\n"
        "try: Results(sys.argv[1], {})\n"
        "except OSError as error: print(error)"
    )
    with Results(path, {}):
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
        )
    assert "another is at" in done.stdout


def test_a_full_disk_keeps_the_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    data = filled(path)
    with Results(path, SETTINGS) as results:
        inner = results._file._file

        class Full:
            def write(self, data: bytes) -> int:
                inner.write(data[:5])
                raise OSError(28, "No space left on device")

            truncate = inner.truncate
            close = inner.close

        results._file._file = Full()
        with pytest.raises(OSError, match="No space left"):
            results.put("c", {"text": "long"})
        assert "c" not in results
    assert path.read_bytes() == data
