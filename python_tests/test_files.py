"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from kvcore.files import replacing, write_json, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("content", ["", "a\n", "gr\u00fc\u00df", "a\r\nb", b"", b"\x00\xff\r\n"])
def test_what_was_written_is_read_back_byte_for_byte(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "x"
    for _ in range(2):
        write_whole(path, content)
        data = content if isinstance(content, bytes) else content.encode()
        assert path.read_bytes() == data
        assert names(tmp_path) == ["x"]


def test_a_block_that_raises_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for before in (None, "old"):
        if before is not None:
            path.write_text(before)
        with pytest.raises(KeyboardInterrupt), replacing(path) as part:
            part.write_text("half")
            raise KeyboardInterrupt
        assert names(tmp_path) == ([] if before is None else ["x"])
        assert before is None or path.read_text() == before


def test_a_value_that_json_cannot_hold_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert names(tmp_path) == ["x"]


def test_the_old_file_stands_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_whole(path, "old")
    with replacing(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_a_link_goes_on_pointing_where_it_did(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "far" / "x")
    for text in ("one", "two"):  # the first makes the file, the second replaces it
        write_whole(link, text)
        assert link.is_symlink()
        assert (tmp_path / "far" / "x").read_text() == text
    assert names(tmp_path) == ["far", "link"]
    assert names(tmp_path / "far") == ["x"]


def test_permissions_of_an_existing_file_are_kept(tmp_path: Path) -> None:
    path, usual = tmp_path / "x", tmp_path / "usual"
    usual.write_text("")
    write_whole(path, "new")
    assert path.stat().st_mode == usual.stat().st_mode
    for mode in (0o600, 0o664, 0o444):
        path.chmod(mode)
        write_whole(path, "newer")
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, "text")
    reader.join(10)
    assert got == [b"text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("bad", ["folder", "missing/x"])
def test_a_place_that_takes_no_file_is_an_os_error(tmp_path: Path, bad: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / bad, "text")
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == []


def test_names_as_long_as_a_folder_takes_are_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_whole(path, "text")
    assert path.read_text() == "text"
