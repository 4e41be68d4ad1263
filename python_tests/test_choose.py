"""The decisions of Algorithm 1: who is offered, who wins, and what happens when nobody can."""

import itertools
import math
import random

import pytest

from kvcore.engine.events import Finish, Generation
from kvcore.search.choose import choose, fallback, pool, take
from kvcore.search.trajectory import Candidate

NAN = float("nan")


def ended(
    source, index, text=b"so\n\n", finish=Finish.STEP, *, fired_at=0, entropy=NAN, tokens=None
):
    tokens = list(text) if tokens is None else tokens
    generation = Generation(tokens, text, finish, -1.0, [], entropy, NAN, fired_at)
    return Candidate(source, index, generation=generation)


def aborted(source, index, finish, *, fired_at, entropy=NAN, count=30):
    return ended(source, index, b"x" * count, finish, fired_at=fired_at, entropy=entropy)


class TestPool:
    def test_keeps_survivors_of_both_models_in_order(self):
        candidates = [ended("base", 0), ended("base", 1), ended("helper", 0)]
        assert pool(candidates) == candidates

    @pytest.mark.parametrize("finish", [Finish.ENTROPY, Finish.GZIP, Finish.REPETITION, Finish.NAN])
    def test_leaves_out_degenerate_candidates(self, finish):
        good, bad = ended("helper", 0), aborted("base", 0, finish, fired_at=20)
        assert pool([bad, good]) == [good]

    @pytest.mark.parametrize("text", [b"\n\n", b" \n\n", b"", "\u00a0\n\n".encode()])
    def test_leaves_out_blank_candidates(self, text):
        good = ended("base", 1)
        assert pool([ended("base", 0, text), good]) == [good]

    def test_offers_a_bare_eos(self):
        end = ended("base", 0, b"", Finish.EOS, tokens=[256])
        assert pool([end]) == [end]

    def test_offers_a_capped_candidate(self):
        capped = ended("base", 0, b"on and on", Finish.LENGTH)
        assert pool([capped]) == [capped]
        assert take(capped).flag == "capped"
        assert take(ended("base", 0)).flag == ""


class TestChoose:
    def test_takes_the_highest_rank(self):
        candidates = [ended("base", 0), ended("base", 1), ended("helper", 0)]
        assert choose(candidates, [0.1, 0.3, 0.2]) == 1
        assert choose(candidates, [0.1, 0.3, 0.4]) == 2

    def test_equal_ranks_go_to_base_then_to_the_lower_index(self):
        candidates = [ended("base", 0), ended("base", 1), ended("helper", 0), ended("helper", 1)]
        assert choose(candidates, [0.0, 1.0, 1.0, 1.0]) == 1
        assert choose(candidates, [0.0, 0.0, 1.0, 1.0]) == 2
        assert choose(candidates, [-math.inf] * 4) == 0

    def test_depends_on_nothing_but_ranks_sources_and_indices(self):
        rng = random.Random(7)
        for _ in range(200):
            candidates = [
                ended(source, i) for source in ("base", "helper") for i in range(rng.randint(1, 3))
            ]
            ranks = [rng.choice([0.0, 0.5, 1.0, -math.inf]) for _ in candidates]
            expected = candidates[choose(candidates, ranks)]
            for order in itertools.islice(itertools.permutations(range(len(candidates))), 30):
                place = choose([candidates[i] for i in order], [ranks[i] for i in order])
                assert candidates[order[place]] is expected

    @pytest.mark.parametrize("ranks", [[], [0.0], [0.0, NAN]])
    def test_refuses_ranks_that_decide_nothing(self, ranks):
        with pytest.raises(ValueError, match="ranks: expected"):
            choose([ended("base", 0), ended("base", 1)], ranks)


class TestFallback:
    def test_blank_before_aborted_and_base_before_helper(self):
        bad = aborted("base", 0, Finish.GZIP, fired_at=20, entropy=1.0)
        blanks = [ended("base", 1, b"\n\n"), ended("helper", 0, b"\n\n")]
        choice = fallback([bad, *blanks])
        assert (choice.candidate, choice.whole, choice.flag) == (blanks[0], True, "blank")
        assert choice.tokens == (10, 10)

    def test_prefix_ends_before_the_token_that_fired(self):
        bad = aborted("base", 0, Finish.ENTROPY, fired_at=25, entropy=7.5)
        choice = fallback([bad])
        assert (choice.whole, choice.flag) == (False, "aborted_prefix")
        assert choice.tokens == tuple(bad.ended.tokens[:24])

    def test_takes_the_best_entropy(self):
        candidates = [
            aborted("base", 0, Finish.ENTROPY, fired_at=25, entropy=7.5),
            aborted("base", 1, Finish.GZIP, fired_at=28, entropy=0.5),
            aborted("base", 2, Finish.GZIP, fired_at=29, entropy=0.5),
            aborted("base", 3, Finish.REPETITION, fired_at=10),
            aborted("base", 4, Finish.NAN, fired_at=0, entropy=0.1),
        ]
        assert fallback(candidates).candidate is candidates[1]
        assert fallback(candidates[3:]).candidate is candidates[3]

    def test_commits_at_least_one_token(self):
        bad = aborted("base", 0, Finish.ENTROPY, fired_at=1, entropy=9.0)
        assert len(fallback([bad]).tokens) == 1

    def test_nan_without_firing_keeps_all_tokens(self):
        bad = aborted("base", 0, Finish.NAN, fired_at=0, count=4)
        assert len(fallback([bad]).tokens) == 4

    def test_nothing_without_tokens(self):
        assert fallback([ended("base", 0, b"", Finish.NAN)]) is None
