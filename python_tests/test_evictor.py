"""When and how entries leave a cache, on a cache alone: no engine, no model."""

from __future__ import annotations

import pytest
import torch
from support.engine_tools import seeded

from kvcore.cache import CacheShape, KVCache
from kvcore.config import EvictionConfig
from kvcore.policies import Evictor, available, make_policy
from kvcore.policies.evictor import plan_cache

SHAPE = CacheShape(layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
NAMES = [name for name in available() if name != "full"]
BUDGET, PROTECT, HEADROOM = 12, 9, 16
CONTEXT = 200
WAYS = {
    "steady": {"cadence": "steady", "protect": PROTECT},
    "sawtooth": {"cadence": "sawtooth", "protect": PROTECT, "headroom": HEADROOM},
}
every_policy = pytest.mark.parametrize("name", NAMES)
every_cadence = pytest.mark.parametrize("cadence", WAYS)


def config_of(name: str, cadence: str, **more: object) -> EvictionConfig:
    return EvictionConfig(name, BUDGET, **WAYS[cadence], **seeded(name, 3), **more)


class Rig:
    """A cache, its evictor, and random text to feed."""

    def __init__(self, config: EvictionConfig, *, context: int = CONTEXT, rows: int = 3) -> None:
        policy = make_policy(config)
        plan = plan_cache(policy, SHAPE, context)
        self.cache = plan.make(SHAPE, blocks=256, rows=rows, max_len=context)
        self.evictor = Evictor(policy, self.cache)
        self.generator = torch.Generator().manual_seed(1)

    def begin(self) -> int:
        return self.cache.store.create()

    def feed(self, seq: int, count: int) -> None:
        """The next ``count`` tokens of random keys, values and queries, as one forward."""
        batch = self.cache.extend([seq], [count])
        for layer in range(SHAPE.layers):
            query, key, value = (
                torch.randn((count, heads, SHAPE.head_dim), generator=self.generator)
                for heads in (SHAPE.q_heads, SHAPE.kv_heads, SHAPE.kv_heads)
            )
            self.cache.update_and_attend(layer, query, key, value, batch, 0.25)

    def look(self, seq: int, prompt_len: int = 1) -> int:
        """Slots dropped if the sequence is due, else -1."""
        [due] = self.evictor.due([seq], [prompt_len])
        return self.evictor.settle([seq], [prompt_len]) if due else -1

    def held(self, seq: int) -> list[list[int]]:
        """Sorted positions of every lane."""
        lanes = self.cache.positions([seq])[0].flatten(0, 1)
        return [sorted(p for p in lane.tolist() if p >= 0) for lane in lanes]


@every_cadence
@every_policy
def test_lanes_never_outgrow_the_trigger_and_keep_the_newest(name, cadence):
    config = config_of(name, cadence)
    rig = Rig(config)
    seq = rig.begin()
    lost = 0
    for token in range(90):
        rig.feed(seq, 1)
        rig.look(seq)
        for lane in rig.held(seq):
            newest = range(max(0, token + 1 - PROTECT), token + 1)
            assert lane[-len(newest) :] == list(newest)
            assert len(lane) == token + 1 or len(lane) >= BUDGET + PROTECT
            assert len(lane) < config.trigger + (cadence == "steady")
            lost = max(lost, token + 1 - len(lane))
    assert lost > 90 - config.trigger - 1
    rig.cache.store.check_integrity()


@every_policy
def test_a_sawtooth_is_due_at_its_trigger_and_leaves_the_best(name):
    rig = Rig(config_of(name, "sawtooth"))
    seq = rig.begin()
    rig.feed(seq, BUDGET + HEADROOM - 1)
    assert rig.look(seq) == -1
    rig.feed(seq, 1)
    score = rig.evictor.policy.score(rig.cache, [seq])[0].flatten(0, 1)
    position = rig.cache.positions([seq])[0].flatten(0, 1)
    assert rig.look(seq) == (HEADROOM - PROTECT) * SHAPE.lanes
    for values, held, lane in zip(score, position, rig.held(seq), strict=True):
        kept = torch.isin(held, torch.tensor(lane))
        assert values[: len(held)][kept].min() >= values[: len(held)][~kept].max()
    assert rig.look(seq) == -1


@every_policy
def test_a_full_lane_of_the_steady_cadence_exchanges_its_lowest_entry(name):
    rig = Rig(config_of(name, "steady"))
    seq = rig.begin()
    rig.feed(seq, 60)  # a piece: appended whole, and what is too much goes at once
    assert rig.look(seq) == (60 - BUDGET - PROTECT) * SHAPE.lanes
    for token in range(60, 90):
        score = rig.evictor.policy.score(rig.cache, [seq])[0].flatten(0, 1)
        position = rig.cache.positions([seq])[0].flatten(0, 1)
        before = rig.held(seq)
        rig.feed(seq, 1)
        assert rig.look(seq) == 0
        for values, held, old, new in zip(score, position, before, rig.held(seq), strict=True):
            [gone] = set(old) - set(new)
            assert set(new) - set(old) == {token}
            assert values[held.tolist().index(gone)] <= values.min() + 1e-6  # fused: by rounding
    rig.cache.store.check_integrity()


@every_cadence
def test_a_protected_prompt_comes_on_top(cadence):
    config = config_of("knorm", cadence, protect_prompt=True)
    rig = Rig(config)
    seq, prompt = rig.begin(), 30
    rig.feed(seq, prompt)
    for _ in range(60):
        rig.feed(seq, 1)
        rig.look(seq, prompt)
        assert all(lane[:prompt] == list(range(prompt)) for lane in rig.held(seq))
        most = rig.evictor.most_slots(10**6, prompt, 1)
        assert most == config.trigger + prompt + 1
        assert max(map(len, rig.held(seq))) < most
    assert min(map(len, rig.held(seq))) < prompt + 60


def test_without_a_policy_nothing_is_due_and_all_can_be_taken_back():
    rig = Rig(EvictionConfig())
    seq = rig.begin()
    rig.feed(seq, 150)
    assert not rig.evictor.evicts and rig.evictor.due([seq], [1]) == [False]
    assert rig.evictor.settle([seq], [1]) == 0
    assert rig.evictor.most_slots(150, 1, 150) == 150
    assert rig.evictor.take_back(seq, 20)
    assert rig.held(seq) == [list(range(130))] * SHAPE.lanes


@pytest.mark.parametrize(("name", "cadence"), [("rkv", "steady"), ("h2o", "sawtooth")])
def test_what_overwrote_entries_or_added_to_them_cannot_be_taken_back(name, cadence):
    rig = Rig(config_of(name, cadence))
    seq = rig.begin()
    rig.feed(seq, 22)
    rig.look(seq)
    rig.feed(seq, 1)
    before = rig.held(seq)
    assert not rig.evictor.take_back(seq, 1)
    assert rig.held(seq) == before


@every_policy
def test_the_tokens_of_one_piece_overwrite_nothing_however_they_are_fed(name):
    kept = []
    for chunks in ([7], [3, 4], [6, 1], [1] * 7):
        rig = Rig(config_of(name, "steady"))
        seq = rig.begin()
        rig.feed(seq, 40)
        rig.look(seq)
        for count in chunks:
            rig.evictor.begin(seq, count, 7)
            rig.feed(seq, count)
        assert all(len(lane) == BUDGET + PROTECT + 7 for lane in rig.held(seq))
        assert rig.look(seq) == 7 * SHAPE.lanes
        kept.append(len(rig.held(seq)[0]))
    assert kept == [BUDGET + PROTECT] * 4


def test_sequences_are_due_one_by_one():
    rig = Rig(config_of("random", "sawtooth"))
    seqs = [rig.begin() for _ in range(3)]
    for seq, count in zip(seqs, (5, 40, BUDGET + HEADROOM), strict=True):
        rig.feed(seq, count)
    assert rig.evictor.due(seqs, [1] * 3) == [False, True, True]
    assert rig.evictor.settle(seqs[1:], [1] * 2) > 0
    assert rig.evictor.due(seqs, [1] * 3) == [False] * 3


def test_keys_that_are_not_finite_are_named_and_nothing_is_dropped():
    rig = Rig(config_of("rkv", "sawtooth"))
    seq = rig.begin()
    rig.feed(seq, 40)
    rig.cache.key_blocks[rig.cache.block_table[rig.cache.store.row(seq), 1, 0, 0]] = torch.nan
    with pytest.raises(ValueError, match="row 0, layer 1, kv head 0"):
        rig.look(seq)
    assert rig.held(seq) == [list(range(40))] * SHAPE.lanes


@every_policy
def test_a_cache_for_contexts_below_the_limit_keeps_nothing_for_exchanges(name):
    plan = plan_cache(make_policy(config_of(name, "steady")), SHAPE, BUDGET + PROTECT - 1)
    assert (plan.replaces, plan.observe, plan.state_bytes) == (False, None, 0)
    assert plan_cache(make_policy(config_of(name, "steady")), SHAPE, BUDGET + PROTECT).replaces


@pytest.mark.parametrize(
    ("name", "cadence", "lacks"),
    [
        ("rkv", "sawtooth", "window=8"),
        ("tova", "sawtooth", "window=1"),
        ("h2o", "sawtooth", "accumulates='sum'"),
        ("knorm", "steady", "replaces=True"),
    ],
)
def test_a_cache_that_lacks_what_a_policy_needs_is_refused_by_name(name, cadence, lacks):
    bare = KVCache(SHAPE, blocks=64, rows=1, max_len=CONTEXT)
    with pytest.raises(ValueError, match=rf"^cache: expected one with {lacks} .*{name}"):
        Evictor(make_policy(config_of(name, cadence)), bare)


def test_budgets_for_other_models_are_refused():
    config = config_of("knorm", "sawtooth", layer_budgets=(12, 12, 12))
    with pytest.raises(ValueError, match=r"^layer_budgets: expected one for each of 2 layers"):
        plan_cache(make_policy(config), SHAPE, CONTEXT)
