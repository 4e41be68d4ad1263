"""What a policy keeps: counts, order and scores, on lanes of any length."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engine_tools import make_prompts, sampled, small_config
from support.policy_oracles import ORACLES, attention
from support.tiny_models import make_model

from kvcore import ops
from kvcore.cache import CacheShape, KVCache
from kvcore.config import EvictionConfig
from kvcore.engine import Engine
from kvcore.policies import available, evict, make_policy
from kvcore.policies.registry import readers

SHAPE = CacheShape(layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
NAMES = available()[1:]


def own(policy: str, **settings: object) -> dict[str, object]:
    """Those of ``settings`` that the policy reads."""
    return {name: value for name, value in settings.items() if policy in readers(name)}


SMALL = {
    name: EvictionConfig.released(12, name, headroom=16, protect=4, **own(name, window=4, seed=3))
    for name in NAMES
}


# ---- names


def test_available_names_make_policies():
    known = {"rkv", "snapkv", "h2o", "tova", "knorm", "keydiff", "streamingllm", "random"}
    assert available()[:2] == ("full", "rkv") and set(NAMES) >= known
    assert make_policy(EvictionConfig()) is None
    for name in SMALL:
        config = EvictionConfig(name, budget=8)
        policy = make_policy(config)
        assert policy.name == name and policy.config is config


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    message = rf"^policy: expected one of full, {', '.join(NAMES)}, got 'lru'"
    with pytest.raises(ValueError, match=message):
        make_policy(EvictionConfig("lru", budget=8))
    with pytest.raises(ValueError, match=message):
        Engine(make_model(), small_config(), eviction=EvictionConfig("lru", budget=8))


def test_only_a_policy_that_observes_costs_a_query_ring():
    model = make_model()
    for name, window in (("rkv", 5), ("snapkv", 5), ("tova", 1), ("knorm", 0), ("random", 0)):
        engine = Engine(
            model, small_config(), eviction=EvictionConfig(name, 8, **own(name, window=5))
        )
        ring = engine.cache.query_ring
        assert (0 if ring is None else ring.shape[3]) == window
    assert Engine(model, small_config()).cache.query_ring is None


@pytest.mark.parametrize("name", ["rkv", "snapkv"])
def test_a_window_of_queries_older_than_scored_entries_is_refused(name):
    make_policy(EvictionConfig(name, budget=8, protect=6, window=6))
    message = rf"^window: expected at most protect \(6\) with policy '{name}', got 7"
    with pytest.raises(ValueError, match=message):
        make_policy(EvictionConfig(name, budget=8, protect=6, window=7))
    for other in set(NAMES) - {"rkv", "snapkv"}:  # they have none
        make_policy(EvictionConfig(other, budget=8, protect=1))


def test_streamingllm_needs_a_budget_for_its_first_entries():
    make_policy(EvictionConfig("streamingllm", budget=4))
    with pytest.raises(ValueError, match=r"^budget: expected an integer >= 4, got 3"):
        make_policy(EvictionConfig("streamingllm", budget=3))


def test_every_policy_is_held_to_an_oracle():
    assert set(NAMES) == {*ORACLES, "h2o", "random"}  # of which one has a history, one no law


# ---- eviction


def filled_cache(lengths: list[int], *, drop_seed: int | None = 5) -> KVCache:
    """Sequences of ``lengths`` tokens whose lanes then lost different numbers of slots, or, with
    no seed, none.
    """
    window = 4
    cache = KVCache(
        SHAPE,
        blocks=512,
        rows=len(lengths) + 1,
        max_len=256,
        window=window,
        accumulates="sum",
    )
    cache.key_blocks.fill_(torch.nan)
    cache.value_blocks.fill_(torch.nan)
    generator = torch.Generator().manual_seed(drop_seed or 1)
    seqs = [cache.store.create() for _ in lengths]
    batch = cache.extend(seqs, lengths)
    total = sum(lengths)
    for layer in range(SHAPE.layers):
        key, value = torch.randn((2, total, SHAPE.kv_heads, SHAPE.head_dim), generator=generator)
        query = torch.randn((total, SHAPE.q_heads, SHAPE.head_dim), generator=generator)
        ops.append_kv(cache.store, layer, key, value, query, batch)
    cache.stats_plane.copy_(torch.rand(cache.stats_plane.shape, generator=generator))
    cache.seqs = seqs  # handles, for the tests
    if drop_seed is None:
        return cache
    counts = torch.randint(0, 9, (len(seqs), SHAPE.layers, SHAPE.kv_heads), generator=generator)
    counts = torch.minimum(counts, torch.tensor(lengths)[:, None, None] - 1).to(torch.int32)
    drop = torch.zeros((*counts.shape, 16), dtype=torch.int32)
    for lane in np.ndindex(counts.shape):
        length, count = lengths[lane[0]], int(counts[lane])
        slots = torch.randperm(length, generator=generator)[:count].sort().values
        drop[lane][:count] = slots.to(torch.int32)
    cache.store.evict(seqs, drop, counts)
    return cache


def lane_positions(cache: KVCache) -> list[list[int]]:
    """Positions held by every lane, ascending, in the order (sequence, layer, head)."""
    lanes = cache.positions(cache.seqs).flatten(0, 2)
    return [sorted(p for p in lane.tolist() if p >= 0) for lane in lanes]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_each_lane_keeps_budget_and_protect_or_all_it_has(name):
    config = SMALL[name]
    cache = filled_cache([1, 9, 16, 17, 20, 40, 90])
    before = lane_positions(cache)
    assert len({len(lane) for lane in before}) > 6
    dropped = evict(make_policy(config), cache, cache.seqs, [1] * 7)
    after = lane_positions(cache)
    bound = config.budget + config.protect
    for old, new in zip(before, after, strict=True):
        assert len(new) == min(len(old), bound)
        assert set(new) <= set(old)
        newest = old[-config.protect :]
        assert new[-len(newest) :] == newest
    assert dropped == sum(map(len, before)) - sum(map(len, after))
    cache.store.check_integrity()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_the_prompt_is_kept_besides_the_budget(name):
    config = replace(SMALL[name], protect_prompt=True)
    cache = filled_cache([30, 64, 90])
    before = lane_positions(cache)
    prompts = [30, 20, 1]
    evict(make_policy(config), cache, cache.seqs, prompts)
    lanes = SHAPE.lanes
    for i, (old, new) in enumerate(zip(before, lane_positions(cache), strict=True)):
        prompt = [p for p in old if p < prompts[i // lanes]]
        assert set(prompt) <= set(new)
        assert len(new) == min(len(old), config.budget + config.protect + len(prompt))


@pytest.mark.parametrize("name", sorted(SMALL))
def test_scores_rise_to_infinity_for_the_newest_and_fall_past_the_end(name):
    config = SMALL[name]
    cache = filled_cache([3, 17, 60])
    score = make_policy(config).score(cache, cache.seqs)
    position = cache.positions(cache.seqs)
    width = position.shape[-1]
    assert score.dtype == torch.float32 and score.shape[-1] >= width
    flat = zip(score.flatten(0, 2), position.flatten(0, 2), strict=True)
    for values, held in flat:
        live = held >= 0
        newest = torch.zeros_like(live)
        order = held.masked_fill(~live, -1).argsort(descending=True)
        newest[order[: min(config.protect, int(live.sum()))]] = True
        assert torch.equal(values[:width] == torch.inf, newest & live)
        assert torch.isfinite(values[:width][live & ~newest]).all()
        assert (values[:width][~live] == -torch.inf).all()
        assert (values[width:] == -torch.inf).all()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_sequence_loses_the_same_whoever_is_evicted_with_it(name):
    lengths = [40, 90, 25]
    together = filled_cache(lengths)
    evict(make_policy(SMALL[name]), together, together.seqs, [1] * 3)
    alone = filled_cache(lengths)
    for i in (2, 0, 1):
        evict(make_policy(SMALL[name]), alone, [alone.seqs[i]], [1])
    assert lane_positions(together) == lane_positions(alone)


@pytest.mark.parametrize("name", ["rkv", "snapkv", "h2o", "tova", "knorm", "keydiff"])
def test_a_policy_that_raises_changes_nothing(name):
    cache = filled_cache([60, 60])
    row = cache.store.row(cache.seqs[1])
    cache.key_blocks[cache.block_table[row, 1, 1, 0]] = torch.nan
    cache.stats_plane[cache.block_table[row, 1, 1, 0]] = torch.nan
    before, free = lane_positions(cache), cache.store.free_blocks()
    with pytest.raises(ValueError, match=rf"row {row}, layer 1, kv head 1"):
        evict(make_policy(SMALL[name]), cache, cache.seqs, [1, 1])
    assert lane_positions(cache) == before and cache.store.free_blocks() == free


def test_streamingllm_keeps_the_first_four_and_the_newest():
    cache = filled_cache([90], drop_seed=None)
    evict(make_policy(SMALL["streamingllm"]), cache, cache.seqs, [1])
    assert lane_positions(cache) == [[0, 1, 2, 3, *range(78, 90)]] * SHAPE.lanes


def test_tova_keeps_the_same_positions_in_all_heads_of_a_layer():
    cache = filled_cache([90], drop_seed=None)
    evict(make_policy(SMALL["tova"]), cache, cache.seqs, [1])
    first, second, third, fourth = lane_positions(cache)
    assert first == second != third == fourth


def test_a_global_kept_set_needs_lanes_that_hold_the_same():
    cache = filled_cache([60, 60])
    before = lane_positions(cache)
    policy = make_policy(replace(SMALL["rkv"], scope="global"))
    with pytest.raises(ValueError, match=r"^scope: expected lanes that hold the same positions"):
        evict(policy, cache, cache.seqs, [1, 1])
    assert lane_positions(cache) == before


@pytest.mark.parametrize("name", NAMES)
def test_a_global_kept_set_is_one_for_all_lanes_and_depends_on_no_other_sequence(name):
    lengths = [90, 7, 40, 61]
    policy = make_policy(replace(SMALL[name], scope="global", protect_prompt=True))
    together = filled_cache(lengths, drop_seed=None)
    evict(policy, together, together.seqs, [5] * 4)
    alone = filled_cache(lengths, drop_seed=None)
    for seq in reversed(alone.seqs):
        evict(policy, alone, [seq], [5])
    kept = lane_positions(together)
    assert kept == lane_positions(alone)
    for i, length in enumerate(lengths):
        lanes = kept[i * SHAPE.lanes : (i + 1) * SHAPE.lanes]
        assert lanes == [lanes[0]] * SHAPE.lanes
        assert set(range(5)) <= set(lanes[0]) and len(lanes[0]) == min(length, 12 + 4 + 5)


# ---- through the engine


def set_scales(model, scales: list[float]) -> None:
    """Make each layer attend with a scale of its own."""
    for layer, scale in zip(model.model.model.layers, scales, strict=True):
        layer.self_attn.scaling = scale


@pytest.mark.parametrize("name", ["rkv", "snapkv", "tova"])
def test_layers_of_different_scales_are_refused_where_queries_are_weighed(name):
    model = make_model(tokenizer=False)
    set_scales(model, [0.25, 0.5])
    engine = Engine(model, small_config(), eviction=SMALL[name])
    engine.add([1, 2, 3], sampled(4))
    with pytest.raises(ValueError, match=r"^scale: expected one for all layers \(0.25\) .*got 0.5"):
        engine.step()
    engine = Engine(model, small_config(), eviction=SMALL["knorm"])
    engine.add([1, 2, 3], sampled(4))
    assert engine.step()


class Recorder:
    """Keys and queries of one sequence as the engine handed them to its cache."""

    def __init__(self, engine: Engine) -> None:
        self.keys: dict[int, list[np.ndarray]] = defaultdict(list)  # by layer: [kv_heads, dim]
        self.queries: dict[int, list[np.ndarray]] = defaultdict(list)  # by layer: [q_heads, dim]
        self.received: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # by position
        self.scale = 0.0  # of the attention
        attend = engine.cache.update_and_attend

        def recording(layer, query, key, value, batch, scale):
            self.keys[layer] += list(key.double().numpy())
            self.queries[layer] += list(query.double().numpy())
            self.scale = scale
            return attend(layer, query, key, value, batch, scale)

        engine.cache.update_and_attend = recording

    def see(self, layer: int, head: int, held: list[int], first: int) -> None:
        """Tokens from position ``first`` on have attended to ``held`` positions up to theirs."""
        keys = np.stack([self.keys[layer][p][head] for p in held])
        received = self.received[layer, head]
        for token in range(first, held[-1] + 1):
            seen = [p for p in held if p <= token]
            query = self.queries[layer][token]
            got = attention(keys[: len(seen)], query, head, SHAPE.kv_heads, self.scale)
            for p, weight in zip(seen, got, strict=True):
                received[p] = received.get(p, 0.0) + weight

    def score(
        self, layer: int, head: int, held: list[int], tokens: int, config: EvictionConfig
    ) -> np.ndarray:
        """Of the ``held`` positions but the newest, when ``tokens`` tokens have come."""
        if config.scope == "global":
            one = replace(config, scope="lane")
            lanes = np.ndindex(SHAPE.layers, SHAPE.kv_heads)
            return np.mean([self.score(*lane, held, tokens, one) for lane in lanes], axis=0)
        if config.policy == "h2o":
            return np.array([self.received[layer, head][p] for p in held[: -config.protect]])
        keys = [np.stack([self.keys[layer][p][h] for p in held]) for h in range(SHAPE.kv_heads)]
        queries = np.stack(self.queries[layer][:tokens], axis=1)
        return ORACLES[config.policy](keys, queries, np.array(held), config, self.scale)[head]


@pytest.mark.parametrize(
    "config",
    [
        EvictionConfig.released(20, "rkv", headroom=12),
        EvictionConfig.released(16, "rkv", headroom=9, protect=5, window=3, kernel=3, mix=0.5),
        EvictionConfig.released(
            24, "rkv", headroom=32, protect=16, window=16, threshold=0.1, mix=0
        ),
        EvictionConfig.released(20, "rkv", headroom=12, pool_first=True, mix=0.5),
        EvictionConfig.released(20, "snapkv", headroom=12, pool_first=True, kernel=3),
        EvictionConfig.released(20, "rkv", headroom=12, scope="global", mix=0.5),
        EvictionConfig.released(20, "snapkv", headroom=12, scope="global"),
        EvictionConfig.released(20, "tova", headroom=12, scope="global"),
        *(EvictionConfig.released(21, name, headroom=12) for name in sorted({"h2o", *ORACLES})),
        *(
            EvictionConfig.released(9, name, headroom=7, protect=3, **own(name, window=2, kernel=3))
            for name in sorted({"h2o", *ORACLES})
        ),
    ],
    ids=repr,
)
@pytest.mark.parametrize("scale", [None, 0.7], ids=["", "another_scale"])
def test_a_policy_in_the_engine_keeps_what_its_oracle_keeps(config, scale):
    """Over many evictions, which leave the slots in an order that is not that of positions.

    Where scores tie within 1e-6 (max-pool makes exact ties) any of the tied may stay.
    """
    model = make_model(tokenizer=False)
    object.__setattr__(model, "eos_ids", frozenset())
    if scale is not None:
        set_scales(model, [scale, scale])
    engine = Engine(model, small_config(), eviction=config)
    recorder = Recorder(engine)
    prompt = make_prompts([config.trigger + 7], seed=11)[0]
    seq = engine.add(prompt, sampled(90, key=1))
    lanes = list(np.ndindex(SHAPE.layers, SHAPE.kv_heads))
    held: dict[tuple[int, ...], list[int]] = {lane: [] for lane in lanes}
    evictions, decided, tokens, shuffled = 0, 0, 0, False
    while engine.has_work:
        engine.step()
        handle = engine.store_handle(seq)
        came = engine.cache.store.seq_len(handle)
        position = engine.cache.positions([handle])[0]
        for lane in lanes:
            held[lane] += range(tokens, came)
            if config.policy == "h2o" and came > tokens:
                recorder.see(*lane, held[lane], tokens)
            got = sorted(p for p in position[lane].tolist() if p >= 0)
            shuffled |= got != [p for p in position[lane].tolist() if p >= 0]
            if len(held[lane]) >= config.trigger:
                score = recorder.score(*lane, held[lane], came, config)
                kept = np.isin(held[lane][: -config.protect], got)
                assert kept.sum() == config.budget
                assert score[kept].min() >= score[~kept].max() - 1e-6
                decided += score[kept].min() > score[~kept].max() + 1e-6
                assert got[-config.protect :] == held[lane][-config.protect :]
                evictions += 1
                held[lane] = got
            assert got == held[lane]
        tokens = came
    assert evictions == len(lanes) * engine.stats.evictions
    assert engine.stats.evictions > 3 and shuffled
    assert decided > evictions / 3
