"""Continuous batching over one model: add, fork, extend, adopt, release, step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from kvcore.cache import KVCache
from kvcore.config import DetectorConfig, EngineConfig, EvictionConfig
from kvcore.engine.events import EngineStats, FeedOutput, GenerateSpec, StepEvent
from kvcore.engine.executor import Executor
from kvcore.engine.front import FrontDoor
from kvcore.engine.generation import Generator
from kvcore.engine.scheduler import Scheduler
from kvcore.engine.sequence import Feed, Sequence
from kvcore.engine.sizing import make_cache
from kvcore.models.loader import LoadedModel
from kvcore.policies import Evictor, make_policy

_log = logging.getLogger(__name__)

# What a sequence takes over from a child that it adopts.
_ADOPTED = (
    *("tokens", "prompt_len", "handle", "cached"),
    *("high_water", "segments", "next_segment", "longest_piece"),
)


class Engine(FrontDoor):
    """Decodes many sequences of one model over one bounded cache.

    A sequence is named by the int that ``add`` or ``fork`` returned; ids are never reused. Results
    do not depend on who shares the batch (up to the rounding of the model's matrix products). Not
    thread-safe.

    Args:
        model: from ``load_model``; a token-head model (PRM) only takes ``add`` without generation,
            ``fork`` and ``extend``.
        config: size of the cache and of a forward.
        eviction: what a lane keeps; the default keeps everything.
        detector: used by generations that ask for it (``GenerateSpec.detect``).
    Raises:
        ValueError: a setting that does not fit the model.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        *,
        eviction: EvictionConfig | None = None,
        detector: DetectorConfig | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.model = model
        self.eviction = eviction or EvictionConfig()
        self.stats = EngineStats()
        self.context_len = config.context_len or model.context_len
        if self.context_len > model.context_len:
            raise ValueError(
                f"context_len: expected at most the model's {model.context_len}, "
                f"got {self.context_len}"
            )
        policy = make_policy(self.eviction)
        self._cache = make_cache(model, config, self.context_len, policy)
        evictor = Evictor(policy, self._cache)
        self._scheduler = Scheduler(
            self._cache, evictor, max_batched_tokens=config.max_batched_tokens
        )
        self._detector = detector
        self._generator = Generator(model, detector, self.context_len)
        self._executor = Executor(model, self._cache, evictor, self._generator, self.stats)
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0
        self._events: list[StepEvent] = []  # not yet delivered
        self._settled = True  # no call was cut short
        blocks = self._cache.blocks
        _log.info("engine for %s: %d KV blocks, %s", model.name, blocks, self.eviction)

    # ---- the six verbs -------------------------------------------------------------------------

    def add(self, tokens: Seq[int], generate: GenerateSpec | None = None) -> int:
        """Start a sequence. Without ``generate`` it is prefilled and then waits (``extended``
        event).

        Raises:
            ValueError: no tokens, an id outside the vocabulary, or more tokens than the context.
        """
        ids = self._check_tokens(tokens, 0)
        if generate is not None:
            self._check_generates(generate)
        with self._changing():
            seq = Sequence(self._next_id, (self._next_id, self._next_id), ids, len(ids))
            if generate is None:
                self._queue_feed(seq, 0, FeedOutput.NONE)
            else:
                seq.generating = self._generator.open(generate)
            self._register(seq)
        return seq.seq_id

    def fork(self, seq: int, specs: Seq[GenerateSpec | None]) -> list[int]:
        """Continue ``seq`` once per spec, independently; None makes a copy that waits.

        Children start when the parent is idle and blocks allow. The parent must not be extended,
        adopted into or released before they have.
        Raises:
            ValueError: ``seq`` generates, has failed, or has no room left in the context.
        """
        parent = self._get(seq)
        self._check_not_generating(parent)
        for spec in specs:
            if spec is not None:
                self._check_generates(spec)
                if len(parent.tokens) >= self.context_len:
                    raise ValueError(f"seq: {seq} fills the context of {self.context_len} tokens")
        children = []
        with self._changing():
            for spec in specs:
                child = Sequence(
                    self._next_id,
                    (parent.order[0], self._next_id),
                    list(parent.tokens),
                    parent.prompt_len,
                    parent=parent,
                    parent_version=parent.version,
                    started=False,
                )
                if spec is not None:
                    child.generating = self._generator.open(spec)
                self._register(child)
                parent.waiting_children += 1
                children.append(child.seq_id)
        return children

    def extend(self, seq: int, tokens: Seq[int], output: FeedOutput = FeedOutput.NONE) -> None:
        """Append given tokens: one piece, one look at eviction. ``extended`` comes when they are
        in.

        Raises:
            ValueError: ``seq`` generates or has failed, children have not started, no tokens, too
                many for the context, or an output that the model does not have.
        """
        target = self._get(seq)
        self._check_not_generating(target)
        self._check_no_waiting_children(target)
        if (output is FeedOutput.HEAD) != self.model.has_head and output is not FeedOutput.NONE:
            raise ValueError(f"output: {output.value!r} is not what model {self.model.name!r} has")
        ids = self._check_tokens(tokens, len(target.tokens))
        with self._changing():
            first = len(target.tokens)
            target.tokens.extend(ids)
            target.version += 1
            self._queue_feed(target, first, output)

    def adopt(self, parent: int, child: int) -> None:
        """``parent`` becomes what ``child`` is, tokens and cache; the child's id dies.

        Raises:
            ValueError: one of them is not idle, or they are the same.
        """
        if parent == child:
            raise ValueError(f"child: expected another sequence than parent, got {child}")
        old, new = self._get(parent), self._get(child)
        for seq in (old, new):
            self._check_not_generating(seq)
            self._check_no_waiting_children(seq)
            if seq.work:
                raise ValueError(f"seq: {seq.seq_id} still has tokens to take in")
        if not new.started:
            raise ValueError(f"child: {child} has not started")
        with self._changing():
            before = new.version
            left = old.handle
            changed = {name: getattr(new, name) for name in _ADOPTED}
            vars(old).update(changed, parent=None, version=old.version + 1)
            new.handle = None
            # What was forked from the child can now be forked from the parent again.
            for seq in self._sequences.values():
                if seq.parent is new:
                    seq.parent = old if seq.parent_version == before else None
                    seq.parent_version = old.version
            self._forget(child)
            if left is not None:
                self._cache.store.release(left)

    def release(self, seq: int) -> None:
        """Forget a sequence in any state; a generation is aborted without an event.

        Raises:
            ValueError: unknown id, or children have not started.
        """
        target = self._get(seq)
        self._check_no_waiting_children(target)
        with self._changing():
            self._forget(seq)
            if target.parent is not None and not target.started:
                target.parent.waiting_children -= 1
            if target.generating is not None:
                self._generator.close(target.generating)
            self._executor.drop_cache(target)

    def step(self) -> list[StepEvent]:
        """One forward over what fits, then sample, detect and evict. [] when there is no work.

        A sequence that fails gets an ``error`` event and keeps its id; the others go on. When this
        raises (the model or a policy breaks down, Ctrl-C), every sequence is as it was or has
        advanced, no event is lost, and the next call goes on.
        """
        begin = time.perf_counter()
        with self._changing():
            plan = self._scheduler.plan(self._sequences.values())
            self.stats.preemptions += plan.preempted
            if plan.preempted:
                _log.info("out of KV blocks: %d sequences preempted", plan.preempted)
            for seq, message in plan.failed:
                self._executor.fail(seq, message)
            if plan.seqs:
                self._executor.run(plan, self._events)
            elif not (plan.failed or plan.started or self._events):
                self._fail_stuck()
            self._tell_errors()
        self.stats.total_seconds += time.perf_counter() - begin
        # In one line: what cuts the call short before it loses no event.
        return [*map(self._events.pop, [0] * len(self._events))]

    # ---- queries -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to tell."""
        return bool(self._events) or any(
            seq.busy or (seq.error is not None and not seq.error_told)
            for seq in self._sequences.values()
        )

    @property
    def detector(self) -> DetectorConfig | None:
        """May be set while nothing generates. Raises ValueError otherwise."""
        return self._detector

    @detector.setter
    def detector(self, detector: DetectorConfig | None) -> None:
        if any(seq.generating is not None for seq in self._sequences.values()):
            raise ValueError("detector: expected an engine on which nothing generates")
        self._generator.set_detector(detector)
        self._detector = detector

    @property
    def num_sequences(self) -> int:
        """Sequences that were not released, failed ones included."""
        return len(self._sequences)

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds (a gauge; see ``num_blocks``)."""
        return self._cache.store.free_blocks()

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, 16 slots of one lane each."""
        return self._cache.blocks

    @property
    def max_seqs(self) -> int:
        """Sequences that can hold cache at once; others wait."""
        return int(self._cache.seq_len.shape[0])

    @property
    def cache(self) -> KVCache:
        """The cache itself, for inspection; its store must not be changed from outside."""
        return self._cache

    def tokens(self, seq: int) -> list[int]:
        """All tokens of a sequence: prompt and everything after."""
        return list(self._get(seq).tokens)

    def cache_len(self, seq: int) -> int:
        """Slots of the longest lane; 0 while the sequence holds no cache."""
        handle = self._get(seq).handle
        return 0 if handle is None else self._cache.store.max_lane_len(handle)

    def kv_bytes(self, seq: int) -> int:
        """Bytes of the blocks that a sequence holds, shared ones included."""
        handle = self._get(seq).handle
        return 0 if handle is None else self._cache.bytes_of(handle)

    def store_handle(self, seq: int) -> int | None:
        """Handle of a resident sequence in ``cache.store``, for inspection."""
        return self._get(seq).handle

    def text(self, tokens: Seq[int]) -> bytes:
        """Bytes that ids stand for, special tokens excluded."""
        return self._generator.text(tokens)

    # ---- helpers -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Everything that changes the engine happens inside. If it is cut short, what it left is
        brought in order at once or, if that fails as well, before the next change.
        """
        self._settle()
        self._settled = False
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self._settle()
            raise
        self._settled = True

    def _settle(self) -> None:
        """Bring in order what an exception left: each sequence as before the call, or after it."""
        if self._settled:
            return
        store, sequences = self._cache.store, list(self._sequences.values())
        for seq in sequences:
            if seq.handle is not None and not store.is_live(seq.handle):
                seq.forget_cache()
        self._executor.finish(self._events)
        for seq in sequences:
            self._executor.settle(seq)
            seq.waiting_children = 0
        for seq in sequences:
            if seq.parent is not None and not seq.started:
                seq.parent.waiting_children += 1
        owned = {seq.handle for seq in sequences}
        for handle in store.sequences():
            if handle not in owned:
                store.release(handle)
        self._settled = True

    def _fail_stuck(self) -> None:
        """A sequence that nothing could be planned for must not keep others waiting."""
        busy = [seq for seq in self._sequences.values() if seq.busy]
        if busy:
            self._executor.fail(min(busy, key=lambda seq: seq.order), "internal: it cannot go on")

    def _tell_errors(self) -> None:
        for seq in self._sequences.values():
            if seq.error is not None and not seq.error_told:
                self._events.append(StepEvent(seq.seq_id, error=seq.error))
                seq.error_told = True

    def _register(self, seq: Sequence) -> None:
        self._sequences[seq.seq_id] = seq
        self._next_id += 1

    def _forget(self, seq: int) -> None:
        """The id dies, and what was still to be told of it."""
        del self._sequences[seq]
        self._events = [event for event in self._events if event.seq != seq]

    def _get(self, seq: int) -> Sequence:
        try:
            return self._sequences[seq]
        except KeyError:
            raise ValueError(f"seq: expected a live sequence, got {seq!r}") from None

    def _queue_feed(self, seq: Sequence, first: int, output: FeedOutput) -> None:
        end = len(seq.tokens) - (0 if self.model.has_head else 1)
        if end == 0:  # a prompt of one token: it stays pending
            self._events.append(StepEvent(seq.seq_id, extended=True))
        else:
            seq.work.append(Feed(first, len(seq.tokens) - first, end, output))

    def _check_tokens(self, tokens: Seq[int], present: int) -> list[int]:
        ids = [int(t) for t in tokens]
        if not ids:
            raise ValueError("tokens: expected at least one token, got none")
        rows = self.model.config.vocab_size
        for token in ids:
            if not 0 <= token < rows:
                raise ValueError(f"tokens: expected ids in [0, {rows}), got {token}")
        if present + len(ids) > self.context_len:
            raise ValueError(
                f"tokens: expected at most {self.context_len - present} more in a context of "
                f"{self.context_len}, got {len(ids)}"
            )
        return ids

    def _check_generates(self, spec: GenerateSpec) -> None:
        self._generator.check(spec)
        if self.model.has_head:
            raise ValueError(f"generate: model {self.model.name!r} scores and does not generate")

    def _check_not_generating(self, seq: Sequence) -> None:
        if seq.error is not None:
            raise ValueError(f"seq: {seq.seq_id} has failed: {seq.error}")
        if seq.generating is not None:
            raise ValueError(f"seq: {seq.seq_id} is generating")

    def _check_no_waiting_children(self, seq: Sequence) -> None:
        if seq.waiting_children:
            raise ValueError(f"seq: {seq.seq_id} has {seq.waiting_children} forks not yet started")
