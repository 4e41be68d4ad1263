"""Models that work elsewhere: they delay whoever waits for them, nobody else, and wake the search.

No test sleeps to be right: what must happen while the helper is slow is what the helper waits for.
"""

import signal
import threading
import time

import pytest
from support.fake_engine import FakeEngine, random_script, rule_script, text_draft
from support.slow_port import SlowPort

from kvcore.config import DetectorConfig, SearchConfig
from kvcore.engine import Engine
from kvcore.search import LoglikScorer, RandomScorer, Search, WakingPort, solve
from kvcore.search.ports import Ports

CONFIG = SearchConfig(n=2, max_steps=3, detector=None)
PATIENCE = 30.0  # seconds after which a test gives up


def engine(text="s\n\n", **options):
    return FakeEngine(rule_script(lambda *_: text_draft(text)), **options)


def steps_of(solutions):
    return [[(s.source, s.index, s.tokens) for s in solution.steps] for solution in solutions]


class Counted(FakeEngine):
    """Says when it has taken ``enough`` steps."""

    def __init__(self, *args, enough=10**9, **options):
        super().__init__(*args, **options)
        self.enough, self.reached = enough, threading.Event()

    def step(self):
        if self.steps >= self.enough:
            self.reached.set()
        return super().step()


def test_an_engine_is_local_and_a_slow_port_is_not():
    assert not isinstance(engine(), WakingPort)
    assert not hasattr(Engine, "listen")
    assert isinstance(SlowPort(engine()), WakingPort)


def test_a_port_elsewhere_changes_nothing_but_time():
    def run(wrap, scorer):
        base = FakeEngine(random_script(), detector=DetectorConfig())
        helper = FakeEngine(random_script())
        port = wrap(helper)
        config = SearchConfig(n=2, max_steps=6, seed=3)
        found = solve(base, ["a", "b", "c"], scorer=scorer, helper=port, config=config)
        assert [s.error for s in found] == [None] * 3
        assert (base.live, helper.live) == (0, 0)
        return steps_of(found), [s.tokens for s in found]

    for scorer in (RandomScorer(1), LoglikScorer()):
        near = run(lambda helper: helper, scorer)
        far = run(lambda helper: SlowPort(helper, before=lambda: None), scorer)
        assert near == far


def test_base_steps_of_all_problems_go_on_while_the_helper_works():
    """The helper's first step takes until the base model has taken 20."""
    base = Counted(rule_script(lambda *_: text_draft("x" * 30 + "\n\n")), enough=20)
    helper = engine()
    port = SlowPort(helper, before=lambda: base.reached.wait(PATIENCE))
    solutions = solve(base, ["a", "b"], scorer=RandomScorer(), helper=port, config=CONFIG)
    assert base.reached.is_set()
    assert [s.finish for s in solutions] == ["max_steps"] * 2


def test_a_problem_that_waits_for_its_helper_does_not_hold_up_another():
    """The helper says nothing of one question until the other is solved."""
    solved = threading.Event()

    class Biased(FakeEngine):
        def _generate(self, seq_id, seq):
            slow = bytes(seq.tokens[:4]) == b"slow"
            return None if slow and not solved.is_set() else super()._generate(seq_id, seq)

    helper = Biased(rule_script(lambda *_: text_draft("h\n\n")))
    search = Search(
        engine(),
        ["slow", "fast"],
        scorer=RandomScorer(),
        helper=SlowPort(helper, before=lambda: time.sleep(0.001)),
        config=CONFIG,
    )
    order = []
    for solution in search.run():
        order.append(solution.question)
        solved.set()
    assert order == ["fast", "slow"]
    assert helper.live == 0


def test_a_search_sleeps_until_it_is_woken():
    """While the helper is silent and the base model has nothing to do, nobody is asked anything."""
    looks, silence = [], []

    class Asked(FakeEngine):
        @property
        def has_work(self):
            looks.append(1)
            return super().has_work

    base, helper = Asked(rule_script(lambda *_: text_draft("s\n\n"))), engine("x" * 20 + "\n\n")

    def silent_once():
        if helper.steps == 15:  # the base model's candidates have ended long ago
            time.sleep(0.2)  # the last look
            before = len(looks)
            time.sleep(1.0)
            silence.append(len(looks) - before)

    port = SlowPort(helper, before=silent_once)
    config = SearchConfig(n=2, max_steps=1, detector=None)
    [solution] = solve(base, ["q"], scorer=RandomScorer(), helper=port, config=config)
    assert (solution.finish, silence) == ("max_steps", [0])
    assert (base.live, helper.live) == (0, 0)


def test_ctrl_c_while_the_helper_is_silent_releases_everything(ctrl_c):
    base, helper, main = engine(), engine(), threading.get_ident()

    def never():
        if base.steps >= 6:
            time.sleep(0.2)  # until the search waits; the law holds at any moment
            signal.pthread_kill(main, ctrl_c)
            time.sleep(600)

    port = SlowPort(helper, before=never)
    search = Search(base, ["a", "b"], scorer=RandomScorer(), helper=port, config=CONFIG)
    with pytest.raises(KeyboardInterrupt):
        list(search.run())
    assert (base.live, helper.live) == (0, 0)
    assert [s.finish for s in search.solutions] == ["interrupted"] * 2
    assert port.heard[-1] is False


def test_a_port_that_breaks_down_ends_the_search_and_releases_everything():
    base, helper = engine(), engine()
    port = SlowPort(helper, before=lambda: None)

    class Breaking:
        def score(self, requests):
            port.fail(ConnectionError("the helper is gone"))
            time.sleep(600)

    search = Search(base, ["a"], scorer=Breaking(), helper=port, config=CONFIG)
    with pytest.raises(ConnectionError, match="the helper is gone"):
        list(search.run())
    assert (base.live, helper.live) == (0, 0)


def test_what_comes_between_the_look_and_the_wait_is_not_missed():
    """The bell is silenced before anybody is looked at, so that it may ring during the look."""
    ports = Ports()

    class Late:
        """Something arrives just after it was found empty."""

        has_work, steps = True, 0

        def step(self):
            self.steps += 1
            if self.steps == 1:
                ports.wake()
            return self.steps > 1

    late = Late()
    ports.watch(late)
    waiter = threading.Thread(target=lambda: [ports.advance(), ports.advance()], daemon=True)
    waiter.start()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()
    assert late.steps == 2
