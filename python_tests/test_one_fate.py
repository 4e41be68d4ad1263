"""Whatever goes wrong with one problem is its own error: the others are solved, nothing is left."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from support.fake_engine import FakeEngine, FakeTokenizer, rule_script, text_draft
from support.tiny_models import make_model

from kvcore.config import DetectorConfig, EngineConfig, EvictionConfig, SamplingParams, SearchConfig
from kvcore.engine import Engine
from kvcore.search import LoglikScorer, PrmScorer, Prompt, RandomScorer, Search, solve
from kvcore.search.prompt import Translator
from kvcore.search.scorers.base import Score, SearchScorer

CONFIG = SearchConfig(n=2, max_steps=3, detector=None)
SURROGATE = "what is \ud83d?"


def engine(**options):
    return FakeEngine(rule_script(lambda *_: text_draft("s\n\n")), pace=0.7, **options)


def check_only_second_fails(solutions, message, *engines):
    first, second, third = solutions
    assert (second.finish, message in second.error) == ("error", True), second.error
    for other in (first, third):
        assert (other.finish, other.error, len(other.steps)) == ("max_steps", None, 3)
    assert [e.live for e in engines] == [0] * len(engines)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Odd:
    def __float__(self):
        raise LookupError("not now")

    def __repr__(self):
        raise LookupError("not now either")


def raises(error):
    def answer(requests):
        raise error

    return answer


def broken_iterator(requests):
    yield 0.5
    raise OSError("half way")


ANSWERS = [
    (raises(Mute()), "scorer 'judge': Mute"),
    (raises(StopIteration("x")), "scorer 'judge': StopIteration: x"),
    (raises(SystemExit(3)), "scorer 'judge': SystemExit: 3"),
    (raises(KeyboardInterrupt()), "scorer 'judge': KeyboardInterrupt"),
    (raises(UnicodeEncodeError("ascii", "x", 0, 1, "no")), "scorer 'judge': UnicodeEncodeError"),
    (raises(MemoryError()), "scorer 'judge': MemoryError"),
    (broken_iterator, "scorer 'judge': OSError: half way"),
    (lambda r: {0.1: 1, 0.2: 2}, "scorer 'judge': expected 2 numbers, got dict"),
    (lambda r: b"ab", "scorer 'judge': expected 2 numbers, got bytes"),
    (lambda r: [Odd(), 1.0], "scorer 'judge': expected numbers"),
    (lambda r: [1j, 1.0], "scorer 'judge': expected numbers"),
    (lambda r: [10**400, 1.0], "scorer 'judge': expected numbers"),
]


@pytest.mark.parametrize(("answer", "message"), ANSWERS)
def test_whatever_a_scorer_does_ends_its_problem_only(answer, message):
    class Judge:
        name = "judge"

        def score(self, requests):
            return answer(requests) if requests[0].question == "bad" else [0.5] * len(requests)

    base = engine()
    solutions = solve(base, ["a", "bad", "c"], scorer=Judge(), config=CONFIG)
    check_only_second_fails(solutions, message, base)


def test_a_question_without_utf8_form_is_an_error_of_its_own():
    for question in (SURROGATE, Prompt("b", text=SURROGATE)):
        base, helper = engine(), engine()
        solutions = solve(
            base, ["a", question, "c"], scorer=RandomScorer(), helper=helper, config=CONFIG
        )
        message = "question: expected text that has a UTF-8 form, got the lone surrogate '\\ud83d'"
        check_only_second_fails(solutions, message, base, helper)


class Touchy(FakeTokenizer):
    """Cannot encode one text."""

    def __call__(self, text, **options):
        if "bad" in text:
            raise StopIteration("bad text")
        return super().__call__(text, **options)


@pytest.mark.parametrize("role", ["base", "helper", "judge"])
def test_a_tokenizer_that_raises_ends_its_problem_only(role):
    engines = {
        name: engine(tokenizer=Touchy() if name == role else FakeTokenizer())
        for name in ("base", "helper", "judge")
    }
    solutions = solve(
        engines["base"],
        ["a", "bad", "c"],
        scorer=LoglikScorer(engines["judge"]),
        helper=engines["helper"],
        config=CONFIG,
    )
    check_only_second_fails(solutions, "StopIteration: bad text", *engines.values())


def test_a_translator_that_raises_ends_its_problem_only(monkeypatch):
    base = FakeEngine(
        rule_script(lambda text, _: text_draft("bad\n\n" if text.startswith("bad") else "s\n\n"))
    )
    helper = engine(tokenizer=FakeTokenizer(shift=1))
    ids = Translator.ids

    def touchy(self, tokens, text, **options):
        if b"bad" in text:
            raise KeyError("no such piece")
        return ids(self, tokens, text, **options)

    monkeypatch.setattr(Translator, "ids", touchy)
    config = SearchConfig(n=2, n_helper=0, max_steps=3, detector=None)
    solutions = solve(base, ["a", "bad", "c"], scorer=RandomScorer(), helper=helper, config=config)
    message = "step for the helper model: KeyError: 'no such piece'"
    check_only_second_fails(solutions, message, base, helper)


@pytest.mark.parametrize("verb", ["add", "fork", "extend", "adopt"])
@pytest.mark.parametrize("role", ["base", "helper"])
def test_an_engine_that_refuses_ends_its_problem_only(verb, role, monkeypatch):
    """Ids outside the receiving model's rows are refused by ``add`` and ``extend``."""
    engines = {"base": engine(), "helper": engine()}
    target = engines[role]
    whole = getattr(target, verb)

    def refuse(*args):
        subject = args[0]
        tokens = bytes(subject) if verb == "add" else bytes(target.tokens(subject)[:3])
        if tokens.startswith(b"bad"):
            raise ValueError("tokens: expected ids in [0, 10), got 300")
        return whole(*args)

    monkeypatch.setattr(target, verb, refuse)
    # A base step is adopted by the base and fed to the helper, and the other way round.
    wins = role if verb == "adopt" else {"base": "helper", "helper": "base"}[role]

    class Prefer:
        def score(self, requests):
            return [float(r.source == wins) for r in requests]

    solutions = solve(
        engines["base"], ["a", "bad", "c"], scorer=Prefer(), helper=engines["helper"], config=CONFIG
    )
    message = f"{role} model: tokens: expected ids in [0, 10), got 300"
    check_only_second_fails(solutions, message, *engines.values())


class Failing(SearchScorer):
    """A scorer of which one method raises for one problem."""

    name = "mine"

    def __init__(self, method, error):
        self.method, self.error = method, error

    def open(self, context):
        method, error = self.method, self.error

        class Mine(SearchScorer):
            name = "mine"

            def submit(self, problem, requests, done):
                done([Score(0.0, 0.0)] * len(requests))

        def fail(self, problem, *args, **options):
            if problem == 1:
                raise error
            return getattr(super(broken, self), method)(problem, *args, **options)

        broken = type("Broken", (Mine,), {method: fail})
        return broken()


@pytest.mark.parametrize("method", ["begin", "room", "submit", "claim", "commit", "end"])
@pytest.mark.parametrize("error", [ValueError("boom"), StopIteration("boom"), Mute()])
def test_a_backend_that_raises_ends_its_problem_only(method, error):
    base, helper = engine(), engine()
    solutions = solve(
        base, ["a", "b", "c"], scorer=Failing(method, error), helper=helper, config=CONFIG
    )
    check_only_second_fails(solutions, "scorer 'mine': ", base, helper)


@pytest.mark.parametrize("outcome", [None, [], [1.0, 2.0], [Score(0.0, "high")] * 2, "ab"])
def test_a_backend_that_returns_something_else_is_named(outcome):
    class Strange(Failing):
        def open(self, context):
            class Mine(SearchScorer):
                name = "mine"

                def submit(self, problem, requests, done):
                    done(outcome if problem == 1 else [Score(0.0, 0.0)] * len(requests))

            return Mine()

    base = engine()
    solutions = solve(base, ["a", "b", "c"], scorer=Strange("", None), config=CONFIG)
    check_only_second_fails(solutions, "scorer 'mine': expected", base)


@pytest.mark.parametrize("method", ["ids", "read"])
def test_an_engine_scorer_that_fails_inside_its_engine_ends_one_problem(method, monkeypatch):
    whole, fed = getattr(PrmScorer, method), []

    def fail(self, given):
        fed.append(1)
        if len(fed) == 1:
            raise ValueError("inside")
        return whole(self, given)

    monkeypatch.setattr(PrmScorer, method, fail)
    base, prm = engine(), FakeEngine(has_head=True, tokenizer=FakeTokenizer(chat=True))
    solutions = solve(base, ["a", "b", "c"], scorer=PrmScorer(prm), config=CONFIG)
    failed = [s for s in solutions if s.error is not None]
    assert [s.error for s in failed] == ["scorer 'prm': ValueError: inside"]
    assert sum(s.finish == "max_steps" for s in solutions) == 2
    assert (base.live, prm.live) == (0, 0)


@pytest.mark.parametrize("kind", ["problem_start", "candidate", "step", "problem_end"])
def test_what_on_event_raises_is_nobodys_error_and_ends_the_search(kind):
    base, failure = engine(), ValueError("the screen is gone")

    def complain(event):
        if event.event == kind:
            raise failure

    search = Search(base, ["a", "b"], scorer=RandomScorer(), config=CONFIG, on_event=complain)
    with pytest.raises(ValueError, match="the screen is gone") as caught:
        list(search.run())
    assert caught.value is failure
    assert base.live == 0
    assert all(s.error is None for s in search.solutions)


def test_what_on_event_raises_after_an_interruption_does_not_hide_it():
    def complain(event):
        if event.event == "problem_end":
            raise OSError("the disk is full")

    base = engine(interrupt_at=5)
    search = Search(base, ["a", "b"], scorer=RandomScorer(), config=CONFIG, on_event=complain)
    with pytest.raises(KeyboardInterrupt):
        list(search.run())
    assert [s.finish for s in search.solutions] == ["interrupted"] * 2
    assert base.live == 0


def test_an_interrupted_problem_gets_its_candidates_and_its_end(ctrl_c):
    """Ctrl-C comes while the search waits for a scorer that never returns."""
    base, events, main = engine(), [], threading.get_ident()

    class Hanging:
        def score(self, requests):
            time.sleep(0.2)  # until the search waits; the law holds at any moment
            signal.pthread_kill(main, ctrl_c)
            time.sleep(600)

    search = Search(base, ["a"], scorer=Hanging(), config=CONFIG, on_event=events.append)
    with pytest.raises(KeyboardInterrupt):
        list(search.run())
    kinds = [event.event for event in events]
    assert kinds == ["problem_start", "candidate", "candidate", "problem_end"]
    assert events[-1].solution.finish == "interrupted"
    assert not any(event.chosen for event in events[1:3])


def test_the_process_does_not_wait_for_a_scorer_that_hangs():
    code = (
        "import time\n"
        "from kvcore.search.scorers.base import ScoreRequest\n"
        "from kvcore.search.scorers.thread import ThreadScorer\n"
        "class Hang:\n"
        "    def score(self, requests):\n"
        "        print('in', flush=True)\n"
        "        time.sleep(600)\n"
        "scorer = ThreadScorer(Hang(), wake=print)\n"
        "scorer.submit(0, [ScoreRequest('q', (), 'a')], print)\n"
        "time.sleep(1)\n"
        "scorer.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, b"in")


class TestDefaults:
    def real(self, **options):
        return Engine(make_model(), EngineConfig(max_seqs=8, context_len=256), **options)

    def test_an_engine_without_a_detector_is_lent_the_searchs(self):
        base = self.real()
        sampling = SamplingParams(max_new_tokens=8)
        config = SearchConfig(n=2, max_steps=2, sampling=sampling, max_tokens=200)
        assert config.detector is not None
        [solution] = solve(base, ["q"], scorer=RandomScorer(), config=config)
        assert solution.error is None and solution.steps
        assert base.detector is None and base.num_sequences == 0
        strict = DetectorConfig(entropy_threshold=1e-6, entropy_window=1, entropy_guard=1)
        config = SearchConfig(n=2, max_steps=2, sampling=sampling, max_tokens=200, detector=strict)
        [solution] = solve(base, ["q"], scorer=RandomScorer(), config=config)
        assert solution.aborted.entropy == 4

    def test_a_detector_of_the_engines_own_must_be_the_searchs(self):
        with pytest.raises(ValueError, match="detector: expected the base engine's"):
            Search(self.real(detector=DetectorConfig(gzip=False)), ["q"], scorer=RandomScorer())

    def test_a_helper_or_a_judge_that_evicts_is_refused(self):
        evicting = self.real(eviction=EvictionConfig("rkv", budget=32))
        with pytest.raises(ValueError, match="helper: expected a full cache, got Eviction"):
            Search(self.real(), ["q"], scorer=RandomScorer(), helper=evicting)
        with pytest.raises(ValueError, match="engine: expected a full cache, got Eviction"):
            LoglikScorer(evicting)
