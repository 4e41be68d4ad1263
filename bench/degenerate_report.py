"""Which detector fires where on labelled degenerate and coherent answers.

    python bench/degenerate_report.py --data degenerate_texts.jsonl --tokenizer DIR \\
        --clean gsm8k_train.jsonl --clean math500.jsonl --out docs/results/degenerate.md

Every answer is pushed token by token through the detector of the engine, twice: as one candidate,
and as the engine does it, with a new candidate after every empty line. `--data` holds one JSON
object a line with `label`, `text`, `n_tok` and `entropy` (nats, one per token). With `--tokenizer`
the text is tokenized again and must give `n_tok` tokens; without it, words with the white space
before them stand in for tokens and the entropy test is left out. `--clean` names files of human
solutions (field `solution` or `answer`), on which nothing should fire.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcore.native import _C

TESTS = ("entropy", "gzip", "repetition")  # in the order of Firing, which starts at 1


@dataclass(frozen=True)
class Tokenized:
    ids: list[int]
    table: Any  # _C.TokenBytes
    entropy: list[float] | None  # None: unknown


@dataclass(frozen=True)
class Watched:
    """One answer under one test.

    Attributes:
        whole: token at which the test fires if the answer is one candidate, from 1; None: never.
        step: the same with a new candidate for every step, as (step, token in it).
        spent: tokens decoded up to the firing of `step`; all of them if it never fires.
    """

    whole: int | None
    step: tuple[int, int] | None
    spent: int


class Tokenizer:
    """Cuts texts into tokens: with a tokenizer, or into words where there is none."""

    def __init__(self, path: str | None) -> None:
        self._tokenizer, self._table = None, None
        if path is not None:
            from transformers import AutoTokenizer

            from kvcore.models.token_bytes import token_byte_list

            self._tokenizer = AutoTokenizer.from_pretrained(path)
            self._table = _C.TokenBytes(token_byte_list(self._tokenizer))

    def cut(self, text: str, entropy: list[float] | None = None) -> Tokenized:
        if self._tokenizer is not None:
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return Tokenized(ids, self._table, entropy)
        pieces = re.findall(r"\s*\S+|\s+", text)
        known = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
        table = _C.TokenBytes([piece.encode() for piece in known])
        return Tokenized([known[piece] for piece in pieces], table, None)


def make_monitor(table: Any, tests: Sequence[str], **config: Any) -> Any:
    return _C.CandidateMonitor(table, **{test: test in tests for test in TESTS}, **config)


def push(monitor: Any, candidate: int, token: int, nats: float) -> tuple[int, bool]:
    """Push one token. Returns the firing and whether the step ended."""
    firing, ended = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    ids, tokens = torch.tensor([candidate]), torch.tensor([token])
    monitor.push(ids, tokens, torch.tensor([nats]), firing, ended)
    return int(firing), bool(ended)


def watch(answer: Tokenized, tests: Sequence[str]) -> Watched:
    """Run some of the tests together, over the whole answer and step by step."""
    entropy = answer.entropy
    usable = [test for test in tests if test != "entropy" or entropy is not None]
    monitor = make_monitor(answer.table, usable)
    whole, part = monitor.open(True), monitor.open(True)
    step_fired: tuple[int, int] | None = None
    spent, num_steps = len(answer.ids), 1
    for i, token in enumerate(answer.ids):
        nats = entropy[i] if entropy is not None else 0.0
        push(monitor, whole, token, nats)
        firing, ended = push(monitor, part, token, nats)
        if firing and step_fired is None:
            step_fired, spent = (num_steps, monitor.fired_at(part)), i + 1
        if ended:
            monitor.close(part)
            part, num_steps = monitor.open(True), num_steps + 1
    return Watched(monitor.fired_at(whole) or None, step_fired, spent)


def extremes(answer: Tokenized) -> tuple[float, float]:
    """Largest mean entropy and smallest gzip ratio of the whole answer; NaN if never tested."""
    tests = ["gzip"] if answer.entropy is None else ["entropy", "gzip"]
    never = {"entropy_threshold": 1e9, "gzip_threshold": 1e-9}  # so that no test ends the run
    monitor = make_monitor(answer.table, tests, gzip_exact=True, **never)
    candidate = monitor.open(True)
    for i, token in enumerate(answer.ids):
        push(monitor, candidate, token, 0.0 if answer.entropy is None else answer.entropy[i])
    return monitor.max_mean_entropy(candidate), monitor.min_gzip_ratio(candidate)


def show(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, tuple):
        return f"{value[0]}.{value[1]}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(show(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def check_stored(record: dict[str, Any], answer: Tokenized, found: tuple[float, float]) -> None:
    """Compare with what the file stores from another implementation.

    Its gzip ratio was not taken at every token, so the exact minimum may only be smaller.
    """
    if answer.entropy is None:
        return
    if len(answer.ids) != record["n_tok"]:
        raise ValueError(f"tokens: expected {record['n_tok']}, got {len(answer.ids)}")
    mean, ratio = record["max_mean_entropy_w12_g24"], record["min_gzip_ratio_w800"]
    if abs(found[0] - mean) > 0.002:
        raise ValueError(f"mean entropy: expected {mean}, got {found[0]}")
    if ratio is not None and found[1] > ratio + 5e-4:
        raise ValueError(f"gzip ratio: expected at most {ratio}, got {found[1]}")


def report_answers(records: list[dict[str, Any]], tokenizer: Tokenizer) -> str:
    rows, caught, spent = [], {}, {}
    for number, record in enumerate(records, 1):
        answer = tokenizer.cut(record["text"], record["entropy"])
        found = extremes(answer)
        check_stored(record, answer, found)
        alone = {test: watch(answer, [test]) for test in TESTS}
        paper, full = watch(answer, TESTS[:2]), watch(answer, TESTS)
        label = record["label"]
        whole = [alone[test].whole for test in TESTS]
        steps = [alone[test].step for test in TESTS]
        rows.append((number, label, len(answer.ids), *found, *whole, *steps))
        outcomes = (True, paper.whole, full.whole, paper.step, full.step)
        counts = caught.setdefault(label, [0] * len(outcomes))
        caught[label] = [n + (o is not None) for n, o in zip(counts, outcomes, strict=True)]
        tokens = spent.setdefault(label, [0, 0, 0])
        now = (len(answer.ids), paper.spent, full.spent)
        spent[label] = [n + t for n, t in zip(tokens, now, strict=True)]
    header = ["#", "label", "tokens", "max mean entropy", "min gzip ratio"]
    header += [f"{test}, whole" for test in TESTS] + [f"{test}, steps" for test in TESTS]
    summary_header = ["label", "answers", "paper, whole", "+ repetition, whole"]
    summary_header += ["paper, steps", "+ repetition, steps"]
    summary_header += ["tokens", "paper, steps", "+ repetition, steps"]
    summary = [(label, *caught[label], *spent[label]) for label in caught]
    return (
        "## Answers that a test ends, and tokens decoded until then\n\n"
        + markdown(summary_header, summary)
        + "\n\n## Every answer, every test alone\n\n"
        + "`whole`: token (from 1) at which the test fires if the answer is one candidate. "
        + "`steps`: step.token of the first firing, both from 1. `-`: never.\n\n"
        + markdown(header, rows)
    )


def solutions(path: Path) -> list[str]:
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        text = record.get("solution") or record.get("answer")
        text = text[0] if isinstance(text, list) and text else text
        if isinstance(text, str):
            texts.append(text)
    return texts


def report_clean(paths: list[Path], tokenizer: Tokenizer) -> str:
    rows = []
    for path in paths:
        texts = solutions(path)
        fired = {"gzip": 0, "repetition": 0}
        for text in texts:
            answer = tokenizer.cut(text)
            for test in fired:
                monitor = make_monitor(answer.table, [test])
                candidate = monitor.open(True)
                for token in answer.ids:
                    push(monitor, candidate, token, 0.0)
                fired[test] += monitor.fired_at(candidate) > 0
        rows.append((path.name, len(texts), fired["gzip"], fired["repetition"]))
    return "## Human solutions on which a test fires\n\nEach as one candidate.\n\n" + markdown(
        ["file", "solutions", "gzip", "repetition"], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", help="directory of the tokenizer that made the tokens")
    parser.add_argument("--clean", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, help="file whose generated part is replaced")
    args = parser.parse_args()
    records = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()]
    tokenizer = Tokenizer(args.tokenizer)
    tokens = "words, so no entropy test" if args.tokenizer is None else Path(args.tokenizer).name
    parts = [f"Tokens: {tokens}.", report_answers(records, tokenizer)]
    if args.clean:
        parts.append(report_clean(args.clean, tokenizer))
    text = "\n\n".join(parts) + "\n"
    if args.out is None:
        print(text)
        return
    marker = "<!-- generated below by bench/degenerate_report.py -->\n"
    head = args.out.read_text(encoding="utf-8").split(marker)[0] if args.out.exists() else ""
    args.out.write_text(f"{head}{marker}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
