"""A trace keeps every whole line whatever happens to the process, the disk or the reader."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import fields
from pathlib import Path

import pytest

from kvcore.search import results
from kvcore.search.trace import SCHEMA, TraceError, TraceWriter, read_trace

SETTINGS = {"n": 4, "seed": 0}
EVENTS = [
    {"event": "start", "problem": 0, "text": "caf\u00e9 \u2028 \n\n"},
    {"event": "step", "problem": 0, "score": 0.25, "nested": {"a": [1, None]}},
]


class FullDisk:
    """A raw file with room for ``capacity`` bytes; takes at most ``chunk`` bytes per write."""

    name = "disk"

    def __init__(self, capacity: int, chunk: int = 1 << 20) -> None:
        self.data = b""
        self.capacity = capacity
        self.chunk = chunk
        self.closed = False

    def write(self, data: bytes) -> int:
        room = min(self.capacity - len(self.data), self.chunk)
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.data += data[:room]
        return min(room, len(data))

    def truncate(self, size: int) -> int:
        self.data = self.data[:size]
        return size

    def close(self) -> None:
        self.closed = True


def write_all(path: Path) -> None:
    with TraceWriter(path, settings=SETTINGS, version="1.2") as trace:
        for event in EVENTS:
            trace.write(event)


def test_reader_returns_what_was_written(tmp_path: Path) -> None:
    write_all(tmp_path / "t.jsonl")
    trace = read_trace(tmp_path / "t.jsonl")
    assert (trace.version, trace.settings, trace.events) == ("1.2", SETTINGS, EVENTS)
    assert not trace.cut


def test_first_line_is_the_header(tmp_path: Path) -> None:
    write_all(tmp_path / "t.jsonl")
    first = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])
    assert first == {"event": "trace", "schema": SCHEMA, "kvcore": "1.2", "settings": SETTINGS}


def test_every_line_is_in_the_file_before_write_returns(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.jsonl", settings=SETTINGS, version="1.2")
    for count, event in enumerate(EVENTS, 1):
        writer.write(event)
        assert len(read_trace(tmp_path / "t.jsonl").events) == count
    writer.close()


def test_trace_cut_at_any_byte_keeps_its_whole_lines(tmp_path: Path) -> None:
    write_all(tmp_path / "t.jsonl")
    data = (tmp_path / "t.jsonl").read_bytes()
    header = data.index(b"\n") + 1
    for size in range(header, len(data) + 1):
        (tmp_path / "cut.jsonl").write_bytes(data[:size])
        trace = read_trace(tmp_path / "cut.jsonl")
        assert trace.events == EVENTS[: data[:size].count(b"\n") - 1]
        assert trace.cut == (data[size - 1 : size] != b"\n")


def test_numbers_json_cannot_hold_become_null(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl", settings={}, version="") as trace:
        trace.write({"event": "e", "a": math.nan, "b": [math.inf], "c": {"d": -math.inf}})
    assert read_trace(tmp_path / "t.jsonl").events[0] == {
        "event": "e",
        "a": None,
        "b": [None],
        "c": {"d": None},
    }
    (line,) = (tmp_path / "t.jsonl").read_text().splitlines()[1:]
    json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_lone_surrogate_does_not_stop_the_trace(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl", settings={}, version="") as trace:
        trace.write({"event": "e", "text": "a\ud800b"})
    assert read_trace(tmp_path / "t.jsonl").events[0]["text"] == "a?b"


@pytest.mark.parametrize("capacity", [70, 100, 149, 150])
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_full_disk_keeps_whole_lines_and_says_so(capacity: int, chunk: int, tmp_path: Path) -> None:
    disk = FullDisk(capacity, chunk)
    written = 0
    with (
        pytest.raises(TraceError, match="No space left on device") as error,
        TraceWriter(disk, settings={}, version="1") as trace,
    ):
        for i in range(100):
            trace.write({"event": "e", "i": i})
            written += 1
    assert disk.closed
    assert error.value.events == written + 1
    assert f"the first {written + 1} lines are kept" in str(error.value)
    (tmp_path / "t.jsonl").write_bytes(disk.data)
    trace_read = read_trace(tmp_path / "t.jsonl")
    assert [e["i"] for e in trace_read.events] == list(range(written))
    assert not trace_read.cut


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_dev_full_fails_at_the_header() -> None:
    with pytest.raises(TraceError, match="/dev/full: No space left on device") as error:
        TraceWriter("/dev/full", settings={}, version="1")
    assert error.value.events == 0


def test_missing_folder_and_closed_writer_are_trace_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file or directory"):
        TraceWriter(tmp_path / "no" / "t.jsonl", settings={}, version="1")
    writer = TraceWriter(tmp_path / "t.jsonl", settings={}, version="1")
    writer.close()
    writer.close()
    with pytest.raises(TraceError, match="already closed"):
        writer.write(EVENTS[0])


def test_every_field_of_every_event_is_documented() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "trace.md").read_text()
    sections = {part.split("`")[1]: part for part in text.split("\n## ")[1:]}
    kinds = (results.Warned, results.ProblemStarted, results.CandidateEnded, results.StepCommitted)
    events = {kind.event: [f.name for f in fields(kind)] for kind in kinds}
    events["problem_end"] = [f.name for f in fields(results.Solution)]
    assert sections.keys() == {"trace", *events}
    for event, names in events.items():
        assert [name for name in names if f"`{name}`" not in sections[event]] == []


def test_event_without_a_name_is_refused(tmp_path: Path) -> None:
    with (
        TraceWriter(tmp_path / "t.jsonl", settings={}, version="1") as trace,
        pytest.raises(ValueError, match="event: expected"),
    ):
        trace.write({"problem": 0})
    assert read_trace(tmp_path / "t.jsonl").events == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "without a whole line"),
        (b'{"event": "trace"', "without a whole line"),
        (b"hello\n", "line 1: expected a JSON object"),
        (b'{"a": 1}\n', "line 1: expected an object with a string 'event'"),
        (b'{"event": "step"}\n', "expected a kvcore trace"),
        (b'{"event": "trace", "schema": 2}\n', "expected trace schema 1, got 2"),
        (b'{"event": "trace", "schema": 1}\n{\n{"event": "e"}\n', "line 2: expected a JSON object"),
    ],
)
def test_what_is_not_a_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "t.jsonl")
