"""Search against a sequential oracle, and the laws of its books. Engines are scripted."""

import math
import random

import pytest
from support.fake_engine import (
    EOS,
    Draft,
    FakeEngine,
    FakeTokenizer,
    random_script,
    rule_script,
    text_draft,
)
from support.search_oracle import loglik_score, prm_score, solve_slowly, text_of

from kvcore.config import DetectorConfig, SamplingParams, SearchConfig
from kvcore.engine.events import Finish
from kvcore.search import (
    LoglikScorer,
    PrmScorer,
    Prompt,
    RandomScorer,
    Search,
    best_of_n,
    solve,
)
from kvcore.search.scorers import ScoreRequest
from kvcore.search.scorers.prm import conversation_head

DETECTOR = DetectorConfig()


class LengthScorer:
    """Prefers long texts; equal for equal lengths, so ties are common."""

    def score(self, requests):
        return [float(len(r.text)) for r in requests]


class TextScorer:
    """Scores by the text itself: the highest last letter wins."""

    def score(self, requests):
        return [float(max(r.text.strip().encode() or b"\0")) for r in requests]


def base_engine(script, **options):
    return FakeEngine(script, detector=DETECTOR, **options)


def steps_of(solution):
    return [(s.source, s.index, s.tokens, s.flag) for s in solution.steps]


def random_case(rng):
    n_helper = rng.choice([0, 1, 2, 3])
    config = SearchConfig(
        n=rng.randint(1, 3),
        n_helper=n_helper,
        sampling=SamplingParams(max_new_tokens=rng.choice([6, 14, 512])),
        max_steps=rng.choice([3, 30]),
        max_tokens=rng.choice([60, 400]),
        detector=rng.choice([None, DETECTOR]),
        seed=rng.randint(0, 2**40),
    )
    scripts = {"base": random_script(abort=rng.choice([0.1, 0.9]), eos=rng.choice([0.02, 0.2]))}
    if n_helper or rng.random() < 0.3:
        scripts["helper"] = random_script()
    return config, scripts


@pytest.mark.parametrize("kind", ["random", "loglik", "prm"])
@pytest.mark.parametrize("group", range(10))
def test_every_search_is_the_oracles_and_frees_everything(kind, group):
    rng = random.Random(1000 + group)
    for _ in range(7):
        config, scripts = random_case(rng)
        if kind == "loglik" and "helper" not in scripts:
            scripts["helper"] = random_script()
        counts = {"base": config.n, "helper": config.n_helper}
        questions = [f"what is {i}?" for i in range(rng.randint(1, 4))]
        options = {"pace": rng.choice([1.0, 0.4]), "seed": rng.randint(0, 99)}
        base = base_engine(scripts["base"], budget=rng.choice([None, 20]), **options)
        helper = FakeEngine(scripts["helper"], **options) if "helper" in scripts else None
        prm_len = rng.choice([110, 4096])
        prm = FakeEngine(
            has_head=True, tokenizer=FakeTokenizer(chat=True), context_len=prm_len, **options
        )
        scorer = {"random": RandomScorer(3), "loglik": LoglikScorer(), "prm": PrmScorer(prm)}[kind]
        if kind == "prm":
            scorer = PrmScorer(prm, system_prompt="s")
        solutions = solve(base, questions, scorer=scorer, helper=helper, config=config)
        for key, (question, solution) in enumerate(zip(questions, solutions, strict=True)):
            prompt = list(question.encode())
            head = conversation_head(prm.model.tokenizer, question, "s")

            def score(
                committed,
                ids,
                source,
                index,
                step,
                key=key,
                prompt=prompt,
                head=head,
                limit=prm_len,
            ):
                if kind == "loglik":
                    return loglik_score([*prompt, *(t for s in committed for t in s)], ids)
                if kind == "prm":
                    return prm_score(head, committed, ids, limit)
                request = ScoreRequest(
                    "", (), "", source=source, problem=key, step=step, index=index
                )
                return RandomScorer(3).score([request])[0]

            def scorer_room(committed, head=head, limit=prm_len):
                used = sum(len(text_of(s).strip().encode()) + 1 for s in committed)
                return limit - len(head) - used - 1

            expected = solve_slowly(
                scripts,
                dict.fromkeys(scripts, prompt),
                score,
                config,
                counts,
                key=key,
                scorer_room=scorer_room if kind == "prm" else None,
            )
            assert steps_of(solution) == expected.steps
            assert solution.finish == expected.finish
            assert solution.aborted.total == expected.aborted
            assert solution.tokens.base.generated == expected.generated["base"]
            assert solution.tokens.helper.generated == expected.generated["helper"]
            assert solution.error is None
        for engine in (base, helper, prm):
            assert engine is None or engine.live == 0


def test_both_models_hold_the_same_tokens_after_every_commit():
    base = base_engine(random_script(), pace=0.5)
    helper = FakeEngine(random_script(), pace=0.5, seed=1)
    seen = []

    def look(event):
        if event.event != "step":
            return
        trajectory = search._rescue.active[event.problem]
        told = list(f"q{event.problem}".encode()) + trajectory.token_ids
        for side in trajectory.sides.values():
            held = side.lease.port.tokens(side.root)
            last = trajectory.steps[-1]
            ended = held + list(last.tokens) == told  # a last step may not be fed any more
            assert held == told or (ended and trajectory.kv_peak >= 0)
            seen.append(held == told)
        assert event.context == len(told)

    config = SearchConfig(n=2, max_steps=12)
    search = Search(
        base, ["q0", "q1", "q2"], scorer=RandomScorer(), helper=helper, config=config, on_event=look
    )
    solutions = list(search.run())
    sources = {step.source for solution in solutions for step in solution.steps}
    assert sources == {"base", "helper"}
    assert seen.count(False) <= len(solutions)


@pytest.mark.parametrize("in_flight", [1, 2, 9])
def test_results_do_not_depend_on_company_or_timing(in_flight):
    def run(questions, **options):
        base = base_engine(random_script(), **options)
        helper = FakeEngine(random_script(), **options)
        found = solve(
            base,
            questions,
            scorer=LoglikScorer(),
            helper=helper,
            config=SearchConfig(n=3, max_steps=15, seed=5),
            max_in_flight=in_flight,
        )
        return {s.problem: (steps_of(s), s.finish, s.tokens) for s in found}

    prompts = [Prompt(f"problem {i}", key=100 + i) for i in range(6)]
    together = run(prompts, pace=0.5, seed=in_flight)
    alone = {}
    for prompt in reversed(prompts):
        alone.update(run([prompt]))
    assert together == alone


def test_losers_and_fallen_candidates_are_freed_before_the_step_ends():
    def rule(text, key):
        return Draft(list(b"loop"), Finish.GZIP, fired_at=4) if key % 3 else text_draft("fine\n\n")

    base = base_engine(rule_script(rule))
    live = []

    def look(event):
        if event.event == "step":
            live.append(base.live)

    config = SearchConfig(n=6, max_steps=8)
    solve(base, ["q"], scorer=LengthScorer(), config=config, on_event=look)
    assert live == [1] * 8


def test_a_fallen_candidate_is_freed_while_its_siblings_go_on():
    keys = []

    def rule(text, key):
        keys.append(key)
        short = len(keys) % 2 == 1
        return Draft(list(b"bad"), Finish.GZIP, fired_at=3) if short else text_draft("x" * 30)

    base = base_engine(rule_script(rule))
    step, live = base.step, []

    def watched():
        events = step()
        live.append(base.live)
        return events

    base.step = watched
    solve(base, ["q"], scorer=LengthScorer(), config=SearchConfig(n=2, max_steps=1))
    # After each step: the root alone; three tokens with both forks; then the survivor's other 27.
    assert live == [1] + [3] * 3 + [2] * 27


class TestRetirement:
    def run(self, text, **options):
        base = base_engine(rule_script(lambda *_: text_draft(text)))
        [solution] = solve(
            base, ["abc"], scorer=LengthScorer(), config=SearchConfig(n=2, **options)
        )
        return solution

    def test_eos_inside_a_step_is_committed_and_ends(self):
        solution = self.run("the answer<eos>")
        assert solution.finish == "eos"
        assert solution.token_ids == (*b"the answer", EOS)
        assert solution.text == "the answer"
        assert solution.steps[0].finish == "eos"

    def test_helpers_eos_ends_too(self):
        base = base_engine(rule_script(lambda *_: text_draft("hm\n\n")))
        helper = FakeEngine(rule_script(lambda *_: text_draft("done for good<eos>")))
        [solution] = solve(
            base, ["abc"], scorer=LengthScorer(), helper=helper, config=SearchConfig(n=1)
        )
        assert (solution.finish, solution.token_ids[-1]) == ("eos", EOS)
        assert [s.source for s in solution.steps] == ["helper"]

    def test_max_steps(self):
        solution = self.run("on\n\n", max_steps=5)
        assert (solution.finish, len(solution.steps)) == ("max_steps", 5)

    def test_max_tokens_fills_the_context_exactly(self):
        solution = self.run("abcdefg\n\n", max_tokens=24)
        assert solution.finish == "max_tokens"
        assert len(solution.token_ids) == 24 - 3
        assert [s.flag for s in solution.steps] == ["", "", "capped"]

    def test_capped_step_is_committed_as_it_is_and_flagged(self):
        solution = self.run("x" * 40, sampling=SamplingParams(max_new_tokens=7), max_steps=2)
        assert [(s.text, s.flag, s.flagged) for s in solution.steps] == [
            ("x" * 7, "capped", True)
        ] * 2

    def test_the_helpers_context_counts(self):
        base = base_engine(rule_script(lambda *_: text_draft("abcdefg\n\n")))
        helper = FakeEngine(rule_script(lambda *_: text_draft("ab\n\n")), context_len=30)
        [solution] = solve(
            base, ["abc"], scorer=LengthScorer(), helper=helper, config=SearchConfig(n=1)
        )
        assert (solution.finish, len(solution.token_ids)) == ("max_tokens", 27)


class TestFallback:
    def test_all_aborted_without_helper_commits_the_prefix_before_the_firing_point(self):
        def rule(text, key):
            return Draft(list(b"good then bad"), Finish.ENTROPY, fired_at=6, max_entropy=7.5)

        events = []
        [solution] = solve(
            base_engine(rule_script(rule)),
            ["q"],
            scorer=LengthScorer(),
            config=SearchConfig(n=3, max_steps=4),
            on_event=events.append,
        )
        assert solution.text == "good " * 4
        assert {s.flag for s in solution.steps} == {"aborted_prefix"}
        assert {s.score for s in solution.steps} == {None}
        assert solution.aborted.entropy == 12
        assert solution.tokens.base.generated == 12 * len(b"good then bad")
        first = [e for e in events if e.event == "candidate"][:3]
        assert [(e.chosen, e.aborted, e.score) for e in first] == [
            (i == 0, True, None) for i in range(3)
        ]

    def test_helper_keeps_the_pool_filled_when_all_base_candidates_are_aborted(self):
        base = base_engine(rule_script(lambda *_: Draft(list(b"zzz"), Finish.GZIP, fired_at=3)))
        helper = FakeEngine(rule_script(lambda *_: text_draft("help\n\n")))
        config = SearchConfig(n=2, max_steps=3)
        [solution] = solve(base, ["q"], scorer=TextScorer(), helper=helper, config=config)
        assert [(s.source, s.flag) for s in solution.steps] == [("helper", "")] * 3
        assert solution.aborted.gzip == 6

    def test_only_base_candidates_are_watched(self):
        watched = []

        def script(context, spec):
            watched.append(spec.detect)
            return text_draft("s\n\n")

        config = SearchConfig(n=2, n_helper=3, max_steps=1)
        solve(
            base_engine(script),
            ["q"],
            scorer=TextScorer(),
            helper=FakeEngine(script),
            config=config,
        )
        assert watched == [True] * 2 + [False] * 3

    def test_blank_candidates_are_not_offered_but_keep_the_search_going(self):
        asked = []

        class Spy(LengthScorer):
            def score(self, requests):
                asked.extend(r.text for r in requests)
                return super().score(requests)

        def rule(text, key):
            return text_draft("\n\n") if len(text) < 4 else text_draft("now<eos>")

        [solution] = solve(
            base_engine(rule_script(rule)), ["q"], scorer=Spy(), config=SearchConfig(n=2)
        )
        assert [s.flag for s in solution.steps] == ["blank", "blank", ""]
        assert asked == ["now", "now"]

    def test_no_token_at_all_is_an_error_of_that_problem(self):
        def rule(text, key):
            return Draft([], Finish.NAN) if text.startswith("bad") else text_draft("ok<eos>")

        bad, good = solve(base_engine(rule_script(rule)), ["bad", "good"], scorer=LengthScorer())
        assert (bad.finish, good.finish) == ("error", "eos")
        assert "not finite" in bad.error


def test_best_of_n_has_neither_helper_nor_detector():
    watched = []

    def script(context, spec):
        watched.append(spec.detect)
        return text_draft("s<eos>")

    [solution] = best_of_n(FakeEngine(script), ["q"], scorer=TextScorer())
    assert watched == [False] * 8
    assert solution.tokens.helper.generated == 0


def test_every_candidates_key_is_its_own():
    keys = []

    def script(context, spec):
        keys.append(spec.rng_key)
        return text_draft("s\n\n")

    config = SearchConfig(n=3, max_steps=4)
    questions = ["a", "b"]
    solve(
        base_engine(script),
        questions,
        scorer=TextScorer(),
        helper=FakeEngine(script),
        config=config,
    )
    assert len(set(keys)) == len(keys) == 2 * 4 * 6


def test_books_of_one_known_search():
    """Two steps: the helper wins the first ("b" > "a"), the base the second."""

    def base_rule(text, key):
        return text_draft("aa\n\n") if text == "q" else text_draft("z<eos>")

    def helper_rule(text, key):
        return text_draft("b\n\n") if text == "q" else text_draft("c\n\n")

    events = []
    base = base_engine(rule_script(base_rule), budget=3)
    helper = FakeEngine(rule_script(helper_rule))
    [solution] = solve(
        base,
        ["q"],
        scorer=TextScorer(),
        helper=helper,
        config=SearchConfig(n=2, n_helper=1),
        on_event=events.append,
    )
    assert [s.source for s in solution.steps] == ["helper", "base"]
    assert solution.text == "b\n\nz"
    assert solution.token_ids == (*b"b\n\nz", EOS)
    assert (solution.tokens.base.generated, solution.tokens.base.processed) == (
        2 * 4 + 2 * 2,
        1 + 3,
    )
    assert (solution.tokens.helper.generated, solution.tokens.helper.processed) == (3 + 3, 1)
    assert solution.kv_bytes.full == 6 * 10
    assert solution.kv_bytes.peak == 160
    assert solution.evictions == 6 - 1 - 3
    assert math.isfinite(solution.seconds)
    names = [e.event for e in events]
    candidates = ["candidate"] * 3
    assert names == ["problem_start", *candidates, "step", *candidates, "step", "problem_end"]
    step = events[4].to_json()
    assert (step["base_slots"], step["helper_slots"], step["context"]) == (3, 3, 4)
    assert step["score"] == ord("b")
