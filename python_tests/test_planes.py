"""Planes that a policy declares: what the cache keeps of every slot, whatever its type."""

from __future__ import annotations

import pytest
import torch

from kvcore import config
from kvcore.cache import CacheShape, KVCache, Plane
from kvcore.config import DetectorConfig
from kvcore.native import _C

SHAPE = CacheShape(layers=2, q_heads=4, kv_heads=2, head_dim=8, dtype=torch.float32)
PLANES = (
    Plane("mean", torch.float32, 6, [0, 0, 1, 1, 2, 2]),
    Plane("half", torch.bfloat16, 1, 0.5),
    Plane("mark", torch.uint8, 1, 3),
    Plane("seen", torch.int32, 2, -1),
    Plane("since", torch.int64),
)


def make_cache(**settings) -> KVCache:
    return KVCache(SHAPE, blocks=96, rows=4, max_len=64, **({"planes": PLANES} | settings))


def feed(cache: KVCache, seq: int, tokens: int) -> None:
    batch = cache.extend([seq], [tokens])
    key = torch.randn(tokens, 2, 8, generator=torch.Generator().manual_seed(tokens))
    for layer in range(SHAPE.layers):
        cache.update_and_attend(layer, key.repeat(1, 2, 1), key, key, batch, 0.3)


def read(cache: KVCache, seq: int) -> dict[str, torch.Tensor]:
    return {plane.name: cache.plane(plane.name, [seq])[0].clone() for plane in PLANES}


def write(cache: KVCache, seq: int, seed: int) -> dict[str, torch.Tensor]:
    """Small whole numbers, which every type holds, in every slot; returns what is then there."""
    generator = torch.Generator().manual_seed(seed)
    row = cache.store.row(seq)
    used = [
        int(block)
        for lane, length in zip(
            cache.block_table[row].flatten(0, 1), cache.lane_len[row].flatten(), strict=True
        )
        for block in lane[: -(-int(length) // 16)]
    ]
    for tensor in cache.planes.values():
        numbers = torch.randint(0, 100, (len(used), *tensor.shape[1:]), generator=generator)
        tensor[used] = numbers.to(tensor.dtype)
    return read(cache, seq)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def starts(plane: Plane, slots: int) -> torch.Tensor:
    return plane.starts()[:, None].expand(2, 2, plane.channels, slots)


def test_a_declared_plane_begins_with_its_start_and_lives_with_its_slot():
    cache = make_cache()
    seq = cache.store.create()
    feed(cache, seq, 20)
    for plane in PLANES:
        assert cache.planes[plane.name].dtype == plane.dtype
        assert torch.equal(cache.plane(plane.name, [seq])[0], starts(plane, 20))
    before = write(cache, seq, 1)
    feed(cache, seq, 15)  # into an open block and a new one
    after = read(cache, seq)
    for plane in PLANES:
        assert torch.equal(after[plane.name][..., :20], before[plane.name])
        assert torch.equal(after[plane.name][..., 20:], starts(plane, 15))
    # Slot 33 takes the place of 2, 34 that of 17.
    drop = torch.tensor([2, 17], dtype=torch.int32).expand(1, 2, 2, 2).contiguous()
    cache.store.evict([seq], drop, torch.full((1, 2, 2), 2, dtype=torch.int32))
    order = torch.arange(33)
    order[2], order[17] = 33, 34
    for plane in PLANES:
        kept = cache.plane(plane.name, [seq])[0]
        assert torch.equal(kept, after[plane.name][..., order])
    cache.store.check_integrity()


@pytest.mark.parametrize("copy", [False, True])
def test_forks_have_planes_of_their_own(copy):
    cache = make_cache()
    seq = cache.store.create()
    feed(cache, seq, 40)
    before = write(cache, seq, 2)
    [fork] = cache.store.fork(seq, 1, copy)
    assert same(read(cache, fork), before)
    changed = write(cache, fork, 3)
    assert same(read(cache, seq), before)
    assert not same(changed, before)
    cache.store.adopt(seq, fork)
    assert same(read(cache, seq), changed)
    cache.store.check_integrity()


def test_an_overwritten_slot_begins_again():
    cache = make_cache(replaces=True)
    seq = cache.store.create()
    feed(cache, seq, 20)
    before = write(cache, seq, 4)
    cache.set_replace([seq], torch.full((1, 2, 2), 7, dtype=torch.int32))
    feed(cache, seq, 1)
    for plane in PLANES:
        now = cache.plane(plane.name, [seq])[0]
        assert torch.equal(now[..., 7:8], starts(plane, 1))
        others = [slot for slot in range(20) if slot != 7]
        assert torch.equal(now[..., others], before[plane.name][..., others])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plane("p", torch.float32, 0), "channels: expected an integer in"),
        (lambda: Plane("p", torch.float32, 3, [1, 2]), "start: expected 1 or 3 numbers for plane"),
        (lambda: make_cache(planes=[PLANES[0], PLANES[0]]), "mean: expected each name once"),
        (lambda: make_cache(planes=[Plane("", torch.uint8)]), "name: expected 1 to 31 bytes"),
        (lambda: make_cache(planes=[Plane("x" * 32, torch.uint8)]), "name: expected 1 to 31"),
        (lambda: make_cache(planes=[Plane("p", torch.complex64)]), "p: "),
        (
            lambda: make_cache(planes=[Plane("attention_stats", torch.float32)], accumulates="sum"),
            "attention_stats: expected each name once",
        ),
        (lambda: make_cache().plane("none", []), "name: expected a plane of this cache"),
    ],
)
def test_what_is_wrong_with_a_plane_is_named(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@pytest.mark.parametrize("slot", [_C.NOT_FINITE, 20, 2**30])
def test_only_live_slots_are_elected_and_nothing_changes_otherwise(slot):
    cache = make_cache(replaces=True)
    a, b = cache.store.create(), cache.store.create()
    cache.extend([a, b], [20, 30])
    cache.set_replace([a], torch.full((1, 2, 2), 19, dtype=torch.int32))
    slots = torch.full((2, 2, 2), 4, dtype=torch.int32)
    slots[1, 1, 0] = slot
    where = f"row {cache.store.row(a)}, layer 1, kv head 0, got {slot}"
    with pytest.raises(ValueError, match=f"^slots: expected a slot below lane_len 20, .*{where}"):
        cache.set_replace([b, a], slots)
    assert (cache.replace[cache.store.row(a)] == 19).all()
    assert (cache.replace[cache.store.row(b)] == _C.NO_REPLACE).all()


def test_slots_are_elected_only_where_the_policy_elects():
    slots = torch.zeros((1, 2, 2), dtype=torch.int32)
    observe = _C.RkvSettings(4, 3, 0.1, 0.5)
    fused = make_cache(window=4, replaces=True, observe=observe, state_slots=16, planes=())
    for cache in (make_cache(), fused):
        seq = cache.store.create()
        cache.extend([seq], [4])
        with pytest.raises(ValueError, match=r"^replace: "):
            cache.set_replace([seq], slots)


@pytest.mark.parametrize(
    ("field", "largest"),
    [
        ("entropy_window", config.MAX_DETECTOR_TOKENS),
        ("entropy_guard", config.MAX_DETECTOR_TOKENS),
        ("gzip_window", config.MAX_GZIP_WINDOW),
        ("repetition_max_pattern_size", config.MAX_DETECTOR_TOKENS),
        ("repetition_min_count", config.MAX_DETECTOR_TOKENS),
        ("repetition_min_tokens", config.MAX_DETECTOR_TOKENS),
    ],
)
def test_settings_and_core_agree_on_the_detectors_bounds(field, largest):
    def core(value: int) -> _C.CandidateMonitor:
        settings = {"entropy": True, "gzip": True, "repetition": True, field: value}
        return _C.CandidateMonitor(_C.TokenBytes([b"a"]), **settings)

    DetectorConfig(**{field: largest})
    core(largest)
    with pytest.raises(ValueError, match=f"^{field}: "):
        DetectorConfig(**{field: largest + 1})
    with pytest.raises(ValueError, match=f"^{field}: "):
        core(largest + 1)
