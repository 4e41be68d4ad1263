"""What a search's users choose: what ends a step, how many candidates, whether anybody judges."""

import dataclasses
import json

import pytest
from support.fake_engine import (
    Draft,
    FakeEngine,
    FakeTokenizer,
    head_logits,
    random_script,
    rule_script,
    text_draft,
)
from support.tiny_models import byte_tokenizer, make_module

from kvcore.config import DetectorConfig, EngineConfig, SamplingParams, SearchConfig
from kvcore.engine import Engine
from kvcore.engine.events import Finish, GenerateSpec
from kvcore.models.loader import bind_model
from kvcore.search import (
    LoglikScorer,
    PrmScorer,
    RandomScorer,
    Search,
    best_of_n,
    best_of_n_config,
    solve,
)
from kvcore.search.prompt import Prompt
from kvcore.search.scorers.prm import conversation_head
from kvcore.search.trajectory import State, Trajectory


def engine(text="s\n\n", **options):
    return FakeEngine(rule_script(lambda *_: text_draft(text)), **options)


class TestSeparators:
    @pytest.mark.parametrize(
        ("given", "held"),
        [
            ("\n", (b"\n",)),
            (b"\xff", (b"\xff",)),
            (["\n\n", b"##"], (b"\n\n", b"##")),
            (("é",), ("é".encode(),)),
        ],
    )
    def test_are_bytes_however_they_are_given(self, given, held):
        assert SearchConfig(separators=given).separators == held
        assert GenerateSpec(separators=given).separators == held
        assert SearchConfig().separators == (b"\n\n",)

    @pytest.mark.parametrize("bad", ["", b"", [], (), ["\n", ""], None, 3, [3], "\ud800", {"\n"}])
    def test_that_are_none_are_refused_by_name(self, bad):
        for kind in (SearchConfig, GenerateSpec):
            with pytest.raises(ValueError, match=r"^separators: expected"):
                kind(separators=bad)

    def test_are_told_as_text(self):
        told = SearchConfig(separators=["\n", b"\xff"]).to_json()
        assert json.loads(json.dumps(told))["separators"] == ["\n", "\\xff"]

    def test_reach_every_candidate(self):
        seen = set()

        def script(context, spec):
            seen.add((spec.stop_at_step, spec.separators))
            return text_draft("s\n\n")

        config = SearchConfig(n=1, max_steps=2, detector=None, separators=["\n", "##"])
        solve(FakeEngine(script), ["q"], scorer=RandomScorer(), helper=FakeEngine(script),
              config=config)  # fmt: skip
        assert seen == {(True, (b"\n", b"##"))}

    @pytest.mark.parametrize(
        ("pieces", "separators", "count"),
        [
            (["a", "b\n", "c"], "\n", 2),
            (["a", "b\n\n", "c"], "\n", 2),
            (["Step", " 1 ", "Step"], "Step", 3),  # it begins the text: no step is empty
            (["  Step", " 1 St", "ep 2"], "Step", 3),  # over a border; the whole token is kept
            (["a.", " b"], ["!", "."], 1),
            (["a", "\n\n", "b."], [".", "\n\n"], 2),
            (["x\n\n", "y\n\n"], "#", 0),
            (["é", "\u00a0é"], "é".encode()[1:], 1),  # any bytes, also the rest of a character
        ],
    )
    def test_end_a_generation_with_the_token_that_completes_one(
        self, pieces, separators, count, monkeypatch
    ):
        """One token per piece, drawn by script; a real engine decides where the step ends."""
        tokenizer = byte_tokenizer()
        ids = []
        for piece in pieces:
            if len(piece.encode()) > 1:
                tokenizer.add_tokens([piece])
            [one] = tokenizer(piece, add_special_tokens=False).input_ids
            ids.append(one)
        _script(monkeypatch, ids)
        machine = Engine(bind_model(make_module(), tokenizer), EngineConfig(kv_bytes=1 << 22))
        sampling = SamplingParams(max_new_tokens=len(ids))
        spec = GenerateSpec(sampling, stop_at_step=True, separators=separators)
        machine.add([1, 2], spec)
        ended = None
        while machine.has_work:
            for event in machine.step():
                ended = event.generation or ended
        whole = count or len(ids)
        assert ended.finish is (Finish.STEP if count else Finish.LENGTH)
        assert ended.tokens == ids[:whole]
        assert ended.text == "".join(pieces[:whole]).encode()


def _script(monkeypatch, ids):
    import torch

    from kvcore import ops

    def scripted(logits, specs, counters, vocab, seen):
        drawn = torch.tensor([ids[c] for c in counters])
        return ops.Samples(drawn, torch.ones(len(specs)), -torch.ones(len(specs)))

    monkeypatch.setattr("kvcore.engine.generation.sample", scripted)


class TestCounts:
    @pytest.mark.parametrize(
        ("config", "with_helper", "without"),
        [
            (SearchConfig(), (8, 8), (8, 0)),
            (SearchConfig(n=3), (3, 3), (3, 0)),
            (SearchConfig(n=3, n_helper=1), (3, 1), (3, 0)),
            (SearchConfig(n=3, n_helper=0), (3, 0), (3, 0)),
            (SearchConfig(n_total=8), (4, 4), (8, 0)),
            (SearchConfig(n_total=5), (3, 2), (5, 0)),
            (SearchConfig(n_total=1), (1, 0), (1, 0)),
        ],
    )
    def test_candidates_of_each_model(self, config, with_helper, without):
        assert config.candidates(helper=True) == with_helper
        assert config.candidates(helper=False) == without
        alone = best_of_n_config(config)
        assert alone.candidates(helper=True) == alone.candidates(helper=False) == without

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"n_total": 0}, "n_total: expected an integer >= 1, got 0"),
            ({"n_total": 2.0}, "n_total: expected"),
            ({"n_total": 4, "n": 2}, "n: expected nothing beside n_total, got 2"),
            ({"n_total": 4, "n_helper": 0}, "n_helper: expected nothing beside n_total, got 0"),
        ],
    )
    def test_a_total_stands_alone(self, settings, message):
        with pytest.raises(ValueError, match=message):
            SearchConfig(**settings)

    def test_a_search_runs_that_many(self):
        events = []
        solutions = solve(
            engine(),
            ["q", "r"],
            scorer=RandomScorer(),
            helper=engine(),
            config=SearchConfig(n_total=5, max_steps=2, detector=None),
            on_event=events.append,
        )
        sources = [e.source for e in events if e.event == "candidate"]
        assert (sources.count("base"), sources.count("helper")) == (2 * 2 * 3, 2 * 2 * 2)
        assert [dataclasses.astuple(s.candidates) for s in solutions] == [(6, 4)] * 2

    def test_early_exits_are_those_of_the_detector(self):
        """Of five base candidates per step the detector ends two; NaN logits end one."""
        numbers = iter(range(1000))

        def rule(text, key):
            kind = next(numbers) % 5
            if kind < 2:
                return Draft(list(b"bad"), (Finish.ENTROPY, Finish.GZIP)[kind], fired_at=3)
            return Draft(list(b"x"), Finish.NAN) if kind == 2 else text_draft("fine\n\n")

        base = FakeEngine(rule_script(rule), detector=DetectorConfig())
        config = SearchConfig(n=5, max_steps=3)
        [solution] = solve(base, ["q"], scorer=RandomScorer(), config=config)
        assert (solution.early_exits, solution.candidates.base) == (6, 15)
        assert solution.aborted.total == 9
        assert solution.to_json()["candidates"] == {"base": 15, "helper": 0}


class TestNobodyJudges:
    def test_a_step_of_one_candidate_needs_no_scorer(self):
        config = SearchConfig(n=1, max_steps=3, detector=None)
        [alone] = solve(engine(), ["q"], config=config)
        [judged] = solve(engine(), ["q"], scorer=RandomScorer(), config=config)
        assert alone.token_ids == judged.token_ids
        assert {(s.score, s.flag) for s in alone.steps} == {(None, "")}
        assert None not in {s.score for s in judged.steps}
        helped = dataclasses.replace(config, n_helper=0)
        [watched] = solve(engine(), ["q"], helper=engine(), config=helped)
        assert watched.token_ids == alone.token_ids
        [plain] = best_of_n(engine(), ["q"], config=config)
        assert plain.token_ids == alone.token_ids

    @pytest.mark.parametrize(
        ("config", "helped", "count"),
        [
            (SearchConfig(detector=None), False, 8),
            (SearchConfig(n=1, detector=None), True, 2),
            (SearchConfig(n_total=2, detector=None), True, 2),
        ],
    )
    def test_a_choice_without_a_scorer_is_refused(self, config, helped, count):
        message = f"scorer: expected one to choose among the {count} candidates of a step"
        with pytest.raises(ValueError, match=message):
            Search(engine(), ["q"], helper=engine() if helped else None, config=config)


class TestScorersServeManySearches:
    """What a search remembers is not in the scorer that the user made."""

    def test_two_at_once(self):
        prm = FakeEngine(has_head=True, tokenizer=FakeTokenizer(chat=True))
        helper = FakeEngine(random_script())
        for scorer in (PrmScorer(prm), LoglikScorer(helper)):
            before = dict(vars(scorer))

            def search(scorer=scorer):
                base = FakeEngine(random_script(), detector=DetectorConfig())
                config = SearchConfig(n=2, max_steps=5)
                return Search(base, ["a", "b"], scorer=scorer, config=config, max_in_flight=2)

            alone = [s.token_ids for s in sorted(search().run(), key=lambda s: s.problem)]
            first, second = search(), search()
            found = [next(first_run := first.run()), *second.run(), *first_run]
            assert sorted(s.token_ids for s in found) == sorted(alone * 2)
            assert vars(scorer) == before
        assert (prm.live, helper.live) == (0, 0)

    def test_newline_read_is_not_the_separators(self):
        """Where the PRM's score is read has nothing to do with what ends the models' steps."""
        prm = FakeEngine(has_head=True, tokenizer=FakeTokenizer(chat=True))
        base = engine("ab#")
        scorer = PrmScorer(prm, mode="newline_last", system_prompt="s")
        config = SearchConfig(n=1, max_steps=1, separators="#", detector=None)
        [solution] = solve(base, ["q"], scorer=scorer, config=config)
        head = conversation_head(prm.model.tokenizer, "q", "s")
        negative, positive = head_logits([*head, *b"ab#\n\n"])
        expected = 1 / (1 + 2.718281828459045 ** (negative - positive))
        assert solution.steps[0].score == pytest.approx(expected, abs=1e-6)  # f32 logits


NEXT = {
    "planting": {"feeding"},
    "feeding": {"proposing"},
    "proposing": {"scoring", "committing"},
    "scoring": {"committing"},
    "committing": {"feeding"},
    "retired": set(),
}


class TestStates:
    @pytest.mark.parametrize("here", State)
    def test_only_the_next_states_may_be_entered(self, here):
        for there in State:
            trajectory = Trajectory(0, 7, Prompt("q"), state=here)
            may = there.value in NEXT[here.value]
            may = may or (there is State.RETIRED and here is not State.RETIRED)
            if may:
                trajectory.enter(there)
                assert trajectory.state is there
                continue
            words = f"problem 7 cannot go from {here.value} to {there.value}"
            with pytest.raises(RuntimeError, match=words):
                trajectory.enter(there)
            assert trajectory.state is here

    def test_a_transition_that_may_not_be_is_the_problems_error(self):
        """An engine that tells a root's event twice would start a step twice."""

        class Twice(FakeEngine):
            def step(self):
                events = super().step()
                return [*events, *(e for e in events if e.extended)]

        base = Twice(rule_script(lambda *_: text_draft("s\n\n")))
        config = SearchConfig(n=1, max_steps=2, detector=None)
        [solution] = solve(base, ["q"], config=config)
        assert solution.finish == "error"
        assert "cannot go from proposing to proposing" in solution.error
        assert base.live == 0
