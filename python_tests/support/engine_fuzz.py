"""Random use of an engine, everything that can go wrong included, against what each sequence comes
to alone.

A sequence is known by its history: what it was begun with, what was appended, what it generated.
The same history on an engine with room for all, without anybody else and without an exception, must
give the same tokens, the same values and the same kept entries.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import torch

from kvcore.config import (
    DetectorConfig,
    EngineConfig,
    EvictionConfig,
    SamplingParams,
    pyramid_budgets,
)
from kvcore.engine import Engine, FeedOutput, GenerateSpec, StepEvent
from kvcore.native import set_threads
from kvcore.policies import available
from support.engine_tools import run, seeded
from support.exact_model import make_exact_model
from support.interruptions import Interruption

History = tuple[tuple[object, ...], ...]
Outcome = tuple[list[int], list[torch.Tensor], torch.Tensor | None]
CONTEXT = 400
MODEL = make_exact_model(seed=3)
DETECTOR = DetectorConfig(
    entropy_threshold=6.0, gzip_window=64, gzip_threshold=0.4, repetition=True,
    repetition_min_tokens=12, repetition_max_pattern_size=4,
)  # fmt: skip


def settings(rng: random.Random) -> tuple[EvictionConfig, EngineConfig]:
    """A policy, a cadence and a cache that is often too small."""
    policy = rng.choice(available())
    lanes = MODEL.shape.lanes
    size = EngineConfig(
        max_seqs=rng.choice((3, 6, 24)),
        context_len=CONTEXT,
        kv_blocks=lanes * rng.choice((8, 12, 20, 60, 400)),
        max_batched_tokens=rng.choice((1, 2, 5, 33, 512)),
    )
    if policy == "full":
        return EvictionConfig(), size
    shared = {"budget": rng.choice((6, 24, 40))}
    seed, window = rng.randrange(99), rng.choice((1, 8))
    shared |= seeded(policy, seed) | ({"window": window} if policy in ("rkv", "snapkv") else {})
    shared["protect_prompt"] = rng.random() < 0.2
    special = rng.random()
    if special < 0.15:
        shared["layer_budgets"] = pyramid_budgets(shared["budget"], MODEL.shape.layers, 2.0)
    elif special < 0.3:
        shared["scope"] = "global"
    if rng.random() < 0.5:
        return EvictionConfig(policy, cadence="steady", protect=rng.choice((8, 20)), **shared), size
    if special > 0.85:
        shared["head_budgets"] = "adaptive"
    return EvictionConfig.released(policy=policy, headroom=rng.choice((9, 30)), **shared), size


@dataclass
class Alone:
    """What histories come to on an engine of their own."""

    eviction: EvictionConfig
    known: dict[History, Outcome] = field(default_factory=dict)

    def of(self, history: History) -> Outcome:
        """(tokens, values that extends returned, positions held by every lane)."""
        if history not in self.known:
            size = EngineConfig(max_seqs=4, context_len=CONTEXT, kv_bytes=64 << 20)
            engine = Engine(MODEL, size, eviction=self.eviction, detector=DETECTOR)
            root, values = -1, []
            for kind, *what in history:
                if kind == "add":
                    root = engine.add(what[0])
                elif kind == "begin":
                    root = engine.add(what[0], what[1])
                elif kind == "extend":
                    engine.extend(root, what[0], what[1])
                else:
                    [child] = engine.fork(root, [what[0]])
                    run(engine)
                    engine.adopt(root, child)
                values += [e.values for e in run(engine) if e.values is not None]
            self.known[history] = (engine.tokens(root), values, held(engine, root))
        return self.known[history]


def held(engine: Engine, seq: int) -> torch.Tensor | None:
    """Sorted positions of every lane, [layers, kv_heads, slots]; None without a cache."""
    handle = engine.store_handle(seq)
    if handle is None:
        return None
    return engine.cache.positions([handle])[0].sort(-1).values


@dataclass
class Tracked:
    """A living sequence: its history, and what it is doing."""

    history: History
    values: list[torch.Tensor] = field(default_factory=list)
    pending: tuple[object, ...] | None = None  # joins the history when it is done
    waiting: int | None = None  # the parent from which it has not started


class EngineFuzz:
    """One engine under random use. ``counts`` says what happened how often."""

    def __init__(self, seed: int, *, interrupts: bool = True) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.interrupts = interrupts
        self.eviction, self.size = settings(self.rng)
        self.engine = Engine(MODEL, self.size, eviction=self.eviction, detector=DETECTOR)
        self.alone = Alone(self.eviction)
        self.live: dict[int, Tracked] = {}
        self.counts = {"steps": 0, "raised": 0, "failed": 0, "compared": 0, "refused": 0}
        self.raised_at: list[str] = []

    def describe(self) -> str:
        return f"seed {self.seed}, {self.eviction}, {self.size}, raised at {self.raised_at[-4:]}"

    # ---- one random thing

    def change(self) -> None:
        what = self.rng.random()
        idle = [s for s, t in self.live.items() if t.pending is None and t.waiting is None]
        idle = [s for s in idle if not any(t.waiting == s for t in self.live.values())]
        if len(self.live) < 2 or (what < 0.1 and len(self.live) < 12):
            self._add()
        elif what < 0.2 and idle:
            self._extend(self.rng.choice(idle))
        elif what < 0.3 and idle and len(self.live) < 16:
            self._fork(self.rng.choice(idle))
        elif what < 0.35 and len(idle) > 1:
            self._adopt(*self.rng.sample(idle, 2))
        elif what < 0.4:
            self._release(self.rng.choice(list(self.live)))
        elif what < 0.45:
            self._bad_call()
        else:
            self.step()

    def _tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(256) for _ in range(self.rng.randint(1, most))]

    def _spec(self) -> GenerateSpec:
        greedy = self.rng.random() < 0.7
        sampling = SamplingParams(
            temperature=0.0 if greedy else 0.9, max_new_tokens=self.rng.choice((1, 3, 12, 50))
        )
        return GenerateSpec(
            sampling,
            rng_key=self.rng.randrange(2**64),
            stop_at_step=self.rng.random() < 0.3,
            detect=self.rng.random() < 0.3,
        )

    def _add(self) -> None:
        tokens = self._tokens(self.rng.choice((1, 5, 40, 120)))
        if self.rng.random() < 0.5:
            seq = self.engine.add(tokens)
            self.live[seq] = Tracked((), pending=("add", tuple(tokens)))
        else:
            spec = self._spec()
            seq = self.engine.add(tokens, spec)
            self.live[seq] = Tracked((), pending=("begin", tuple(tokens), spec))

    def _extend(self, seq: int) -> None:
        tokens = self._tokens(self.rng.choice((1, 4, 30)))
        if len(self.engine.tokens(seq)) + len(tokens) >= CONTEXT - 60:
            return
        output = FeedOutput.LOGPROBS if self.rng.random() < 0.4 else FeedOutput.NONE
        self.engine.extend(seq, tokens, output)
        self.live[seq].pending = ("extend", tuple(tokens), output)

    def _fork(self, seq: int) -> None:
        if len(self.engine.tokens(seq)) >= CONTEXT - 60:
            return
        count = self.rng.randint(1, 3)
        specs = [self._spec() if self.rng.random() < 0.8 else None for _ in range(count)]
        for child, spec in zip(self.engine.fork(seq, specs), specs, strict=True):
            parent = self.live[seq]
            pending = None if spec is None else ("generate", spec)
            self.live[child] = Tracked(parent.history, list(parent.values), pending, seq)

    def _adopt(self, parent: int, child: int) -> None:
        self.engine.adopt(parent, child)
        self.live[parent] = self.live.pop(child)

    def _release(self, seq: int) -> None:
        if any(t.waiting == seq for t in self.live.values()):
            with contextlib.suppress(ValueError):
                self.engine.release(seq)
                raise AssertionError(f"{self.describe()}: released under its children")
            self.counts["refused"] += 1
            return
        if self.live[seq].pending is None and self.live[seq].waiting is None:
            self.compare(seq)
        self.engine.release(seq)
        del self.live[seq]

    def _bad_call(self) -> None:
        seq = self.rng.choice(list(self.live))
        calls = (
            lambda: self.engine.add([]),
            lambda: self.engine.add([1] * (CONTEXT + 1)),
            lambda: self.engine.add([99_999]),
            lambda: self.engine.extend(seq, [-1]),
            lambda: self.engine.extend(seq, [1], FeedOutput.HEAD),
            lambda: self.engine.adopt(seq, seq),
            lambda: self.engine.fork(10**9, [None]),
            lambda: GenerateSpec(SamplingParams(top_k=2**31)),
            lambda: GenerateSpec(rng_key=2**70),
            lambda: SamplingParams(temperature=1e39),
        )
        before = self.engine.num_sequences, self.engine.tokens(seq)
        try:
            self.rng.choice(calls)()
        except ValueError:
            self.counts["refused"] += 1
            assert (self.engine.num_sequences, self.engine.tokens(seq)) == before
            return
        raise AssertionError(f"{self.describe()}: a bad call was accepted")

    # ---- stepping

    def step(self) -> None:
        self.counts["steps"] += 1
        if not self.interrupts or self.rng.random() > 0.15:
            self._take(self.engine.step())
            return
        kinds = (KeyboardInterrupt, RuntimeError, MemoryError)
        error = self.rng.choice(kinds)("struck")
        interruption = Interruption(error, int(10 ** self.rng.uniform(0, 3.1)))
        again = self.engine._settle
        if self.rng.random() < 0.3:  # what brings things in order is struck as well

            def struck() -> None:
                self.engine._settle = again  # type: ignore[method-assign]
                with Interruption(KeyboardInterrupt("again"), self.rng.randint(1, 60)):
                    again()

            self.engine._settle = struck  # type: ignore[method-assign]
        try:
            with interruption:
                events = self.engine.step()
        except (KeyboardInterrupt, RuntimeError, MemoryError):
            self.counts["raised"] += 1
            self.raised_at.append(str(interruption.where))
            self.engine.cache.store.check_integrity()
            return
        finally:
            self.engine._settle = again  # type: ignore[method-assign]
        self._take(events)

    def _take(self, events: list[StepEvent]) -> None:
        for event in events:
            tracked = self.live.get(event.seq)
            if tracked is None:
                raise AssertionError(f"{self.describe()}: an event of {event.seq}, which is gone")
            tracked.waiting = None
            if event.error is not None:
                self.counts["failed"] += 1
                assert "out of KV blocks" in event.error, f"{self.describe()}: {event.error}"
                self._forget(event.seq)
            elif event.extended or event.generation is not None:
                assert tracked.pending is not None, f"{self.describe()}: told twice"
                if event.values is not None:
                    tracked.values.append(event.values)
                tracked.history = (*tracked.history, tracked.pending)
                tracked.pending = None
        for seq, tracked in self.live.items():  # copies that only wait start without an event
            if tracked.waiting is not None and self.engine._sequences[seq].started:
                tracked.waiting = None

    def _forget(self, seq: int) -> None:
        """A failed sequence; forks of it that have not started go with it."""
        for child in [s for s, t in self.live.items() if t.waiting == seq]:
            self.engine.release(child)
            del self.live[child]
        self.engine.release(seq)
        del self.live[seq]

    # ---- the laws

    def compare(self, seq: int) -> None:
        tracked = self.live[seq]
        tokens, values, positions = self.alone.of(tracked.history)
        assert self.engine.tokens(seq) == tokens, self.describe()
        assert len(values) == len(tracked.values), self.describe()
        for got, expected in zip(tracked.values, values, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        record = self.engine._sequences[seq]
        if record.handle is not None and record.cached == max(record.segments, default=0):
            mine = held(self.engine, seq)
            if mine is not None and positions is not None:
                assert torch.equal(mine, positions), self.describe()
        self.counts["compared"] += 1

    def drain(self) -> None:
        """Run to the end without interruptions; it must come."""
        for _ in range(20_000):
            if not self.engine.has_work:
                return
            self._take(self.engine.step())
        raise AssertionError(f"{self.describe()}: it does not come to an end")

    def finish(self) -> None:
        """Everything that lives is what it is alone, and nothing is left behind."""
        self.drain()
        for seq in list(self.live):
            self.compare(seq)
        for seq in list(self.live):
            self.engine.release(seq)
        store = self.engine.cache.store
        store.check_integrity()
        assert store.num_sequences() == 0, self.describe()
        assert self.engine.free_blocks == self.engine.num_blocks, self.describe()
        assert store.free_rows() == self.engine.max_seqs, self.describe()
        assert self.engine._generator._monitor.num_open() == 0, self.describe()


def fuzz(seed: int, changes: int, *, interrupts: bool = True) -> dict[str, int]:
    """One engine, ``changes`` random things, then the laws. Returns the counts.

    Sets the threads of torch and of the core to one: the work is too small for more.
    """
    set_threads(1)
    one = EngineFuzz(seed, interrupts=interrupts)
    for i in range(changes):
        one.change()
        if i % 40 == 39:
            one.drain()
            for seq in list(one.live):
                one.compare(seq)
    one.finish()
    return one.counts
