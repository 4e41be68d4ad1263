"""Laws of an engine that can always go on: whatever is raised in a step, wherever, no sequence
hangs, none loses or repeats a token, and what is done next works.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.engine_fuzz import fuzz
from support.engine_tools import greedy, make_prompts, run, sampled, small_config
from support.exact_model import is_exact, make_exact_model
from support.interruptions import Interruption

from kvcore.config import DetectorConfig, EvictionConfig, SamplingParams
from kvcore.engine import Engine, FeedOutput, GenerateSpec
from kvcore.native import _C, set_threads

STEADY = {"cadence": "steady", "budget": 12, "protect": 8}
SAWTOOTH = {"cadence": "sawtooth", "budget": 12, "protect": 8, "headroom": 20}
EVICTIONS = {
    "full": EvictionConfig(),
    "rkv steady": EvictionConfig("rkv", **STEADY),
    "tova steady": EvictionConfig("tova", **STEADY),
    "h2o steady": EvictionConfig("h2o", **STEADY),
    "rkv sawtooth": EvictionConfig("rkv", **SAWTOOTH),
    "h2o sawtooth": EvictionConfig("h2o", **SAWTOOTH),
}
every_eviction = pytest.mark.parametrize("eviction", EVICTIONS.values(), ids=EVICTIONS)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads(), _C.num_threads()
    set_threads(1)
    yield
    torch.set_num_threads(before[0])
    _C.set_num_threads(before[1])


@pytest.fixture(scope="module")
def model():
    found = make_exact_model(seed=3, endless=True)
    assert is_exact(found)
    return found


class Story:
    """A prompt's generation, an extension with values and forks, in a pool that is too small for
    all of them at once.
    """

    def __init__(self, model, eviction, *, blocks: int = 40) -> None:
        self.engine = Engine(
            model,
            small_config(kv_blocks=blocks, context_len=256, max_seqs=6, max_batched_tokens=20),
            eviction=eviction,
            detector=DetectorConfig(),
        )
        first, second, more = make_prompts([30, 17, 11], seed=4)
        self.root = self.engine.add(first)
        self.other = self.engine.add(second, GenerateSpec(SamplingParams(max_new_tokens=25)))
        while self.engine._sequences[self.root].busy:
            self.engine.step()
        specs = [greedy(14), sampled(14, key=7, detect=True), None]
        self.children = self.engine.fork(self.root, specs)
        self.engine.extend(self.other_root(more), more, FeedOutput.LOGPROBS)
        self.told: list = []

    def other_root(self, tokens) -> int:
        self.waits = self.engine.add(tokens)
        return self.waits

    def step(self) -> None:
        self.told += self.engine.step()

    def end(self):
        """What everybody came to, as plain values."""
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        self.engine.cache.store.check_integrity()
        told = sorted(
            (
                event.seq,
                event.token if event.token is not None else -1,
                event.extended,
                str(event.error),
                [] if event.generation is None else event.generation.tokens,
                [] if event.values is None else event.values.tolist(),
            )
            for event in self.told
        )
        tokens = {seq: self.engine.tokens(seq) for seq in self.engine._sequences}
        for seq in [*self.children, self.root, self.other, self.waits]:
            self.engine.release(seq)
        assert self.engine.free_blocks == self.engine.num_blocks
        assert self.engine.cache.store.num_sequences() == 0
        assert self.engine._generator._monitor.num_open() == 0
        return tokens, told


@every_eviction
def test_an_exception_at_any_line_of_a_step_changes_nothing_that_comes_of_it(model, eviction):
    expected = Story(model, eviction).end()
    counted = Story(model, eviction)
    lines = []
    while counted.engine.has_work:
        with Interruption(KeyboardInterrupt(), 1 << 30) as count:
            counted.step()
        lines.append(count.lines)
    raised = 0
    for step in (0, 2, 5, 13, 20):
        if step >= len(lines):
            continue
        for line in range(1, lines[step] + 1, 1 + lines[step] // 12):
            story = Story(model, eviction)
            for _ in range(step):
                story.step()
            kind = (KeyboardInterrupt, RuntimeError, MemoryError)[line % 3]
            try:
                with Interruption(kind("struck"), line):
                    story.step()
            except kind:
                raised += 1
            assert story.end() == expected, f"step {step}, line {line}"
    assert raised > 45


STAGES = {
    "the plan": ("_scheduler", "plan"),
    "the batch": ("_cache", "batch"),
    "the forward": ("_executor._runner", "forward"),
    "the draw": ("_generator", "draw"),
    "the detector": ("_generator", "push"),
    "the end of a generation": ("_generator", "result"),
    "eviction": ("_executor", "_evict"),
    "the books": ("_executor", "_count"),
    "telling": ("", "_tell_errors"),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stage", STAGES)
@every_eviction
def test_a_stage_that_breaks_down_once_loses_nothing(model, eviction, stage, after, monkeypatch):
    expected = Story(model, eviction).end()
    story = Story(model, eviction)
    holder: object = story.engine
    path, name = STAGES[stage]
    for part in filter(None, path.split(".")):
        holder = getattr(holder, part)
    whole, calls = getattr(holder, name), [0]

    def broken(*args, **options):
        calls[0] += 1
        if calls[0] != 2:
            return whole(*args, **options)
        if after:
            whole(*args, **options)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(holder, name, broken)
    struck = 0
    while story.engine.has_work:
        try:
            story.step()
        except RuntimeError as error:
            assert str(error) == "out of luck"
            struck += 1
    assert story.end() == expected
    assert struck == (calls[0] >= 2)
    if eviction.evicts or stage != "eviction":
        assert struck == 1


def test_p28_a_setting_that_only_the_core_could_refuse_is_refused_when_it_is_made(model):
    for bad, field in (
        (lambda: SamplingParams(top_k=2**31), "top_k"),
        (lambda: SamplingParams(top_p=1e-46), "top_p"),
        (lambda: SamplingParams(temperature=1e39), "temperature"),
        (lambda: SamplingParams(temperature=1e-46), "temperature"),
        (lambda: SamplingParams(max_new_tokens=2**31), "max_new_tokens"),
        (lambda: GenerateSpec(rng_key=2**70), "rng_key"),
        (lambda: GenerateSpec(rng_key=-1), "rng_key"),
        (lambda: GenerateSpec(rng_key=1.5), "rng_key"),
        (lambda: GenerateSpec(sampling=None), "sampling"),
        (lambda: GenerateSpec(detect=1), "detect"),
    ):
        with pytest.raises(ValueError, match=f"^{field}: expected .*, got "):
            bad()
    engine = Engine(model, small_config())
    keys = (0, 2**63 - 1, 2**63, 2**64 - 1)
    extremes = [SamplingParams(top_k=2**31 - 1, max_new_tokens=4), SamplingParams(
        temperature=3.4e38, top_p=1.5e-45, max_new_tokens=4)]  # fmt: skip
    for key in keys:
        for sampling in extremes:
            engine.add([1, 2, 3], GenerateSpec(sampling, rng_key=key))
    done = [e.generation for e in run(engine) if e.generation is not None]
    assert [len(g.tokens) for g in done] == [4] * 8


def test_what_a_released_sequence_had_to_tell_is_not_told(model):
    engine = Engine(model, small_config())
    gone, there = engine.add([5]), engine.add([6])
    engine.release(gone)
    assert [event.seq for event in run(engine)] == [there]


# ---- who waits for whom


def test_a_newcomer_that_does_not_fit_holds_nothing_and_pushes_nobody_out(model):
    engine = Engine(model, small_config(kv_blocks=60))
    prompts = make_prompts([100, 160, 20], seed=1)
    first, second, third = (engine.add(p, sampled(60, key=k)) for k, p in enumerate(prompts))
    tokens = {first: [], second: [], third: []}
    order = []
    while engine.has_work:
        for event in engine.step():
            if event.token is not None:
                tokens[event.seq].append(event.token)
                if event.seq not in order:
                    order.append(event.seq)
        if not tokens[second] and tokens[first] and len(tokens[first]) < 60:
            assert engine.store_handle(second) is None
            assert engine.stats.preemptions == 0
    assert order == [first, second, third]  # nobody overtakes
    # The first is idle when it has to go; the third grows beside the second until nothing is left.
    assert engine.stats.recomputed_tokens < 60 and engine.stats.preemptions <= 3
    for seq, prompt in zip((first, second, third), prompts, strict=True):
        alone = Engine(model, small_config())
        alone.add(prompt, sampled(60, key=seq))
        [result] = [e.generation for e in run(alone) if e.generation is not None]
        assert result.tokens == tokens[seq]


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_computed_again_for_few_of_many_that_share_a_small_pool(model, seed):
    engine = Engine(model, small_config(kv_blocks=80, max_seqs=32))
    lengths = torch.randint(5, 120, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
    ids = [engine.add(p, sampled(40, key=k)) for k, p in enumerate(make_prompts(lengths))]
    while engine.has_work:
        for event in engine.step():
            if event.generation is not None:
                engine.release(event.seq)
    once = sum(lengths) + 40 * len(ids)
    assert engine.stats.recomputed_tokens < once
    assert engine.stats.preemptions < 2 * len(ids)


def test_forks_of_an_adopted_child_go_on_from_the_parent_and_from_nothing_that_is_dead(model):
    for blocks in (400, 64, 56, 48):
        engine = Engine(model, small_config(kv_blocks=blocks, context_len=256))
        old = engine.add(make_prompts([10], seed=9)[0])
        root = engine.add(make_prompts([40], seed=1)[0])
        run(engine)
        [child] = engine.fork(root, [None])
        run(engine)
        engine.extend(child, make_prompts([20], seed=2)[0])
        run(engine)
        [grandchild] = engine.fork(child, [greedy(60)])
        for _ in range(3):
            engine.step()
        engine.adopt(root, child)
        assert all(s.parent is None or s.parent.seq_id in engine._sequences
                   for s in engine._sequences.values())  # fmt: skip
        engine.extend(root, make_prompts([10], seed=5)[0])
        while engine._sequences[root].work:
            engine.step()
        engine.extend(old, make_prompts([120], seed=6)[0])
        run(engine)
        tokens = engine.tokens(grandchild)
        if blocks == 400:
            expected = tokens
        else:
            assert engine.stats.preemptions > 0
        assert tokens == expected
        engine.cache.store.check_integrity()


@pytest.mark.parametrize("at_once", [1, 2, 3, 7])
@pytest.mark.parametrize("policy", ["rkv", "tova", "random"])
def test_a_piece_is_one_piece_in_however_many_forwards_it_is_fed(model, policy, at_once):
    """In the steady cadence a token that comes alone overwrites; one of a longer piece does not."""
    kept = []
    for batched in (512, at_once):
        engine = Engine(
            model,
            small_config(max_batched_tokens=batched),
            eviction=EvictionConfig(policy, **STEADY),
        )
        root = engine.add(make_prompts([50])[0])
        run(engine)
        engine.extend(root, make_prompts([6], seed=3)[0])
        run(engine)
        handle = engine.store_handle(root)
        kept.append(engine.cache.positions([handle])[0].sort(-1).values)
    assert torch.equal(*kept)


# ---- random use


@pytest.mark.parametrize("seed", range(12))
def test_random_use_with_interruptions_equals_every_sequence_alone(seed):
    counts = fuzz(seed, 80)
    assert counts["compared"] > 3


def test_the_long_run_has_a_command_line():
    done = subprocess.run(
        [sys.executable, "fuzz_engine.py", "--seconds", "1", "--changes", "20", "--seed", "5"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "engines from seed 5" in done.stdout
