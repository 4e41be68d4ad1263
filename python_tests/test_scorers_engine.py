"""Scorers on engines: values, what is fed, and whose cache goes on. Engines are scripted."""

import math

import pytest
import torch
from support.fake_engine import (
    FakeEngine,
    FakeTokenizer,
    head_logits,
    logprob,
    random_script,
    rule_script,
    text_draft,
)
from support.search_oracle import loglik_score

from kvcore.config import EvictionConfig, SearchConfig
from kvcore.search import LoglikScorer, PrmScorer, ScorerError, solve
from kvcore.search.ports import Ports
from kvcore.search.scorers import ScoreRequest
from kvcore.search.scorers.base import ScorerContext
from kvcore.search.scorers.prm import conversation_head


def prm_engine(**options):
    return FakeEngine(has_head=True, tokenizer=FakeTokenizer(chat=True), **options)


def probability(tokens):
    negative, positive = head_logits(tokens)
    return 1 / (1 + math.exp(negative - positive))


class TestPrm:
    def test_scores_are_the_probability_at_the_candidates_separator(self):
        engine = prm_engine(pace=0.5)
        requests = [
            ScoreRequest("q1", ("first\n\n",), "second\n\n"),
            ScoreRequest("q1", (), "first\n\n"),
            ScoreRequest("q1", ("first\n\n",), "other\n\n"),
            ScoreRequest("q2", ("a\n\n", "b\n\n"), "c"),
        ]
        scores = PrmScorer(engine, system_prompt="s").score(requests)
        for request, score in zip(requests, scores, strict=True):
            whole = conversation_head(engine.model.tokenizer, request.question, "s")
            for text in (*request.prefix, request.text):
                whole += [*text.strip().encode(), 257]
            assert score == pytest.approx(probability(whole), abs=1e-7)  # f32 logits
        assert engine.live == 0

    def test_newline_mode_reads_at_the_last_newline(self):
        engine = prm_engine()
        scorer = PrmScorer(engine, mode="newline_last", system_prompt="s")
        [score] = scorer.score([ScoreRequest("q", ("a\n\n",), " b\n\n")])
        whole = [*conversation_head(engine.model.tokenizer, "q", "s"), *b"a\n\nb\n\n"]
        assert score == pytest.approx(probability(whole), abs=1e-7)  # f32 logits

    def test_only_candidates_are_fed(self):
        """The committed steps stay cached: nothing is fed twice, and winners are taken over."""
        engine = prm_engine()
        base = FakeEngine(rule_script(lambda text, key: text_draft(f"{key % 1000}\n\n")))
        events = []
        [solution] = solve(
            base,
            ["q"],
            scorer=PrmScorer(engine),
            config=SearchConfig(n=3, max_steps=5, detector=None),
            on_event=events.append,
        )
        texts = [e.text for e in events if e.event == "candidate"]
        head = conversation_head(engine.model.tokenizer, "q", PrmScorer(engine).system_prompt)
        expected = len(head) + sum(len(t.strip()) + 1 for t in texts)
        assert engine.fed == expected
        assert solution.tokens.scorer.processed == expected
        assert engine.live == 0

    def test_the_logit_difference_decides_where_the_probability_saturates(self):
        """Both probabilities round to 1; the larger difference wins although it comes later."""

        class Certain(FakeEngine):
            def _feed(self, seq_id, seq):
                event = super()._feed(seq_id, seq)
                if event.values is not None:
                    event.values[0], event.values[1] = 0.0, 50.0 + seq.tokens[-2] - ord("a")
                return event

        base = FakeEngine(rule_script(lambda text, key: text_draft("b\n\n")))
        helper = FakeEngine(rule_script(lambda text, key: text_draft("c\n\n")))
        scorer = PrmScorer(Certain(has_head=True, tokenizer=FakeTokenizer(chat=True)))
        config = SearchConfig(n=1, max_steps=2, detector=None)
        [solution] = solve(base, ["q"], scorer=scorer, helper=helper, config=config)
        assert [(s.source, s.score) for s in solution.steps] == [("helper", 1.0)] * 2

    def test_extreme_logits_do_not_overflow(self):
        backend = PrmScorer(prm_engine()).open(ScorerContext(Ports()))
        assert backend.read(torch.tensor([1e4, -1e4])).value == 0.0
        assert backend.read(torch.tensor([-1e4, 1e4])).value == 1.0

    def test_a_full_scorer_ends_the_problem_as_max_tokens(self):
        head = len(conversation_head(FakeTokenizer(chat=True), "q", "s"))
        engine = prm_engine(context_len=head + 20)
        base = FakeEngine(rule_script(lambda *_: text_draft("abcde\n\n")))
        config = SearchConfig(n=2, detector=None)
        [solution] = solve(base, ["q"], scorer=PrmScorer(engine, system_prompt="s"), config=config)
        assert solution.finish == "max_tokens"
        assert [s.text for s in solution.steps] == ["abcde\n\n"] * 3 + ["a"]
        assert engine.live == 0

    def test_a_question_that_fills_the_scorer_is_an_error(self):
        base = FakeEngine(rule_script(lambda *_: text_draft("a<eos>")))
        config = SearchConfig(n=2, detector=None)
        scorer = PrmScorer(prm_engine(context_len=60), system_prompt="s")
        bad, good = solve(base, ["x" * 60, "y"], scorer=scorer, config=config)
        assert "scorer 'prm': prompt has" in bad.error
        assert good.finish == "eos"

    def test_an_engine_error_names_the_scorer(self):
        class Broken(FakeEngine):
            def _feed(self, seq_id, seq):
                event = super()._feed(seq_id, seq)
                if seq.parent is None:
                    return event
                seq.failed = True
                return type(event)(seq_id, error="keys are not finite")

        broken = Broken(has_head=True, tokenizer=FakeTokenizer(chat=True))
        base = FakeEngine(rule_script(lambda *_: text_draft("a\n\n")))
        config = SearchConfig(n=2, detector=None)
        [solution] = solve(base, ["q"], scorer=PrmScorer(broken), config=config)
        assert solution.error == "scorer 'prm': keys are not finite"
        assert (base.live, broken.live) == (0, 0)

    def test_settings_are_checked(self):
        with pytest.raises(ValueError, match="mode: expected"):
            PrmScorer(prm_engine(), mode="other")
        with pytest.raises(ValueError, match="expected a model with a token head"):
            PrmScorer(FakeEngine())
        evicting = prm_engine()
        evicting.eviction = EvictionConfig("rkv", budget=64)
        with pytest.raises(ValueError, match="expected a full cache"):
            PrmScorer(evicting)

    def test_a_request_that_does_not_fit_is_refused_outside_a_search(self):
        scorer = PrmScorer(prm_engine(context_len=60), system_prompt="s")
        with pytest.raises(ScorerError, match="request 1 does not fit"):
            scorer.score([ScoreRequest("q", (), "a"), ScoreRequest("q", (), "a" * 60)])


class TestLoglik:
    def run(self, scorer, base_script, helper_script, **options):
        base, helper = (
            FakeEngine(base_script, pace=0.6),
            FakeEngine(helper_script, pace=0.6, seed=1),
        )
        events = []
        config = SearchConfig(detector=None, **options)
        [solution] = solve(
            base, ["q"], scorer=scorer, helper=helper, config=config, on_event=events.append
        )
        assert (base.live, helper.live) == (0, 0)
        return solution, helper, events

    def test_scores_are_mean_logprobs_under_the_helper_whoever_wrote_the_step(self):
        solution, _, events = self.run(
            LoglikScorer(), random_script(eos=0.0), random_script(eos=0.0), n=3, max_steps=10
        )
        context = list(b"q")
        checked = 0
        for step, committed in enumerate(solution.steps):
            for event in events:
                if event.event == "candidate" and event.step == step and event.score is not None:
                    assert event.score == pytest.approx(
                        loglik_score(context, event.tokens), abs=1e-6
                    )
                    checked += 1
            context += committed.tokens
        assert checked > 30
        assert {s.source for s in solution.steps} == {"base", "helper"}

    def test_a_base_win_takes_over_the_scoring_fork(self):
        """The helper is fed each base candidate once, for its score, and not again on commit."""
        solution, helper, _ = self.run(
            LoglikScorer(),
            rule_script(lambda text, key: text_draft("ab\n\n")),
            rule_script(lambda text, key: text_draft("\n\n")),  # blank: never offered
            n=3,
            max_steps=6,
        )
        assert [s.source for s in solution.steps] == ["base"] * 6
        assert helper.fed == 1 + 6 * 3 * 4
        assert solution.tokens.helper.processed == 1
        assert solution.tokens.scorer.processed == 6 * 3 * 4

    def test_helpers_candidates_are_not_fed(self):
        solution, helper, _ = self.run(
            LoglikScorer(),
            rule_script(lambda text, key: text_draft("\n\n")),
            rule_script(lambda text, key: text_draft("ab\n\n")),
            n=3,
            max_steps=4,
        )
        assert [s.source for s in solution.steps] == ["helper"] * 4
        assert helper.fed == 1
        assert solution.tokens.scorer.processed == 0

    def test_a_helper_without_candidates_only_scores(self):
        solution, helper, _ = self.run(
            LoglikScorer(), random_script(eos=0.0), random_script(), n=3, n_helper=0, max_steps=5
        )
        assert {s.source for s in solution.steps} == {"base"}
        assert helper.generated == 0

    def test_an_engine_of_its_own_gives_the_same_scores(self):
        scripts = random_script(), random_script()
        shared, _, _ = self.run(LoglikScorer(), *scripts, n=2, max_steps=12)
        own = FakeEngine(pace=0.7)
        apart, _, _ = self.run(LoglikScorer(own), *scripts, n=2, max_steps=12)
        assert [(s.source, s.index) for s in apart.steps] == [
            (s.source, s.index) for s in shared.steps
        ]
        for one, other in zip(apart.steps, shared.steps, strict=True):
            assert (one.score is None) == (other.score is None)
            assert one.score is None or one.score == pytest.approx(other.score, abs=1e-6)
        assert own.live == 0

    def test_naming_the_helper_is_the_same_as_none(self):
        base, helper = FakeEngine(random_script()), FakeEngine(random_script())
        config = SearchConfig(n=2, max_steps=5, detector=None)
        solve(base, ["q"], scorer=LoglikScorer(helper), helper=helper, config=config)
        assert helper.live == 0

    def test_another_vocabulary_is_scored_by_text(self):
        shifted = FakeTokenizer(shift=3)
        own = FakeEngine(tokenizer=shifted)
        base = FakeEngine(rule_script(lambda *_: text_draft("ab\n\n")))
        config = SearchConfig(n=1, max_steps=1, detector=None)
        [solution] = solve(base, ["q"], scorer=LoglikScorer(own), config=config)
        ids = [b + 3 for b in b"qab\n\n"]
        expected = sum(logprob(ids[:i], ids[i]) for i in range(1, 5)) / 4
        assert solution.steps[0].score == pytest.approx(expected, abs=1e-6)

    def test_outside_a_search(self):
        own = FakeEngine(pace=0.5)
        requests = [ScoreRequest("q", ("a\n\n",), "b\n\n"), ScoreRequest("q", (), "c")]
        scores = LoglikScorer(own).score(requests)
        assert scores[0] == pytest.approx(loglik_score(b"qa\n\n", list(b"b\n\n")), abs=1e-6)
        assert scores[1] == pytest.approx(loglik_score(b"q", list(b"c")), abs=1e-6)
        assert own.live == 0

    def test_needs_a_language_model(self):
        with pytest.raises(ValueError, match="expected a language model"):
            LoglikScorer(prm_engine())
