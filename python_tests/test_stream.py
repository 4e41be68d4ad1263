"""``Engine.stream``: pieces that are certain, together the text of ``generate``."""

from __future__ import annotations

import random

import pytest
from support.engine_tools import small_config
from support.tiny_models import make_model

from kvcore.config import EvictionConfig, SamplingParams
from kvcore.engine import Engine
from kvcore.engine.text_stream import TextStream

PARAMS = SamplingParams(temperature=1.3, top_k=0, top_p=1.0, max_tokens=80)

EVICTIONS = [
    None,
    EvictionConfig("rkv", budget=16, protect=8, cadence="sawtooth", headroom=16),
    EvictionConfig("rkv", budget=16, protect=8, cadence="steady"),
]


@pytest.fixture(scope="module")
def engine():
    return Engine(make_model(), small_config())


def until_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text up to the first stop string to be completed, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    pieces = []
    while data:
        n = rng.randint(1, 4)
        pieces.append(data[:n])
        data = data[n:]
    return pieces


@pytest.mark.parametrize("seed", range(300))
def test_text_does_not_depend_on_where_it_is_cut(seed):
    rng = random.Random(seed)
    alphabet = rng.choice(["ab", "abc\n", "aé€", "a€😀b"])
    data = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 40))).encode()
    if seed % 3 == 0:  # bytes that are no text
        data = bytes(b if rng.random() < 0.9 else rng.randrange(256) for b in data)
    lengths = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
    stops = ["".join(rng.choice(alphabet) for _ in range(n)) for n in lengths]
    whole = data.decode(errors="replace")
    want, stop = until_stop(whole, stops)
    stream = TextStream(stops)
    got, fed = "", b""
    for piece in cut(data, rng):
        got += stream.push(piece)
        fed += piece
        if stream.stopped is None:
            # All is told but what may become part of a character or of a stop string.
            certain = whole[: len(fed.decode(errors="ignore"))]
            assert whole.startswith(got)
            held = fed.decode(errors="replace")[len(got) :].rstrip("\ufffd")
            begins = [s for s in stops if s.startswith(held) and len(s) > len(held)]
            assert held == "" or begins or "\ufffd" in certain
    if stop is None:
        got += stream.end()
    assert (got, stream.stopped) == (want, stop)
    assert stream.push(b"more") == "" or stop is None


def test_a_character_is_told_when_it_is_complete():
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert stream.push(b"\xe2\x82") == "" and stream.end() == "\ufffd"


def test_the_longest_of_stop_strings_that_end_together_wins():
    stream = TextStream(["b", "ab", "xab"])
    assert stream.push(b"zzab") == "zz" and stream.stopped == "ab"


def test_a_beginning_that_comes_to_nothing_is_told():
    stream = TextStream(["aab"])
    assert [stream.push(b) for b in (b"a", b"a", b"a", b"c")] == ["", "", "a", "aac"]


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_the_text_of_generate(seed, eviction):
    engine = Engine(make_model(), small_config(), eviction=eviction)
    [whole] = engine.generate("abc", PARAMS, seed=seed)
    assert len(whole.text) > 8 and "\ufffd" in whole.text  # random bytes, parts of characters
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 2]
    for given in (None, stop, ["never", stop]):
        [want] = engine.generate("abc", PARAMS, seed=seed, stop=given)
        pieces = list(engine.stream("abc", PARAMS, seed=seed, stop=given))
        assert "".join(pieces) == want.text and all(pieces)
        assert len(pieces) > 3
    assert engine.num_sequences == 0


def test_the_generator_returns_the_output(engine):
    stream = engine.stream([{"role": "user", "content": "hi"}], PARAMS)
    pieces = []
    with pytest.raises(StopIteration) as end:
        while True:
            pieces.append(next(stream))
    [want] = engine.generate([{"role": "user", "content": "hi"}], PARAMS)
    assert end.value.value == want and "".join(pieces) == want.text


def test_closing_early_releases_the_sequence(engine):
    stream = engine.stream("abc", PARAMS)
    assert engine.num_sequences == 0  # nothing is fed before it is asked for
    next(stream)
    assert engine.num_sequences == 1
    stream.close()
    assert engine.num_sequences == 0 and not engine.has_work
    for _ in engine.stream("abc", PARAMS):
        break
    assert engine.num_sequences == 0


def test_an_exception_of_the_reader_releases_the_sequence(engine):
    stream = engine.stream("abc", PARAMS)
    next(stream)
    with pytest.raises(KeyError):
        stream.throw(KeyError("reader"))
    assert engine.num_sequences == 0


def test_whoever_steps_the_engine_meanwhile_is_told_on(engine):
    stream = engine.stream("abc", PARAMS)
    next(stream)
    with pytest.raises(ValueError, match="without other work"):
        engine.generate("x")
    while engine.has_work:
        engine.step()
    with pytest.raises(RuntimeError, match="taken by somebody else"):
        list(stream)
    assert engine.num_sequences == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ["a", "b"]}, "prompt: expected a single prompt, got 2"),
        ({"prompt": ""}, "some text"),
        ({"stop": ""}, "stop: "),
        ({"seed": -1}, "seed: "),
        ({"sampling": 3}, "sampling: "),
    ],
)
def test_bad_arguments_are_refused_at_once(engine, arguments, message):
    with pytest.raises(ValueError, match=message):
        engine.stream(**{"prompt": "abc", **arguments})
