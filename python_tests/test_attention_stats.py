"""What the cache adds up of the attention that each slot gets, against a computation in double."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.policy_oracles import attention

from kvcore.cache import CacheShape, KVCache

SHAPE = CacheShape(layers=2, q_heads=6, kv_heads=2, head_dim=16, dtype=torch.float32)
GROUP = 3
SCALE = 0.3


@dataclass
class Entry:
    """A cached key; by query head of its group the largest and smallest share it got, the sum."""

    key: np.ndarray
    largest: np.ndarray = field(default_factory=lambda: np.zeros(GROUP))
    smallest: np.ndarray = field(default_factory=lambda: np.ones(GROUP))
    total: np.ndarray = field(default_factory=lambda: np.zeros(GROUP))


class Model:
    """The lanes of one sequence, by position."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[int, ...], dict[int, Entry]] = {
            lane: {} for lane in np.ndindex(SHAPE.layers, SHAPE.kv_heads)
        }

    def see(self, layer: int, position: int, query: np.ndarray, key: np.ndarray) -> None:
        """One token: query [q_heads, dim], key [kv_heads, dim]."""
        for head in range(SHAPE.kv_heads):
            lane = self.lanes[layer, head]
            lane[position] = Entry(key[head])
            keys = np.stack([entry.key for entry in lane.values()])
            mine = query[head * GROUP : (head + 1) * GROUP]
            share = np.stack([attention(keys, q[None], 0, 1, SCALE) for q in mine], axis=1)
            for entry, got in zip(lane.values(), share, strict=True):
                entry.largest = np.maximum(entry.largest, got)
                entry.smallest = np.minimum(entry.smallest, got)
                entry.total = entry.total + got

    def drop(self, layer: int, head: int, position: int) -> None:
        del self.lanes[layer, head][position]

    def expected(self, accumulates: str, lane: tuple[int, ...], position: int) -> np.ndarray:
        entry = self.lanes[lane][position]
        if accumulates == "sum":
            return entry.total.mean(keepdims=True)
        return np.concatenate([entry.largest, entry.smallest, entry.total])


def check(cache: KVCache, seq: int, model: Model, accumulates: str) -> None:
    stats = cache.attention_stats([seq])[0].double().numpy()
    positions = cache.positions([seq])[0].numpy()
    for lane, entries in model.lanes.items():
        live = positions[lane] >= 0
        assert sorted(positions[lane][live]) == sorted(entries)
        for slot, position in enumerate(positions[lane]):
            if position < 0:
                assert (stats[lane][:, slot] == -np.inf).all()
                continue
            expected = model.expected(accumulates, lane, int(position))
            np.testing.assert_allclose(stats[lane][:, slot], expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("accumulates", ["sum", "per_head"])
def test_stats_follow_tokens_chunks_evictions_overwritten_slots_and_forks(accumulates):
    cache = KVCache(SHAPE, blocks=64, rows=2, max_len=64, replaces=True, accumulates=accumulates)
    generator = torch.Generator().manual_seed(3)
    model, [seq] = Model(), [cache.store.create()]
    end = 0

    def feed(tokens: int, seq: int, model: Model) -> None:
        nonlocal end
        batch = cache.extend([seq], [tokens])
        for layer in range(SHAPE.layers):
            query = torch.randn((tokens, SHAPE.q_heads, SHAPE.head_dim), generator=generator)
            key, value = torch.randn(
                (2, tokens, SHAPE.kv_heads, SHAPE.head_dim), generator=generator
            )
            cache.update_and_attend(layer, 2 * query, key, value, batch, SCALE)
            for t in range(tokens):
                model.see(layer, end + t, 2 * query[t].double().numpy(), key[t].double().numpy())
        end += tokens

    for tokens in (1, 20, 1, 1, 9):
        feed(tokens, seq, model)
        check(cache, seq, model, accumulates)

    drop = torch.tensor([3, 7, 30], dtype=torch.int32).expand(1, 2, 2, 3).contiguous()
    for lane in model.lanes:
        for slot in drop[0, 0, 0].tolist():
            model.drop(*lane, slot)  # nothing has moved yet: slot = position
    cache.store.evict([seq], drop, torch.full((1, 2, 2), 3, dtype=torch.int32))
    check(cache, seq, model, accumulates)

    held = cache.positions([seq])[0]
    row = cache.store.row(seq)
    assert cache.replace is not None
    cache.set_replace([seq], torch.tensor([[[0, 4], [11, 3]]], dtype=torch.int32))
    for lane in model.lanes:
        model.drop(*lane, int(held[lane][cache.replace[row][lane]]))
    feed(1, seq, model)
    check(cache, seq, model, accumulates)

    cache.store.forget_replace(seq)
    [fork] = cache.store.fork(seq, 1, False)
    before = cache.attention_stats([seq])
    assert torch.equal(before, cache.attention_stats([fork]))
    feed(5, fork, model)
    check(cache, fork, model, accumulates)
    assert torch.equal(before, cache.attention_stats([seq]))
