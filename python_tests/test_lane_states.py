"""Laws of the fused steady cadence's memory: bounded by the context, taken as lanes fill, counted,
and refused with the figure.
"""

from __future__ import annotations

import pytest
import torch
from support.engine_tools import generate, greedy, make_prompts, small_config
from support.tiny_models import make_model

from kvcore.cache import CacheShape, KVCache
from kvcore.config import EngineConfig, EvictionConfig
from kvcore.engine import Engine
from kvcore.native import _C


def steady(budget, protect=20):
    return EvictionConfig("rkv", budget=budget, protect=protect, cadence="steady")


@pytest.fixture(scope="module")
def model():
    """None of its ids ends a text."""
    found = make_model(tokenizer=False)
    object.__setattr__(found, "eos_ids", frozenset())
    return found


@pytest.mark.parametrize("budget", [1005, 8192, 100_000])
def test_a_budget_that_the_context_cannot_reach_costs_nothing(model, budget):
    prompts = make_prompts([30, 5])
    full = Engine(model, small_config())
    engine = Engine(model, small_config(), eviction=steady(budget))
    assert engine.cache.lane_state is None and engine.cache.replace is None
    assert engine.num_blocks == full.num_blocks
    assert generate(engine, prompts, greedy(40)) == generate(full, prompts, greedy(40))


def test_states_are_taken_as_lanes_fill_counted_and_given_back(model):
    engine = Engine(model, small_config(), eviction=steady(24))
    cache, lanes = engine.cache, engine.model.shape.lanes
    seq = engine.add(make_prompts([10])[0], greedy(100))
    while engine.cache_len(seq) < 44:
        assert cache.store.free_states() == cache.states
        engine.step()
    assert cache.store.free_states() == cache.states - lanes
    held = lanes * cache.state_bytes
    blocks = cache.store.num_blocks(engine.store_handle(seq)) * cache.shape.block_bytes
    assert engine.kv_bytes(seq) == cache.bytes_in_use() == blocks + held
    while engine.has_work:
        engine.step()
    assert engine.stats.kv_bytes_peak == blocks + held
    engine.release(seq)
    assert cache.store.free_states() == cache.states and cache.bytes_in_use() == 0
    cache.store.check_integrity()


def test_the_states_stay_within_kv_bytes_and_suffice_for_full_lanes(model):
    shape = model.shape
    for kv_bytes in (1 << 20, 3 << 20, 64 << 20):
        engine = Engine(model, small_config(kv_bytes=kv_bytes), eviction=steady(24))
        cache = engine.cache
        total = cache.blocks * shape.block_bytes + cache.states * cache.state_bytes
        assert total <= kv_bytes
        assert cache.states == min(cache.blocks // 3, 16 * shape.lanes)  # 44 slots: 3 blocks
        generate(engine, make_prompts([30, 60, 45, 20], seed=7), greedy(60))
        cache.store.check_integrity()


def test_one_full_sequence_must_fit_and_the_least_that_does_is_said(model):
    shape = model.shape
    eviction = steady(600)
    state_bytes = _C.rkv_state_bytes(620, 8, shape.head_dim)
    with pytest.raises(ValueError, match=r"^kv_bytes: expected at least") as caught:
        Engine(model, small_config(kv_bytes=100_000), eviction=eviction)
    message = str(caught.value)
    assert "budget" in message and "got 100000" in message
    least = int(message.split("expected at least ")[1].split()[0])
    assert least >= shape.lanes * (39 * shape.block_bytes + state_bytes) // 2
    with pytest.raises(ValueError, match=f"expected at least {least} "):
        Engine(model, small_config(kv_bytes=least - 1), eviction=eviction)
    Engine(model, small_config(kv_bytes=least), eviction=eviction)


def test_what_cannot_be_allocated_is_refused_with_the_figure(model, monkeypatch):
    def refuse(*size, **settings):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    config = EngineConfig(max_seqs=16, context_len=1024, kv_blocks=5000)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ValueError, match=r"^kv_blocks: .* can allocate, got 5000 blocks"):
        Engine(model, config, eviction=steady(24))


def test_a_lane_without_a_state_overwrites_nothing():
    shape = CacheShape(1, 2, 1, 8, torch.float32)
    observe = _C.RkvSettings(4, 3, 0.1, 0.5)
    cache = KVCache(
        shape, blocks=8, rows=2, max_len=32, window=4, replaces=True, observe=observe,
        state_slots=16, states=1,
    )  # fmt: skip
    a, b = cache.store.create(), cache.store.create()
    cache.extend([a, b], [16, 16])
    full = torch.tensor([[16]], dtype=torch.int32)
    with pytest.raises(_C.OutOfBlocks, match="needs 2 lane states, 1 of 1 are free"):
        cache.store.take_states([a, b], full)
    assert cache.store.free_states() == 1
    cache.replace[:] = 3
    batch = cache.extend([b], [1])
    key = torch.zeros(1, 1, 8)
    before = cache.key_blocks.clone()
    with pytest.raises(ValueError, match=r"^state_of: expected a state"):
        cache.update_and_attend(0, torch.zeros(1, 2, 8), key, key, batch, 1.0)
    assert torch.equal(cache.key_blocks.view(torch.int32), before.view(torch.int32))


def test_an_election_between_extend_and_append_writes_nothing():
    shape = CacheShape(1, 2, 1, 8, torch.float32)
    cache = KVCache(shape, blocks=8, rows=2, max_len=32, replaces=True)
    seq = cache.store.create()
    row = cache.store.row(seq)
    one = torch.ones(1, 1, 8)
    cache.extend([seq], [8])
    cache.replace[row] = 3
    batch = cache.extend([seq], [1])
    for slot in (4, -1):
        cache.replace[row] = slot
        before = cache.value_blocks.clone()
        with pytest.raises(ValueError, match=r"^replace: expected 3 in row"):
            cache.update_and_attend(0, torch.zeros(1, 2, 8), one, one, batch, 1.0)
        assert torch.equal(cache.value_blocks.view(torch.int32), before.view(torch.int32))
    cache.store.forget_replace(seq)
    assert (cache.replace[row] == -1).all()
    cache.extend([seq], [1])
    assert cache.store.max_lane_len(seq) == 9 and cache.store.undoable(seq) == 1
