"""What ``kvcore solve`` was asked to do, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from kvcore.cli.errors import Failure, UsageError, bad_value_is
from kvcore.config import EngineConfig, SearchConfig, as_separators, check_template_args
from kvcore.eval import Problem, Run, ScorerSpec, load_problems
from kvcore.eval.runs import PRM_READS, PrmRead
from kvcore.models.embedded import DamagedWeights
from kvcore.models.sources import UnreachableModel, is_hub_id, resolve


@dataclass(frozen=True, kw_only=True)
class Job(Run):
    """One run of ``kvcore solve``, and where its results go.

    Attributes:
        threads: of torch and of kvcore's kernels; None leaves both alone.
    """

    threads: int | None = None
    trace: Path | None = None
    json: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """The settings that decide the result, for a trace's header."""
        engine = dataclasses.asdict(self.engine)
        return {**super().as_json(), "questions": list(self.questions), "engine": engine}


def model_directory(path: Path, flag: str) -> Path:
    """The checkpoint directory that ``path`` names: itself, an embedded ``demo:`` model's, or that
    of a hub model, which may be downloaded.

    Raises:
        UsageError: it does not look like one, or there is no such embedded model.
        Failure: a file of the embedded model is missing or damaged, or the hub model cannot be had.
    """
    try:
        folder = resolve(path, flag)
    except (UnreachableModel, DamagedWeights) as error:
        raise Failure(str(error)) from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not (folder / "config.json").is_file():
        raise UsageError(f"{flag}: expected a model directory, got {str(path)!r} (no config.json)")
    return folder


def parse_scorer(text: str) -> ScorerSpec:
    """``loglik``, ``random``, ``prm:DIR``, ``demo:prm``, or a process reward model's directory."""
    if text in ("loglik", "random"):
        return ScorerSpec(text)
    kind, separator, path = text.partition(":")
    if separator and kind == "demo":
        return ScorerSpec("prm", model_directory(Path(text), "--scorer"))
    if separator and kind == "prm":
        return ScorerSpec("prm", model_directory(Path(path), "--scorer"))
    if not Path(text).exists() and not is_hub_id(text):
        raise UsageError(
            f"--scorer: expected loglik, random, prm:DIR or a model directory, got {text!r}"
        )
    return ScorerSpec("prm", model_directory(Path(text), "--scorer"))


def scorer_for(text: str | None, read: str | None, candidates: int) -> ScorerSpec | None:
    """What chooses among the ``candidates`` of a step; None if there is no choice to make.

    Args:
        text: of ``--scorer``.
        read: of ``--prm-read``; None takes the default.
    """
    one_of(read, PRM_READS, "--prm-read")
    scorer = None if text is None else parse_scorer(text)
    if read is not None and (scorer is None or scorer.kind != "prm"):
        raise UsageError(
            f"--prm-read: expected only with a process reward model, got --scorer {scorer}"
        )
    if scorer is None and candidates > 1:
        raise UsageError(
            f"--scorer: expected what chooses among the {candidates} candidates of a step: prm:DIR "
            "(a process reward model, as in the paper), loglik (likelihood under the helper, which "
            "is a weak judge) or random, got none"
        )
    return scorer if scorer is None or read is None else replace(scorer, read=cast(PrmRead, read))


_ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "\\": b"\\"}
_ESCAPE = re.compile(r"\\(?:([nrt\\])|x([0-9a-fA-F]{2})|(.?))", re.DOTALL)


def parse_separators(texts: Sequence[str]) -> tuple[bytes, ...]:
    """Bytes of ``--separator`` texts; none is the default. Understands ``\\n``, ``\\r``, ``\\t``,
    ``\\\\`` and ``\\xNN``.
    """
    if not texts:
        return SearchConfig().separators
    found = []
    for text in texts:
        data, at = b"", 0
        for escape in _ESCAPE.finditer(text):
            simple, byte, other = escape.groups()
            if other is not None:
                raise UsageError(
                    "--separator: expected \\n, \\r, \\t, \\xNN or \\\\ after a backslash, "
                    f"got {text!r}"
                )
            data += _utf8(text[at : escape.start()])
            data += _ESCAPES[simple] if simple else bytes.fromhex(byte)
            at = escape.end()
        found.append(data + _utf8(text[at:]))
    with bad_value_is(UsageError):
        return as_separators(found)


def _utf8(text: str) -> bytes:
    """The bytes that stood on the command line, also where they are no UTF-8."""
    return text.encode("utf-8", errors="surrogateescape")


def read_questions(questions: Sequence[str], file: Path | None) -> tuple[Problem, ...]:
    """The problems of ``--question`` (repeated) or of the JSONL file of ``--questions``."""
    if questions and file is not None:
        raise UsageError("--questions: expected either --question or --questions, got both")
    if file is not None:
        with bad_value_is(UsageError):
            return tuple(load_problems(file))
    if not questions:
        raise UsageError("--question: expected a question (or --questions FILE), got none")
    for question in questions:
        if not question.strip():
            raise UsageError(f"--question: expected some text, got {question!r}")
    return tuple(Problem(str(i), question, "") for i, question in enumerate(questions))


def parse_template_args(texts: Sequence[str]) -> dict[str, Any]:
    """Keywords of ``NAME=VALUE`` texts; a value that is not JSON is text."""
    args: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        name = name.strip()
        if not separator or not name.isidentifier():
            raise UsageError(f"--template-arg: expected NAME=VALUE, got {text!r}")
        if name in args:
            raise UsageError(f"--template-arg: expected each name once, got {name!r} twice")
        try:
            args[name] = json.loads(value)
        except (ValueError, RecursionError):
            args[name] = value
    with bad_value_is(UsageError):
        check_template_args(args)
    return args


def output_path(path: Path | None, flag: str) -> Path | None:
    """``path`` if a file can be made there. Raises ``UsageError``; creates nothing."""
    if path is not None and path.is_dir():
        raise UsageError(f"{flag}: expected a file, got the directory {str(path)!r}")
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{flag}: expected an existing folder, got {str(path.parent)!r}")
    return path


def engine_config(*, max_seqs: int, max_tokens: int, kv_gb: float) -> EngineConfig:
    """Size of each engine. ``kv_gb`` is in GiB."""
    with bad_value_is(UsageError):
        return EngineConfig(max_seqs=max_seqs, context_len=max_tokens, kv_bytes=kv_bytes(kv_gb))


def kv_bytes(kv_gb: float) -> int:
    """``--kv-gb`` in bytes. Raises ``UsageError``."""
    if not 0 < kv_gb < 2**30:  # also false for NaN
        raise UsageError(f"--kv-gb: expected a number > 0, got {kv_gb}")
    return max(1, int(kv_gb * 2**30))


def one_of(value: str | None, names: Sequence[str], flag: str) -> str | None:
    """``value``, which must be one of ``names`` or None. Raises ``UsageError``."""
    if value is not None and value not in names:
        raise UsageError(f"{flag}: expected one of {', '.join(names)}, got {value!r}")
    return value


def at_least(value: int | None, low: int, flag: str) -> int | None:
    """``value``, which must be at least ``low`` or None. Raises ``UsageError``."""
    if value is not None and value < low:
        raise UsageError(f"{flag}: expected an integer >= {low}, got {value}")
    return value
