"""Scorers of one's own: called aside, one problem's failure is one problem's."""

import threading
import time

import pytest
from support.fake_engine import FakeEngine, random_script, rule_script, text_draft

from kvcore.config import SearchConfig
from kvcore.search import RandomScorer, Search, solve
from kvcore.search.scorers import ScoreRequest
from kvcore.search.scorers.thread import ThreadScorer

CONFIG = SearchConfig(n=2, max_steps=4, detector=None)


def engine(text="s\n\n"):
    return FakeEngine(rule_script(lambda *_: text_draft(text)))


class Named:
    name = "my judge"

    def __init__(self, answer):
        self.answer = answer

    def score(self, requests):
        if requests[0].question == "good":
            return [0.5] * len(requests)
        return self.answer(requests)


def raising(requests):
    raise KeyError("no such model")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (raising, "scorer 'my judge': KeyError: 'no such model'"),
        (lambda r: [float("nan")] * len(r), "scorer 'my judge': returned NaN"),
        (lambda r: [0.1], "scorer 'my judge': expected 2 scores, got 1"),
        (lambda r: None, "scorer 'my judge': expected 2 numbers, got NoneType"),
        (lambda r: ["a", 1.0], "scorer 'my judge': expected numbers"),
        (lambda r: [None, 1.0], "scorer 'my judge': expected numbers"),
    ],
)
def test_a_failure_ends_its_problem_and_names_the_scorer(answer, message):
    base = engine()
    bad, good = solve(base, ["bad", "good"], scorer=Named(answer), config=CONFIG)
    assert bad.finish == "error"
    assert message in bad.error
    assert (good.finish, good.error) == ("max_steps", None)
    assert base.live == 0


def test_a_waiting_scorer_does_not_hold_up_other_problems():
    """The slow problem's first call returns only after the other problem is solved."""
    solved = threading.Event()

    class Slow:
        max_concurrency = 2

        def score(self, requests):
            if requests[0].question == "slow":
                assert solved.wait(30)
            return [0.0] * len(requests)

    order = []
    for solution in Search(engine(), ["slow", "fast"], scorer=Slow(), config=CONFIG).run():
        order.append(solution.question)
        solved.set()
    assert order == ["fast", "slow"]


def test_calls_are_one_at_a_time_unless_the_scorer_allows_more():
    running, most = [], []

    class Counting:
        def score(self, requests):
            running.append(1)
            most.append(len(running))
            time.sleep(0.002)
            running.pop()
            return [0.0] * len(requests)

    solve(engine(), [f"q{i}" for i in range(6)], scorer=Counting(), config=CONFIG)
    assert max(most) == 1


def test_runs_in_another_thread():
    threads = set()

    class Spy:
        def score(self, requests):
            threads.add(threading.get_ident())
            return [0.0] * len(requests)

    solve(engine(), ["q"], scorer=Spy(), config=CONFIG)
    assert threading.get_ident() not in threads


def test_what_a_scorer_is_told():
    asked = []

    class Spy:
        def score(self, requests):
            asked.append(tuple(requests))
            return [float(r.source == "helper") for r in requests]

    base = engine("one\n\n")
    helper = FakeEngine(
        rule_script(lambda text, _: text_draft("two\n\n" if "two" not in text else "end<eos>"))
    )
    [solution] = solve(
        base, ["why?"], scorer=Spy(), helper=helper, config=SearchConfig(n=1, detector=None)
    )
    assert solution.text == "two\n\nend"
    first, second = asked
    assert [(r.source, r.index, r.text) for r in first] == [
        ("base", 0, "one\n\n"),
        ("helper", 0, "two\n\n"),
    ]
    assert all(r.question == "why?" and r.prefix == () and r.step == 0 for r in first)
    assert [r.prefix for r in second] == [("two\n\n",)] * 2
    assert [r.ends for r in second] == [False, True]
    assert second[1].tokens == (*b"end", 256)
    assert all(r.mean_logprob < 0 for r in second)


def test_numbers_of_other_libraries_are_scores():
    torch = pytest.importorskip("torch")

    class Tensors:
        def score(self, requests):
            return torch.arange(len(requests)).float()

    [solution] = solve(engine(), ["q"], scorer=Tensors(), config=CONFIG)
    assert [(s.index, s.score) for s in solution.steps] == [(1, 1.0)] * 4


def test_a_forgotten_problems_scores_are_dropped():
    come = threading.Semaphore(0)
    scorer = ThreadScorer(RandomScorer(), wake=come.release)
    got = []
    scorer.submit(0, [ScoreRequest("q", (), "a")], got.append)
    scorer.submit(1, [ScoreRequest("q", (), "a")], got.append)
    scorer.end(0)
    while scorer.has_work:
        assert come.acquire(timeout=30)
        scorer.step()
    scorer.close()
    assert len(got) == 1


class TestRandom:
    def test_is_a_function_of_seed_problem_step_source_and_index(self):
        requests = [
            ScoreRequest("q", (), "t", problem=p, step=s, source=source, index=i)
            for p in range(3)
            for s in range(3)
            for source in ("base", "helper")
            for i in range(3)
        ]
        scores = RandomScorer(5).score(requests)
        assert scores == RandomScorer(5).score(requests)
        assert list(reversed(scores)) == RandomScorer(5).score(requests[::-1])
        assert len(set(scores)) == len(scores)
        assert all(0 <= s < 1 for s in scores)
        assert scores != RandomScorer(6).score(requests)

    def test_is_uniform(self):
        requests = [
            ScoreRequest("q", (), "t", problem=p, index=i) for p in range(100) for i in range(100)
        ]
        scores = RandomScorer(0).score(requests)
        # 10,000 draws: the mean of a uniform has a standard error of 0.0029.
        assert abs(sum(scores) / len(scores) - 0.5) < 0.015
        assert abs(sum(s < 0.1 for s in scores) / len(scores) - 0.1) < 0.015

    def test_picks_both_models(self):
        base, helper = FakeEngine(random_script()), FakeEngine(random_script())
        config = SearchConfig(n=2, max_steps=40, detector=None)
        found = solve(base, ["a", "b"], scorer=RandomScorer(), helper=helper, config=config)
        sources = [s.source for solution in found for s in solution.steps]
        assert 0.2 < sources.count("helper") / len(sources) < 0.8
