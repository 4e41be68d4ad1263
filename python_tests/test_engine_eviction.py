"""Laws of decoding with a bounded cache, of forks that evict, and of preemption."""

from __future__ import annotations

import pytest
import torch
from support.engine_tools import (
    EVICTING,
    every_policy,
    generate,
    greedy,
    make_prompts,
    run,
    sampled,
    small_config,
)
from support.tiny_models import make_model, make_module

from kvcore.config import EvictionConfig
from kvcore.engine import Engine
from kvcore.models import UnsupportedModel, bind_model

RKV = EVICTING["rkv"]


@pytest.fixture(scope="module")
def model():
    """None of its ids ends a text."""
    found = make_model(tokenizer=False)
    object.__setattr__(found, "eos_ids", frozenset())
    return found


@every_policy
def test_the_cache_never_holds_more_than_its_bound_and_positions_go_on(model, eviction):
    engine = Engine(model, small_config(), eviction=eviction)
    seq = engine.add(make_prompts([10])[0], greedy(200))
    longest = 0
    while engine.has_work:
        engine.step()
        longest = max(longest, engine.cache_len(seq))
        handle = engine.store_handle(seq)
        cached = len(engine.tokens(seq)) - engine.has_work
        position = engine.cache.positions([handle])
        assert position.max().item() == engine.cache.store.seq_len(handle) - 1
        assert engine.cache.store.seq_len(handle) in (cached, cached - 1)
    assert longest < eviction.trigger
    period = eviction.trigger - eviction.budget - eviction.protect
    assert engine.stats.evictions == (209 - eviction.trigger) // period + 1
    assert engine.stats.kv_bytes_peak_seq < engine.model.kv_bytes_per_token * 209


@every_policy
def test_the_newest_entries_and_exactly_budget_others_survive(model, eviction):
    engine = Engine(model, small_config(), eviction=eviction)
    seq = engine.add(make_prompts([eviction.trigger + 30])[0])
    run(engine)
    assert engine.stats.evictions == 1
    position = engine.cache.positions([engine.store_handle(seq)])
    newest = eviction.trigger + 28
    for lane in position.flatten(0, 2):
        held = sorted(lane.tolist())
        assert len(held) == len(set(held)) == eviction.budget + eviction.protect
        assert held[-eviction.protect :] == list(range(newest - eviction.protect + 1, newest + 1))


@every_policy
def test_forks_of_an_evicted_sequence_neither_see_nor_disturb_each_other(model, eviction):
    [prompt] = make_prompts([70])
    engine = Engine(model, small_config(), eviction=eviction)
    root = engine.add(prompt)
    keys = [3, 4, 5]
    together = engine.fork(root, [sampled(60, key=k) for k in keys])
    results = {e.seq: e.generation.tokens for e in run(engine) if e.generation is not None}
    for key, child in zip(keys, together, strict=True):
        [alone] = engine.fork(root, [sampled(60, key=key)])
        [again] = [e.generation.tokens for e in run(engine) if e.generation is not None]
        assert again == results[child]
        engine.release(alone)
        engine.release(child)
    engine.release(root)
    assert engine.free_blocks == engine.num_blocks
    engine.cache.store.check_integrity()


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [(p, 44) for p in ("full", *EVICTING)]
    + [(p, blocks) for p in ("full", "rkv", "random") for blocks in (60, 80)],
)
def test_preemption_changes_no_token(model, policy, blocks):
    eviction = EVICTING.get(policy, EvictionConfig())
    prompts = make_prompts([30, 60, 45, 20], seed=7)
    roomy = Engine(model, small_config(), eviction=eviction)
    tight = Engine(model, small_config(kv_blocks=blocks), eviction=eviction)
    answers = []
    for engine in (roomy, tight):
        roots = [engine.add(p) for p in prompts]
        children = [
            engine.fork(r, [sampled(50, key=10 * i + j) for j in range(3)])
            for i, r in enumerate(roots)
        ]
        events = run(engine)
        assert not [e.error for e in events if e.error]
        results = {e.seq: e.generation.tokens for e in events if e.generation is not None}
        assert len(results) == 12
        # Commit the middle child everywhere and go on from there: also idle sequences come back.
        for root, mine in zip(roots, children, strict=True):
            engine.adopt(root, mine[1])
            engine.release(mine[0])
            engine.release(mine[2])
            engine.extend(root, [7, 8, 9])
        more = [engine.fork(root, [sampled(20, key=99)])[0] for root in roots]
        results |= {e.seq: e.generation.tokens for e in run(engine) if e.generation is not None}
        answers.append([results[c] for c in [x for mine in children for x in mine] + more])
        for seq in [*roots, *more]:
            engine.release(seq)
        assert engine.free_blocks == engine.num_blocks
        engine.cache.store.check_integrity()
    assert tight.stats.preemptions > 0 and roomy.stats.preemptions == 0
    assert answers[0] == answers[1]


def test_a_sequence_that_can_never_fit_fails_alone(model):
    engine = Engine(model, small_config(kv_blocks=8))
    big = engine.add(make_prompts([100])[0], greedy(10))
    small = engine.add(make_prompts([5])[0], greedy(10))
    events = run(engine)
    [error] = [e for e in events if e.error]
    assert error.seq == big and "out of KV blocks" in error.error and "8 blocks" in error.error
    [done] = [e for e in events if e.generation is not None]
    assert done.seq == small and len(done.generation.tokens) == 10


def test_protect_prompt_keeps_the_prompt_besides_the_budget(model):
    eviction = EvictionConfig.released(16, "random", headroom=32, protect_prompt=True)
    engine = Engine(model, small_config(), eviction=eviction)
    seq = engine.add(make_prompts([40])[0], greedy(150))
    run(engine)
    assert engine.stats.evictions > 2
    for lane in engine.cache.positions([engine.store_handle(seq)]).flatten(0, 2):
        assert set(range(40)) <= set(lane.tolist())
    assert engine.cache_len(seq) < 40 + eviction.trigger


def test_not_finite_keys_fail_their_sequence_and_no_other(model):
    engine = Engine(model, small_config(), eviction=RKV)
    prompts = make_prompts([20, 20], seed=2)
    bad = engine.add(prompts[0], greedy(80))
    good = engine.add(prompts[1], greedy(80))
    for _ in range(10):
        engine.step()
    handle = engine.store_handle(bad)
    row = engine.cache.store.row(handle)
    block = engine.cache.block_table[row, 1, 0, 0].item()
    engine.cache.key_blocks[block] = float("nan")
    events = run(engine)
    failed = [e for e in events if e.error is not None or (e.generation and not e.token)]
    assert [e.seq for e in failed] == [bad]
    fresh = Engine(model, small_config(), eviction=RKV)
    [expected] = generate(fresh, [prompts[1]], greedy(80))
    assert engine.tokens(good) == prompts[1] + expected


class OwnAttention(torch.nn.Module):
    """Attention that takes no notice of the implementation it is given."""

    def forward(self, hidden_states, **kwargs):
        return hidden_states, None


@pytest.mark.parametrize("eviction", [RKV, None], ids=["rkv", "full"])
def test_a_model_whose_attention_gives_no_queries_is_refused_by_name(eviction):
    module = make_module("qwen2")
    module.model.layers[1].self_attn = OwnAttention()
    engine = Engine(bind_model(module, None), small_config(), eviction=eviction)
    seq = engine.add([1, 2, 3], greedy(4))
    with pytest.raises(
        UnsupportedModel, match=r"^model: expected all 2 layers .* got 1: .*queries"
    ):
        run(engine)
    assert engine.tokens(seq) == [1, 2, 3] and engine.stats.generated_tokens == 0
    engine.release(seq)
    assert engine.free_blocks == engine.num_blocks


def test_random_scores_are_a_function_of_seed_layer_head_and_position(model):
    kept = []
    for seed in (1, 1, 2):
        eviction = EvictionConfig.released(24, "random", headroom=32, seed=seed)
        engine = Engine(model, small_config(), eviction=eviction)
        engine.add([1, 2, 3])  # another row than the first time
        seq = engine.add(make_prompts([100])[0])
        run(engine)
        position = engine.cache.positions([engine.store_handle(seq)])
        kept.append(position.sort(-1).values)
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])
    lanes = kept[0].flatten(0, 2)
    assert not torch.equal(lanes[0], lanes[1])
