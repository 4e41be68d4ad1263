"""Results by key in a JSONL file that is continued after whatever ended a run.

The first line is ``{"results": 1, "settings": {...}}``, every other one a result with its ``key``.
Lines may come in any order; of two with one key the later counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcore.files import LineFile, finite

FORMAT = 1


class Results(Mapping[str, dict[str, Any]]):
    """The results of a file, by key; ``put`` adds to both.

    An unfinished last line, which an interrupted write leaves, is cut off.

    Args:
        path: made if there is no such file.
        settings: what decides the results, JSON values: a file belongs to one such set.
    Raises:
        ValueError: the file is of other settings, is damaged before its last line or is no file of
            results. It is left as it was.
        OSError: it cannot be read or written, or another process is at it.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._found: dict[str, dict[str, Any]] = {}
        header = {"results": FORMAT, "settings": _plain(settings)}
        file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        try:
            _lock(file.fileno(), self.path)
            file.seek(0)
            whole = self._read(file.read(), header)
            file.truncate(whole)
            self._file = LineFile(file, whole)
            if whole == 0:
                self._file.append(_line(header))
        except BaseException:
            file.close()
            raise

    def put(self, key: str, result: Mapping[str, Any]) -> None:
        """Keeps a result: it is in the file before this returns.

        Raises:
            OSError: the file cannot be written; it then ends after its last whole line.
        """
        plain = _plain(result)
        self._file.append(_line({"key": key, **plain}))
        self._found[key] = plain

    def close(self) -> None:
        self._file.close()

    def _read(self, data: bytes, header: dict[str, Any]) -> int:
        """Takes in the whole lines of a file. Returns how many bytes they are."""
        lines = data.splitlines(keepends=True) if data else []
        if lines and not lines[-1].endswith(b"\n"):
            torn = lines.pop()
            if not lines and not (_line(header) + "\n").encode().startswith(torn):
                raise ValueError(f"{self.path}: expected results of kvcore, got {_shown(torn)}")
        if not lines:
            return 0
        self._check(_parse(lines[0]), lines[0], header)
        for number, line in enumerate(lines[1:], 2):
            told = _parse(line)
            key = None if told is None else told.pop("key", None)
            if told is None or not isinstance(key, str):
                raise ValueError(
                    f"{self.path}, line {number}: expected an object with a 'key', "
                    f"got {_shown(line)}"
                )
            self._found[key] = told
        return sum(map(len, lines))

    def _check(self, told: dict[str, Any] | None, line: bytes, header: dict[str, Any]) -> None:
        if told is None or "results" not in told:
            raise ValueError(f"{self.path}: expected results of kvcore, got {_shown(line)}")
        if told["results"] != FORMAT:
            raise ValueError(
                f"{self.path}: results: expected format {FORMAT}, got {told['results']!r}"
            )
        check_same(told.get("settings"), header["settings"], str(self.path))

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._found[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_same(found: Any, wanted: Mapping[str, Any], where: str) -> None:
    """Raises ValueError unless the settings of results are those of the run; names the first that
    differs, the one that is asked for and the one that was found.
    """
    found, wanted = _plain(found), _plain(wanted)
    if found == wanted:
        return
    name, old, new = _difference(found, wanted, "settings")
    raise ValueError(
        f"{where} holds results of other settings; name another file "
        f"({name}: expected {_shown(new)}, got {_shown(old)})"
    )


def _difference(found: Any, wanted: Any, name: str) -> tuple[str, Any, Any]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in {**wanted, **found}:
            if key not in found or key not in wanted:
                return f"{name}.{key}", found.get(key), wanted.get(key)
            if found[key] != wanted[key]:
                return _difference(found[key], wanted[key], f"{name}.{key}")
    return name, found, wanted


def _lock(handle: int, path: Path) -> None:
    """Refuses a file that another process continues."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{path}: expected a file of one run, got one that another is at") from None
    except OSError:
        pass  # a file system without locks


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _parse(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None


def _plain(value: Any) -> Any:
    """``value`` as it comes back from JSON. Raises TypeError where JSON has no such value."""
    text = json.dumps(finite(value), ensure_ascii=False)
    return json.loads(text.encode("utf-8", errors="replace"))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
