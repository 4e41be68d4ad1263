"""NaN and infinity are reported, whichever bits they have, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.lanes import Lanes

from kvcore import ops
from kvcore.cache import CacheShape, KVCache
from kvcore.native import _C

TOKENS = 40
BITS = {  # quiet and signalling NaNs with payloads high, low and everywhere; infinities
    torch.float32: [0x7FC00000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x7FC00155, 0x7F800000],
    torch.bfloat16: [0x7FC0, 0x7FC1, 0xFFFF, 0x7F81, 0xFF80],
    torch.float16: [0x7E00, 0x7E01, 0xFFFF, 0x7C01, 0xFC00],
}
every_number = pytest.mark.parametrize(
    ("dtype", "bits"),
    [(dtype, bits) for dtype, words in BITS.items() for bits in words],
    ids=lambda x: hex(x) if isinstance(x, int) else str(x).removeprefix("torch."),
)


@pytest.fixture(params=[n for n in ("base", "v3", "v4", "bf16") if _C.isa_supported(n)])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _C.isa()
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(before)


def put(tensor: torch.Tensor, index: tuple[int, ...], bits: int) -> None:
    """Write a number's bits: an assignment could change a payload."""
    word = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    kind = np.int32 if word == torch.int32 else np.int16
    value = np.array([bits], dtype=f"u{kind().itemsize}").view(kind)
    tensor.view(word)[index] = int(value[0])


def numbers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    key, value = torch.randn((2, TOKENS, 2, 16), generator=g).to(dtype)
    return key, value, torch.randn((TOKENS, 6, 16), generator=g).to(dtype)


def make_lanes(dtype: torch.dtype) -> Lanes:
    return Lanes(kv_heads=2, q_heads=6, head_dim=16, window=4, max_slots=64, dtype=dtype)


def attend(lanes: Lanes, query: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(query)
    cu = torch.tensor([0, len(query)], dtype=torch.int32)
    scratch = ops.attend_scratch(lanes.store)
    _C.attend(lanes.store, 0, query, out, None, scratch, lanes.rows(), cu, 0.25)
    return out.isnan().flatten(2)


@every_number
@pytest.mark.parametrize("what", ["key", "value"])
def test_all_that_see_such_a_key_or_value_are_nan(level, dtype, bits, what):
    for token in (0, 5, TOKENS - 1):
        key, value, query = numbers(dtype)
        put(key if what == "key" else value, (token, 1, 3), bits)
        lanes = make_lanes(dtype)
        lanes.append(key, value, query)
        bad = attend(lanes, query)
        assert bad[token:, 3:].all() and not bad[:token].any() and not bad[:, :3].any()
        if what == "key":
            with pytest.raises(ValueError, match=r"layer 0, kv head 1; its keys or recent queries"):
                lanes.score_rkv(protect=4, mix=0.1)


@every_number
def test_such_a_query_is_seen_in_every_head(level, dtype, bits):
    for head in range(6):
        key, value, query = numbers(dtype)
        put(query, (TOKENS - 2, head, 7), bits)
        lanes = make_lanes(dtype)
        lanes.append(key, value, query)
        bad = attend(lanes, query)
        assert bad[TOKENS - 2, head].all() and int(bad.all(-1).sum()) == 1 and bad.sum() == 16
        for mix in (0.0, 0.1, 1.0):
            with pytest.raises(ValueError, match=rf"kv head {head // 3}; its keys or recent"):
                lanes.score_rkv(protect=4, mix=mix)


SHAPE = CacheShape(layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)


def feed(cache: KVCache, seqs: list[int], counts: list[int], spoil=None) -> None:
    """Random tokens through both layers; ``spoil(layer, query, key, value)`` may change them."""
    batch = cache.extend(seqs, counts)
    g = torch.Generator().manual_seed(2)
    for layer in range(2):
        key, value = torch.randn((2, sum(counts), 2, 16), generator=g)
        query = torch.randn((sum(counts), 4, 16), generator=g)
        if spoil is not None:
            spoil(layer, query, key, value)
        cache.update_and_attend(layer, query, key, value, batch, 0.25)


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("window", [0, 4])
def test_the_cache_names_the_sequence_and_the_position(what, window):
    cache = KVCache(SHAPE, blocks=256, rows=4, max_len=128, window=window)
    a, b = cache.store.create(), cache.store.create()
    feed(cache, [a, b], [10, 20])
    assert cache.not_finite([a, b]) == [0, 0]

    def spoil(layer, query, key, value):
        tensor = {"query": query, "key": key, "value": value}[what]
        if layer == 1:
            tensor[4, -1, 3] = torch.inf  # token 1 of b, at position 21
            tensor[5, -1, 3] = torch.nan

    feed(cache, [a, b], [3, 4], spoil)
    assert cache.not_finite([b, a]) == [22, 0]
    (child,) = cache.store.fork(b, 1, copy=True)
    assert cache.not_finite([child]) == [22]
    cache.store.truncate(child, 2)
    assert cache.not_finite([child]) == [22]
    cache.store.truncate(child, 1)
    assert cache.not_finite([child]) == [0]
    cache.store.release(b)
    again = cache.store.create()
    assert cache.not_finite([again, a]) == [0, 0]


@pytest.mark.parametrize("accumulates", ["sum", "per_head"])
def test_collected_attention_shows_it(accumulates):
    cache = KVCache(SHAPE, blocks=256, rows=4, max_len=128, accumulates=accumulates)
    a, b = cache.store.create(), cache.store.create()

    def spoil(layer, query, key, value):
        if layer == 0:
            query.view(torch.int32)[12, 2, 3] = 0x7FC00001  # of b, first of the second kv head

    feed(cache, [a, b], [10, 20], spoil)
    stats = cache.attention_stats([a, b])
    hit = stats.isnan().flatten(-2).any(-1)
    assert hit[1, 0, 1] and int(hit.sum()) == 1
