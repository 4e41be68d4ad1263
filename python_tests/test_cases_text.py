"""Texts that broke other engines, by the number of their case: P14 and P15."""

from __future__ import annotations

import gzip
import zlib

import pytest
import torch
from support.engine_tools import run, small_config
from support.tiny_models import byte_tokenizer, make_model

from kvcore import ops
from kvcore.config import DetectorConfig, SamplingParams
from kvcore.engine import Engine, Finish, GenerateSpec, Generation
from kvcore.models.token_bytes import token_byte_list
from kvcore.native import _C

PIECES = token_byte_list(byte_tokenizer())
MERGED = {piece: i for i, piece in enumerate(PIECES) if len(piece) > 1}  # "\n\n", ".\n\n", ...
TRIPLE = len(PIECES)  # a token that the byte tokenizer lacks: "\n\n\n"
NEWLINE = 10

# Tokens of a text, how many of them belong to the step, and the bytes of the step's text.
STEPS = {
    "delimiter inside a token": ([*b"So 2", MERGED[b".\n\n"], *b"x"], 5, b"So 2.\n\n"),
    "after a bracket": ([*b"(2", MERGED[b")\n\n"], *b"x"], 3, b"(2)\n\n"),
    "one token": ([*b"a", MERGED[b"\n\n"], *b"x"], 2, b"a\n\n"),
    "two tokens": ([*b"ab", NEWLINE, NEWLINE, *b"x"], 4, b"ab\n\n"),
    "three newlines": ([*b"a", TRIPLE, *b"x"], 2, b"a\n\n\n"),
    "newline, then two": ([*b"a", NEWLINE, MERGED[b"\n\n"], *b"x"], 3, b"a\n\n\n"),
    "blank start": ([MERGED[b"\n\n"], NEWLINE, *b"a\n", NEWLINE], 5, b"\n\n\na\n\n"),
    "spaces between": ([*b"a\n \nb", MERGED[b"\n\n"], *b"x"], 6, b"a\n \nb\n\n"),
    "never": ([*b"a\nb\n c\r\n\r\n"], None, b"a\nb\n c\r\n\r\n"),
}


def make_monitor(**config: object) -> _C.CandidateMonitor:
    settings = {"entropy": False, "gzip": False, **config}
    return _C.CandidateMonitor(_C.TokenBytes([*PIECES, b"\n\n\n"]), **settings)


def push(monitor: _C.CandidateMonitor, candidate: int, token: int) -> tuple[int, int]:
    """(test that fired, whether the step ended) at this token."""
    fired, ended = torch.empty((2, 1), dtype=torch.uint8)
    ids, tokens = torch.tensor([candidate]), torch.tensor([token])
    monitor.push(ids, tokens, torch.zeros(1), fired, ended)
    return int(fired), int(ended)


@pytest.mark.parametrize("case", STEPS)
def test_p14_a_step_ends_at_the_first_blank_line_of_its_text(case):
    tokens, count, text = STEPS[case]
    monitor = make_monitor()
    candidate = monitor.open(False)
    for i, token in enumerate(tokens, 1):
        _, ended = push(monitor, candidate, token)
        assert ended == (i == count)
        if ended:
            break
    assert monitor.num_tokens(candidate) == count or count is None
    assert monitor.text(candidate) == text
    step_end = monitor.step_end(candidate)
    if count is None:
        assert step_end == -1
    else:
        before = text[:step_end]
        assert before.endswith(b"\n\n") and before.strip()
        assert before.lstrip().find(b"\n\n") == len(before.lstrip()) - 2


def script(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Makes engines draw ``tokens`` instead of what the model says."""

    def scripted(logits, specs, counters, vocab, seen):
        drawn = torch.tensor([tokens[c] for c in counters])
        return ops.Samples(drawn, torch.zeros(len(specs)), torch.full((len(specs),), -1.0))

    monkeypatch.setattr("kvcore.engine.generation.sample", scripted)


def generation(engine: Engine, limit: int, **options: object) -> tuple[int, Generation]:
    sampling = SamplingParams(max_new_tokens=limit)
    seq = engine.add([1, 2, 3], GenerateSpec(sampling, **options))
    [result] = [e.generation for e in run(engine) if e.generation is not None]
    return seq, result


@pytest.mark.parametrize("case", [c for c in STEPS if c != "three newlines"])
def test_p14_the_engine_keeps_the_whole_last_token_and_no_step_is_empty(case, monkeypatch):
    tokens, count, text = STEPS[case]
    script(monkeypatch, tokens)
    engine = Engine(make_model(), small_config())
    seq, result = generation(engine, len(tokens), stop_at_step=True)
    assert result.finish is (Finish.LENGTH if count is None else Finish.STEP)
    assert result.tokens == tokens[:count] and result.text == text
    assert engine.tokens(seq) == [1, 2, 3, *tokens[:count]]
    assert result.text.strip()
    _, whole = generation(engine, len(tokens))
    assert whole.tokens == tokens and whole.finish is Finish.LENGTH


EMOJI = "ok 🧑‍🚀👍🏽 汉字 naïve ∑ "


def test_p15_characters_split_over_tokens_come_back_whole(monkeypatch):
    tokens = list(EMOJI.encode())
    assert len(tokens) > len(EMOJI) + 15
    script(monkeypatch, tokens)
    engine = Engine(make_model(), small_config())
    _, result = generation(engine, len(tokens))
    assert result.text.decode() == EMOJI
    for cut in range(1, len(tokens)):
        seq, result = generation(engine, cut)
        engine.release(seq)
        assert result.text == EMOJI.encode()[:cut]  # bytes: nothing is replaced or held back


@pytest.mark.skipif("ng" in zlib.ZLIB_RUNTIME_VERSION, reason="zlib-ng compresses differently")
@pytest.mark.parametrize("window", range(40, 56))
def test_p15_the_gzip_window_is_of_bytes_and_may_cut_a_character(window):
    """Sixteen windows end at every place within the characters of the text."""
    monitor = make_monitor(gzip=True, gzip_window=window, gzip_threshold=1e-6, gzip_exact=True)
    candidate = monitor.open(True)
    data = (EMOJI * 4).encode()
    lowest = float("inf")
    for i, byte in enumerate(data, 1):
        assert push(monitor, candidate, byte) == (0, 0)
        if i >= window:
            size = len(gzip.compress(data[i - window : i], 9))
            assert monitor.gzip_ratio(candidate) == size / window
            lowest = min(lowest, size / window)
    assert monitor.text(candidate) == data
    assert monitor.min_gzip_ratio(candidate) == lowest


@pytest.mark.parametrize("piece", ["👍", "汉字", "é", "ab"])
@pytest.mark.parametrize("exact", [True, False])
def test_p15_loops_of_split_characters_are_found_like_others(piece, exact, monkeypatch):
    data = list((piece * 1000).encode())
    script(monkeypatch, data)
    detector = DetectorConfig(entropy=False, gzip_exact=exact)
    engine = Engine(make_model(), small_config(), detector=detector)
    _, result = generation(engine, 900, detect=True)
    assert result.finish is Finish.GZIP
    assert result.fired_at == len(result.tokens) == detector.gzip_window
    assert result.text == bytes(data[: detector.gzip_window])
