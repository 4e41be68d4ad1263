"""Admission, failures, interruptions, settings: whatever happens, engines are left clean."""

import json
import threading

import pytest
from support.fake_engine import (
    Draft,
    FakeEngine,
    FakeTokenizer,
    random_script,
    rule_script,
    text_draft,
)

from kvcore.config import DetectorConfig, SearchConfig
from kvcore.search import LoglikScorer, PrmScorer, Prompt, RandomScorer, Search, solve

DETECTOR = DetectorConfig()


def base_engine(script, **options):
    return FakeEngine(script, detector=DETECTOR, **options)


class TestAdmission:
    def test_rows_of_every_engine_are_respected(self):
        base = base_engine(random_script(), max_seqs=20)
        helper = FakeEngine(random_script(), max_seqs=20)
        prm = FakeEngine(has_head=True, tokenizer=FakeTokenizer(chat=True), max_seqs=18)
        search = Search(
            base,
            [f"q{i}" for i in range(9)],
            scorer=PrmScorer(prm),
            helper=helper,
            config=SearchConfig(n=4, n_helper=2, max_steps=6),
        )
        assert search.max_in_flight == 2  # 20 // (1 + 4), 20 // (1 + 2), 18 // (1 + 4 + 2)
        assert len(list(search.run())) == 9
        assert base.most_live <= 10
        assert helper.most_live <= 6
        assert prm.most_live <= 14

    def test_a_scorer_on_the_helper_needs_rows_there(self):
        base, helper = base_engine(random_script()), FakeEngine(random_script(), max_seqs=22)
        config = SearchConfig(n=4, n_helper=2, max_steps=3)
        search = Search(base, ["a", "b", "c"], scorer=LoglikScorer(), helper=helper, config=config)
        assert search.max_in_flight == 22 // (1 + 2 + 4)

    def test_at_least_one(self):
        base = base_engine(random_script(), max_seqs=2)
        config = SearchConfig(n=4, max_steps=3)
        assert Search(base, ["a"], scorer=RandomScorer(), config=config).max_in_flight == 1

    def test_problems_refill_on_their_own(self):
        """A short problem's place is taken while a long one goes on."""

        def rule(text, key):
            return text_draft("s\n\n") if text.startswith("long") else text_draft("s<eos>")

        order = [
            s.problem
            for s in Search(
                base_engine(rule_script(rule)),
                ["long", "a", "b", "c"],
                scorer=RandomScorer(),
                config=SearchConfig(n=1, max_steps=50),
                max_in_flight=2,
            ).run()
        ]
        assert order == [1, 2, 3, 0]

    def test_no_questions(self):
        assert solve(base_engine(random_script()), [], scorer=RandomScorer()) == []


class TestFailures:
    def test_an_engines_error_ends_that_problem_only(self):
        def rule(text, key):
            if text.startswith("bad") and "\n\n" in text:
                return Draft([], error="keys are not finite")
            return text_draft("s\n\n") if "\n\n" not in text else text_draft("e<eos>")

        base = base_engine(rule_script(rule), pace=0.5)
        events = []
        bad, good = solve(
            base,
            ["bad", "good"],
            scorer=RandomScorer(),
            config=SearchConfig(n=3),
            on_event=events.append,
        )
        assert (bad.finish, bad.error) == ("error", "base model: keys are not finite")
        assert bad.text == "s\n\n"
        assert (good.finish, good.error) == ("eos", None)
        assert base.live == 0
        assert [e.solution.finish for e in events if e.event == "problem_end"].count("error") == 1

    @pytest.mark.parametrize("length", [0, 4095, 4096, 9000])
    def test_a_prompt_that_does_not_fit(self, length):
        base = base_engine(rule_script(lambda *_: text_draft("s<eos>")))
        bad, good = solve(base, ["x" * length, "y"], scorer=RandomScorer())
        assert good.finish == "eos"
        if length == 4095:
            assert (bad.finish, bad.token_ids) == ("max_tokens", (ord("s"),))
        else:
            assert (bad.finish, bad.steps) == ("error", ())
            assert f"expected 1 to 4095 prompt tokens for the base model, got {length}" in bad.error

    def test_a_stuck_engine_is_reported(self):
        base = base_engine(random_script())
        search = Search(base, ["a"], scorer=RandomScorer(), config=SearchConfig(max_steps=3))
        base.step = lambda: []
        type(base).has_work, saved = property(lambda self: False), type(base).has_work
        try:
            with pytest.raises(RuntimeError, match=r"problems \[0\] are not solved"):
                list(search.run())
        finally:
            type(base).has_work = saved
        assert base.live == 0


class TestInterruption:
    @pytest.mark.parametrize("at", range(1, 40, 3))
    def test_keyboard_interrupt_releases_everything_and_keeps_what_there_is(self, at):
        base = base_engine(random_script(eos=0.0), pace=0.7)
        helper = FakeEngine(random_script(eos=0.0), pace=0.7)
        prm = FakeEngine(has_head=True, tokenizer=FakeTokenizer(chat=True), interrupt_at=at)
        search = Search(
            base,
            ["a", "b", "c"],
            scorer=PrmScorer(prm),
            helper=helper,
            config=SearchConfig(n=3, max_steps=40),
            max_in_flight=2,
        )
        with pytest.raises(KeyboardInterrupt):
            list(search.run())
        assert (base.live, helper.live, prm.live) == (0, 0, 0)
        assert [s.finish for s in search.solutions[-2:]] == ["interrupted"] * 2
        assert base.generated == sum(s.tokens.base.generated for s in search.solutions)

    def test_closing_the_iterator_is_an_interruption(self):
        base = base_engine(random_script(eos=0.3))
        search = Search(
            base, [f"q{i}" for i in range(6)], scorer=RandomScorer(), config=SearchConfig(n=2)
        )
        run = search.run()
        next(run)
        run.close()
        assert base.live == 0
        assert any(s.finish == "interrupted" for s in search.solutions)

    def test_a_callback_that_raises_ends_the_search_cleanly(self):
        def complain(event):
            if event.event == "step":
                raise OSError("disk full")

        base, helper = base_engine(random_script()), FakeEngine(random_script())
        with pytest.raises(OSError, match="disk full"):
            solve(base, ["a", "b"], scorer=RandomScorer(), helper=helper, on_event=complain)
        assert (base.live, helper.live) == (0, 0)

    def test_interrupt_while_a_scorer_thread_works(self):
        entered, release = threading.Event(), threading.Event()

        class Slow:
            def score(self, requests):
                entered.set()
                release.wait(20)
                return [0.0] * len(requests)

        class Interrupting(FakeEngine):
            @property
            def has_work(self):
                if entered.is_set():
                    raise KeyboardInterrupt
                return super().has_work

        base = Interrupting(rule_script(lambda *_: text_draft("s\n\n")), detector=DETECTOR)
        search = Search(base, ["a"], scorer=Slow(), config=SearchConfig(n=1))
        with pytest.raises(KeyboardInterrupt):
            list(search.run())
        release.set()
        assert base.live == 0

    def test_runs_once(self):
        search = Search(base_engine(random_script()), [], scorer=RandomScorer())
        assert list(search.run()) == []
        with pytest.raises(RuntimeError, match="runs once"):
            search.run()


class TestSettings:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"config": SearchConfig(n_helper=2)}, "n_helper: expected 0 or None without a helper"),
            ({"scorer": LoglikScorer()}, "expected a helper or an engine of its own"),
            ({"max_in_flight": 0}, "max_in_flight: expected an integer >= 1, got 0"),
            ({"questions": [Prompt("a", key=1), Prompt("b", key=1)]}, "expected different keys"),
            ({"questions": [Prompt("a", key=-1)]}, "key: expected"),
            ({"config": SearchConfig(detector=DetectorConfig(gzip=False))}, "detector: expected"),
            ({"base": FakeEngine(has_head=True)}, "base: expected a language model"),
            ({"helper": FakeEngine(has_head=True)}, "helper: expected a language model"),
        ],
    )
    def test_what_does_not_fit_is_refused_by_name(self, arguments, message):
        given = {
            "base": base_engine(random_script()),
            "questions": ["q"],
            "scorer": RandomScorer(),
            **arguments,
        }
        with pytest.raises(ValueError, match=message):
            Search(given.pop("base"), given.pop("questions"), **given)

    @pytest.mark.parametrize(
        "arguments", [{"questions": "one string"}, {"questions": [3]}, {"scorer": lambda r: 0.0}]
    )
    def test_wrong_types(self, arguments):
        given = {"questions": ["q"], "scorer": RandomScorer(), **arguments}
        with pytest.raises(TypeError):
            Search(base_engine(random_script()), given.pop("questions"), **given)


def test_events_and_solutions_are_json():
    events = []
    base = base_engine(random_script(), budget=20)
    solutions = solve(
        base,
        ["ä", "b"],
        scorer=RandomScorer(),
        helper=FakeEngine(random_script(), tokenizer=FakeTokenizer(shift=1)),
        config=SearchConfig(n=2, max_steps=10),
        on_event=events.append,
    )
    for item in [*events, *solutions]:
        text = json.dumps(item.to_json(), allow_nan=False)
        assert json.loads(text) == item.to_json()
    kinds = {e.to_json()["event"] for e in events}
    assert kinds == {"warning", "problem_start", "candidate", "step", "problem_end"}
