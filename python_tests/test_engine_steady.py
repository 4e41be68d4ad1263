"""Laws of the steady cadence: one entry out, one in, per token.

The fused R-KV pass elects what direct scoring elects.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.engine_tools import (
    EVICTING,
    generate,
    greedy,
    make_prompts,
    run,
    sampled,
    seeded,
    small_config,
)
from support.tiny_models import make_model

from kvcore.config import EvictionConfig, pyramid_budgets
from kvcore.engine import Engine
from kvcore.policies import make_policy
from kvcore.policies.selection import share_by_score

STEADY = {
    name: EvictionConfig(name, budget=24, protect=20, cadence="steady", **seeded(name, 5))
    for name in EVICTING
}
BOUND = 24 + 20
every_policy = pytest.mark.parametrize("eviction", STEADY.values(), ids=STEADY)


@pytest.fixture(scope="module")
def model():
    """None of its ids ends a text."""
    found = make_model(tokenizer=False)
    object.__setattr__(found, "eos_ids", frozenset())
    return found


def held(engine, seq):
    """Sorted positions of every lane, [lanes, slots]."""
    position = engine.cache.positions([engine.store_handle(seq)])
    return position.flatten(0, 2).sort(-1).values


@every_policy
def test_a_full_lane_exchanges_one_entry_per_token_and_nothing_moves(model, eviction):
    engine = Engine(model, small_config(), eviction=eviction)
    seq = engine.add(make_prompts([10])[0], greedy(200))
    while engine.cache_len(seq) < BOUND:
        engine.step()
    blocks = engine.free_blocks
    before = engine.cache.positions([engine.store_handle(seq)])
    steps = 0
    while engine.has_work and len(engine.tokens(seq)) < 200:
        engine.step()
        after = engine.cache.positions([engine.store_handle(seq)])
        newest = engine.cache.store.seq_len(engine.store_handle(seq)) - 1
        changed = after != before
        assert changed.sum(-1).eq(1).all()  # of every lane
        assert (after[changed] == newest).all()
        recent = set(range(newest - 19, newest + 1))
        assert all(recent <= set(lane.tolist()) for lane in after.flatten(0, 2))
        before = after
        steps += 1
    assert steps > 100
    assert engine.stats.evicted_slots == steps * before[0].flatten(0, 1).shape[0]
    assert engine.free_blocks == blocks and engine.cache_len(seq) == BOUND


@pytest.mark.parametrize("policy", ["rkv", "snapkv"])
def test_the_fused_pass_elects_what_direct_scoring_elects(model, policy):
    eviction = STEADY[policy]
    engine = Engine(model, small_config(), eviction=eviction)
    assert engine.cache.lane_state is not None
    seqs = [engine.add(p, sampled(150, key=i)) for i, p in enumerate(make_prompts([10, 60, 30]))]
    direct = make_policy(eviction)
    compared = 0
    while engine.has_work:
        engine.step()
        for seq in seqs:
            handle = engine.store_handle(seq)
            if handle is None or engine.cache_len(seq) < BOUND:
                continue
            score = direct.score(engine.cache, [handle])[0]
            row = engine.cache.store.row(handle)
            elected = engine.cache.replace[row].long()
            assert (elected >= 0).all()
            chosen = score.gather(-1, elected[..., None])[..., 0]
            assert (chosen - score.min(-1).values).max() < 2e-7  # ties by rounding only
            compared += elected.numel()
    assert compared > 1000


@pytest.mark.parametrize("policy", ["rkv", "snapkv"])
def test_chunks_forks_and_commits_keep_the_election_exact(model, policy):
    eviction = STEADY[policy]
    engine = Engine(model, small_config(), eviction=eviction)
    direct = make_policy(eviction)
    root = engine.add(make_prompts([70])[0])
    run(engine)
    for round_ in range(6):
        children = engine.fork(root, [sampled(9, key=10 * round_ + i) for i in range(3)])
        run(engine)
        engine.adopt(root, children[round_ % 3])
        for i, child in enumerate(children):
            if i != round_ % 3:
                engine.release(child)
        engine.extend(root, make_prompts([3 + 7 * round_], seed=round_)[0])
        run(engine)
        handle = engine.store_handle(root)
        score = direct.score(engine.cache, [handle])[0]
        elected = engine.cache.replace[engine.cache.store.row(handle)].long()
        chosen = score.gather(-1, elected[..., None])[..., 0]
        assert (chosen - score.min(-1).values).max() < 2e-7
        assert engine.cache_len(root) == BOUND
    engine.cache.store.check_integrity()


@pytest.mark.parametrize("policy", ["rkv", "random", "streamingllm", "tova", "h2o"])
def test_preemption_changes_no_token(model, policy):
    prompts = make_prompts([30, 60, 45, 20], seed=7)
    answers = []
    for blocks in (None, 30):
        engine = Engine(model, small_config(kv_blocks=blocks), eviction=STEADY[policy])
        answers.append(generate(engine, prompts, sampled(60)))
        assert engine.free_blocks == engine.num_blocks
        engine.cache.store.check_integrity()
    assert engine.stats.preemptions > 0
    assert answers[0] == answers[1]


@every_policy
def test_nothing_happens_while_nothing_is_full(model, eviction):
    roomy = replace(eviction, budget=400)
    prompts = make_prompts([10, 25])
    assert generate(Engine(model, small_config(), eviction=roomy), prompts, greedy(40)) == generate(
        Engine(model, small_config()), prompts, greedy(40)
    )


def test_not_finite_keys_fail_their_sequence_by_name_and_no_other(model):
    engine = Engine(model, small_config(), eviction=STEADY["rkv"])
    prompts = make_prompts([20, 20], seed=2)
    bad, good = (engine.add(p, greedy(80)) for p in prompts)
    while engine.cache_len(bad) < BOUND:
        engine.step()
    row = engine.cache.store.row(engine.store_handle(bad))
    block = engine.cache.block_table[row, 1, 0, 0].item()
    engine.cache.key_blocks[block] = float("nan")
    failed = [e for e in run(engine) if e.error is not None]
    assert [e.seq for e in failed] == [bad]
    assert f"row {row}, layer 1, kv head 0" in failed[0].error
    [expected] = generate(
        Engine(model, small_config(), eviction=STEADY["rkv"]), [prompts[1]], greedy(80)
    )
    assert engine.tokens(good) == prompts[1] + expected


@pytest.mark.parametrize("policy, tokens", [("rkv", 70), ("h2o", 70), ("h2o", BOUND - 10)])
def test_a_failed_forward_loses_no_token(model, monkeypatch, policy, tokens):
    """With lanes that are full and overwritten, and with lanes that are not yet."""
    engine = Engine(model, small_config(), eviction=STEADY[policy])
    [prompt] = make_prompts([20])
    seq = engine.add(prompt, greedy(80))
    while len(engine.tokens(seq)) < tokens:
        engine.step()
    assert (engine.cache_len(seq) == BOUND) == (tokens > BOUND)
    forward = engine._executor._runner.forward

    def broken(*args):
        forward(*args)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._executor._runner, "forward", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    monkeypatch.setattr(engine._executor._runner, "forward", forward)
    run(engine)
    [expected] = generate(
        Engine(model, small_config(), eviction=STEADY[policy]), [prompt], greedy(80)
    )
    assert engine.tokens(seq) == prompt + expected


def test_the_prompt_stays_when_it_is_protected(model):
    eviction = replace(STEADY["random"], protect_prompt=True)
    engine = Engine(model, small_config(), eviction=eviction)
    seq = engine.add(make_prompts([40])[0], greedy(150))
    run(engine)
    assert engine.cache_len(seq) == BOUND + 40
    for lane in held(engine, seq):
        assert set(range(40)) <= set(lane.tolist())


# ---- budgets per layer and head


def test_budgets_per_layer_are_kept_and_free_memory(model):
    layers = model.shape.layers
    budgets = pyramid_budgets(48, layers, 4.0)
    assert sum(budgets) == 48 * layers and list(budgets) == sorted(budgets, reverse=True)
    for how in ({"cadence": "sawtooth", "headroom": 40, "protect": 8}, {"protect": 20}):
        eviction = EvictionConfig("rkv", budget=48, layer_budgets=budgets, **how)
        protect = eviction.protect
        engine = Engine(model, small_config(), eviction=eviction)
        seq = engine.add(make_prompts([150])[0])
        run(engine)
        lens = engine.cache.lane_len[engine.cache.store.row(engine.store_handle(seq))]
        assert lens.tolist() == [[b + protect] * model.shape.kv_heads for b in budgets]
        assert engine.num_blocks - engine.free_blocks == sum(
            -(-(b + protect) // 16) * model.shape.kv_heads for b in budgets
        )
        engine.fork(seq, [sampled(60)])
        assert not [e.error for e in run(engine) if e.error]


def test_heads_share_a_layers_budget_by_their_scores(model):
    eviction = EvictionConfig.released(40, "snapkv", headroom=60, head_budgets="adaptive")
    engine = Engine(model, small_config(), eviction=eviction)
    seq = engine.add(make_prompts([150])[0], greedy(200))
    even = (40 + 8) * model.shape.kv_heads
    while engine.has_work:
        fired = engine.stats.evictions
        engine.step()
        if engine.stats.evictions > fired:
            lens = engine.cache.lane_len[engine.cache.store.row(engine.store_handle(seq))]
            assert lens.sum(-1).tolist() == [even] * model.shape.layers
            assert lens.min() >= 8 + 8
    assert engine.stats.evictions > 2
    engine.cache.store.check_integrity()


def test_shares_follow_the_best_scores_above_the_floor():
    score = torch.full((1, 1, 2, 30), -torch.inf)
    score[0, 0, 0, :20] = torch.linspace(10.0, 11.0, 20)
    score[0, 0, 1, :20] = torch.linspace(0.0, 1.0, 20)
    score[..., 20:22] = torch.inf  # protected
    limit = torch.full((1, 1, 2), 10, dtype=torch.int32)
    assert share_by_score(score, limit).tolist() == [[[18, 2]]]


# ---- bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cadence": "slow"}, "cadence: expected 'sawtooth' or 'steady', got 'slow'"),
        ({"budget": -1}, "budget: expected an integer >= 1, got -1"),
        ({"head_budgets": "some"}, "head_budgets: expected 'uniform' or 'adaptive'"),
        ({"head_budgets": "adaptive", "cadence": "steady"}, "cadence: expected 'sawtooth'"),
        ({"layer_budgets": (24, -2)}, r"layer_budgets\[1\]: expected an integer >= 1, got -2"),
        ({"layer_budgets": (9, 9)}, r"layer_budgets: expected a mean of budget \(24\)"),
        ({"layer_budgets": [24, 24]}, "layer_budgets: expected a tuple"),
        ({"layer_budgets": (24, 24), "scope": "global"}, "scope: expected 'lane'"),
        (
            {"protect": 40, "headroom": 40, "cadence": "sawtooth"},
            r"headroom: expected more than protect \(40\)",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        EvictionConfig("rkv", **{"budget": 24, **fields})


def test_budgets_for_another_number_of_layers_are_refused_by_the_engine(model):
    wrong = EvictionConfig("rkv", budget=24, layer_budgets=(24,) * (model.shape.layers + 1))
    with pytest.raises(ValueError, match=r"layer_budgets: expected one for each of \d+ layers"):
        Engine(model, small_config(), eviction=wrong)


@pytest.mark.parametrize("cadence", ["sawtooth", "steady"])
def test_a_ring_longer_than_what_is_protected_is_refused(model, cadence):
    wrong = EvictionConfig("rkv", budget=24, protect=8, window=9, cadence=cadence)
    with pytest.raises(ValueError, match=r"window: expected at most protect \(8\)"):
        Engine(model, small_config(), eviction=wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 4), "budget"), ((8, 0), "layers"), ((8, 4, 0.5), "steepness: expected a number >= 1")],
)
def test_a_pyramid_needs_sensible_numbers(arguments, message):
    with pytest.raises(ValueError, match=message):
        pyramid_budgets(*arguments)
