"""Inputs that broke other evicting engines, by the number of their case: P1 to P12, P16 and P20."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.engine_tools import (
    EVICTING,
    every_policy,
    generate,
    greedy,
    hf_greedy,
    make_prompts,
    run,
    sampled,
    small_config,
)
from support.tiny_models import byte_tokenizer, make_model, make_module

from kvcore.config import EngineConfig, EvictionConfig, SamplingParams
from kvcore.engine import Engine, FeedOutput, GenerateSpec
from kvcore.models import bind_model
from kvcore.search.driver import eviction_notice

RKV = EVICTING["rkv"]


@pytest.fixture(scope="module")
def model():
    """Random weights, 512 ids of which none ends a text."""
    found = make_model(tokenizer=False)
    object.__setattr__(found, "eos_ids", frozenset())
    return found


def held(engine: Engine, seq: int) -> list[list[int]]:
    """Positions in every lane, ascending."""
    lanes = engine.cache.positions([engine.store_handle(seq)]).flatten(0, 2)
    return [sorted(p for p in lane.tolist() if p >= 0) for lane in lanes]


def tokens_and_positions(engine: Engine, prompt: list[int]) -> tuple[list[int], list[list[int]]]:
    seq = engine.add(prompt, sampled(100, key=3))
    run(engine)
    result = engine.tokens(seq), held(engine, seq)
    engine.release(seq)
    return result


@every_policy
def test_p01_eviction_is_transparent_while_nothing_is_evicted(model, eviction):
    prompts = make_prompts([1, 9, 40])
    wide = replace(eviction, budget=2048)
    full = Engine(model, small_config())
    evicting = Engine(model, small_config(), eviction=wide)
    assert generate(evicting, prompts, greedy(200)) == generate(full, prompts, greedy(200))
    assert evicting.stats.evictions == 0


@every_policy
def test_p02_position_ids_count_logical_tokens_after_evictions(model, eviction):
    engine = Engine(model, small_config(), eviction=eviction)
    seen: list[int] = []

    def record(_module, _args, kwargs):
        seen.extend(kwargs["position_ids"].flatten().tolist())

    hook = model.model.model.register_forward_pre_hook(record, with_kwargs=True)
    seq = engine.add(make_prompts([30])[0], greedy(90))
    run(engine)
    hook.remove()
    assert engine.stats.evictions >= 2 and engine.cache_len(seq) < 60
    assert seen == list(range(30 + 90 - 1))  # the last token is not fed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget", None),  # only the headroom is set
        ("headroom", None),  # only the budget is set
        ("budget", 0),
        ("headroom", 7),  # a buffer below the protected window of 8
        ("headroom", 8),
        ("window", None),
        ("window", 0),
        ("kernel", 6),
        ("mix", 1.5),
    ],
)
def test_p03_bad_eviction_settings_name_their_field_when_made(field, value):
    good = {"budget": 64, "headroom": 16, "window": 8, "kernel": 7, "mix": 0.1}
    with pytest.raises(ValueError, match=rf"^{field}: expected .*got"):
        EvictionConfig.released(**{**good, field: value})
    with pytest.raises(ValueError, match=rf"^{field}: expected .*got") as error:
        EvictionConfig("full", **{field: value or 8})  # nothing would look at it
    assert "'full'" in str(error.value)


@pytest.mark.parametrize("budget", [1, 4, 8])
def test_p03_a_budget_of_at_most_the_window_works(model, budget):
    eviction = EvictionConfig.released(budget, headroom=16, window=8)
    engine = Engine(model, small_config(), eviction=eviction)
    seq = engine.add(make_prompts([30])[0])
    run(engine)
    assert {len(lane) for lane in held(engine, seq)} == {budget + eviction.protect}


@every_policy
@pytest.mark.parametrize("length", [1, 2, 5, 7, 8, 23, 24, 25, 31, 32, 33, 55, 56, 57, 300])
def test_p04_nothing_is_evicted_below_the_bound_and_exactly_budget_kept_above(
    model, eviction, length
):
    engine = Engine(model, small_config(), eviction=eviction)
    seq = engine.add(make_prompts([length])[0], greedy(1))
    run(engine)
    for lane in held(engine, seq):
        if length < eviction.trigger:
            assert lane == list(range(length))
        else:
            assert len(lane) == eviction.budget + eviction.protect
            assert lane[-eviction.protect :] == list(range(length - eviction.protect, length))


@every_policy
def test_p05_chunked_prefill_keeps_the_same_as_prefill_in_one(model, eviction):
    [prompt] = make_prompts([5 * eviction.budget + 1])
    results = []
    for chunk in (2048, 64, 7):
        engine = Engine(model, small_config(max_batched_tokens=chunk), eviction=eviction)
        root = engine.add(prompt)
        run(engine)
        assert engine.stats.evictions == 1  # looked at once, when the whole prompt is in
        positions = held(engine, root)
        [child] = engine.fork(root, [greedy(60)])
        run(engine)
        results.append((positions, engine.tokens(child), held(engine, child)))
    assert results[0] == results[1] == results[2]


@every_policy
def test_p06_the_first_eviction_depends_on_length_alone_and_finds_a_full_window(model, eviction):
    eviction = replace(eviction, budget=40, headroom=16)
    engine = Engine(model, small_config(), eviction=eviction)
    seq = engine.add(make_prompts([37])[0], greedy(60))
    fired, before = [], 0
    while engine.has_work:
        engine.step()
        if engine.stats.evictions > before:
            before = engine.stats.evictions
            length = engine.cache.store.seq_len(engine.store_handle(seq))
            fired.append(length)
            for lane in held(engine, seq):
                assert lane[-eviction.protect :] == list(range(length - eviction.protect, length))
    # 40 + 16 slots; then every 16 - 8 tokens. A counter modulo 16 would have fired at 48.
    assert fired[:3] == [56, 64, 72]


@every_policy
def test_p07_each_sequence_keeps_what_it_keeps_alone(model, eviction):
    prompts = make_prompts([70, 90], seed=4)
    together = Engine(model, small_config(), eviction=eviction)
    seqs = [together.add(p, sampled(60, key=i)) for i, p in enumerate(prompts)]
    run(together)
    for i, prompt in enumerate(prompts):
        alone = Engine(model, small_config(), eviction=eviction)
        seq = alone.add(prompt, sampled(60, key=i))
        run(alone)
        assert alone.stats.evictions > 1
        assert alone.tokens(seq) == together.tokens(seqs[i])
        assert held(alone, seq) == held(together, seqs[i])


def test_p08_ragged_prompts_continue_where_each_of_them_ends(model):
    prompts = make_prompts([5, 50])
    module = make_module()
    module.generation_config.eos_token_id = None
    engine = Engine(model, small_config())
    seqs = [engine.add(p, greedy(20)) for p in prompts]
    run(engine)
    for prompt, seq in zip(prompts, seqs, strict=True):
        assert engine.tokens(seq) == prompt + hf_greedy(module, prompt, 20)
        assert held(engine, seq) == [list(range(len(prompt) + 19))] * 4  # no slot holds padding


@every_policy
def test_p09_every_generation_of_a_process_evicts(model, eviction):
    engine = Engine(model, small_config(), eviction=eviction)
    counts = []
    for prompt in make_prompts([10, 60, 30]):
        before = engine.stats.evictions
        generate(engine, [prompt], greedy(100))
        counts.append(engine.stats.evictions - before)
    assert min(counts) > 0
    assert eviction_notice(eviction, engine.stats.evictions) is None


def test_p09_eviction_that_never_fired_is_reported(model):
    engine = Engine(model, small_config(), eviction=RKV)
    generate(engine, make_prompts([10]), greedy(10))
    notice = eviction_notice(engine.eviction, engine.stats.evictions)
    assert notice is not None and "never fired" in notice
    assert eviction_notice(EvictionConfig(), 0) is None


@every_policy
def test_p10_a_used_engine_is_like_a_new_one(model, eviction):
    first, second = make_prompts([80, 33], seed=6)
    used = Engine(model, small_config(), eviction=eviction)
    tokens_and_positions(used, first)
    fresh = Engine(model, small_config(), eviction=eviction)
    assert tokens_and_positions(used, second) == tokens_and_positions(fresh, second)


@pytest.mark.parametrize("head_dim", [8, 24, 128])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_p11_head_dim_is_not_hidden_size_by_heads(architecture, head_dim):
    sizes = {"head_dim": head_dim, "eos_token_id": None}
    module = make_module(architecture, **sizes)
    found = make_model(architecture, tokenizer=False, **sizes)
    assert module.model.layers[0].self_attn.q_proj.out_features == 4 * head_dim != 64
    assert found.shape.head_dim == head_dim
    [prompt] = make_prompts([19])
    full = Engine(found, small_config())
    assert generate(full, [prompt], greedy(30)) == [hf_greedy(module, prompt, 30)]
    evicting = Engine(found, small_config(), eviction=RKV)
    generate(evicting, [prompt], greedy(80))
    assert evicting.stats.evictions > 0


@pytest.mark.parametrize("scale", [0.0, 1e-5])
def test_p12_a_half_precision_model_with_vanishing_keys_evicts(scale):
    module = make_module(dtype=torch.float16)
    for layer in module.model.layers:
        for parameter in layer.self_attn.k_proj.parameters():
            parameter.data.mul_(scale)
    engine = Engine(bind_model(module, None), small_config(), eviction=RKV)
    [prompt] = make_prompts([20])
    engine.add(prompt, greedy(80))
    events = run(engine)
    assert [e.error for e in events if e.error] == [] and engine.stats.evictions > 0


def padded_module(rows: int) -> torch.nn.Module:
    """FeedOutput rows without a token dwarf all others."""
    module = make_module(vocab_size=rows)
    generator = torch.Generator().manual_seed(8)
    padding = module.lm_head.weight.data[263:]
    padding.copy_(torch.randn(padding.shape, generator=generator) * 50)
    return module


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_p16_padding_ids_are_never_sampled_though_their_logits_are_largest(temperature):
    prompts = make_prompts([5, 30, 80])
    with torch.inference_mode():
        for prompt in prompts:
            assert padded_module(512)(torch.tensor([prompt])).logits[0].argmax(-1).min() >= 263
    engine = Engine(bind_model(padded_module(512), byte_tokenizer()), small_config())
    assert engine.model.vocab == 263
    for top_p, top_k in ((0.95, 20), (1.0, 0)):
        sampling = SamplingParams(temperature, top_p=top_p, top_k=top_k, max_new_tokens=60)
        for tokens in generate(engine, prompts, GenerateSpec(sampling, rng_key=top_k)):
            assert tokens and max(tokens) < 263


def test_p16_ids_pass_between_models_of_one_tokenizer_and_different_padding():
    one = Engine(bind_model(padded_module(512), byte_tokenizer()), small_config())
    two = Engine(bind_model(padded_module(300), byte_tokenizer()), small_config())
    [prompt] = make_prompts([12])
    for first, second in ((one, two), (two, one)):
        [tokens] = generate(first, [prompt], sampled(40, key=1))
        root = second.add(prompt)
        second.extend(root, tokens, FeedOutput.LOGPROBS)
        [values] = [e.values for e in run(second) if e.values is not None]
        assert len(values) == len(tokens) and torch.isfinite(values).all()
        second.release(root)


TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "eviction",
    [EvictionConfig(), EvictionConfig.released(8, headroom=10)],
    ids=["full", "rkv"],
)
def test_p20_forks_aborted_at_random_in_a_scarce_pool_give_all_blocks_back(eviction):
    """300 problems, each forked 8 ways twice; anything may be released at any moment."""
    chance = random.Random(20)
    config = EngineConfig(max_seqs=40, context_len=128, kv_blocks=60)
    engine = Engine(make_model(tokenizer=False, **TINY), config, eviction=eviction)
    live: dict[int, list[int]] = {}
    rounds: dict[int, int] = {}
    started = 0
    while started < 300 or live:
        while started < 300 and len(live) < 5:
            length = chance.randint(1, 40)
            root = engine.add([chance.randrange(512) for _ in range(length)])
            live[root], rounds[root] = [], 0
            started += 1
        finished = {}
        for event in engine.step():
            assert event.error is None
            if event.generation is not None:
                finished[event.seq] = event.generation
            elif event.extended and event.seq in live:
                key = chance.getrandbits(64)
                specs = [sampled(chance.randint(1, 8), key=key ^ i) for i in range(8)]
                live[event.seq] = engine.fork(event.seq, specs)
        for root, children in list(live.items()):
            if children and chance.random() < 0.2:  # one candidate is aborted, started or not
                engine.release(children.pop(chance.randrange(len(children))))
            done = [c for c in children if c in finished]
            if done and chance.random() < 0.5:  # commit one, drop the others in any state
                winner = chance.choice(done)
                for child in children:
                    if child != winner:
                        engine.release(child)
                engine.adopt(root, winner)
                rounds[root] += 1
                live[root] = []
                if rounds[root] < 2:
                    engine.extend(root, [chance.randrange(512)])
            elif done and chance.random() < 0.9:
                for child in done:
                    engine.release(child)
                    children.remove(child)
            idle = not live[root] and not engine.has_work
            if rounds[root] >= 2 or idle or chance.random() < 0.01:
                for child in live.pop(root):
                    engine.release(child)
                engine.release(root)
        assert 0 <= engine.free_blocks <= engine.num_blocks
        engine.cache.store.check_integrity()
    assert engine.num_sequences == 0
    assert engine.free_blocks == engine.num_blocks
    assert engine.cache.store.num_sequences() == 0
    assert engine.stats.preemptions > 10
    assert engine.stats.evictions > 10 or not eviction.evicts
