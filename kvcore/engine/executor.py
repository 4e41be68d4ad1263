"""One forward over a plan and all that follows from it: count, evict, deliver, sample."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from kvcore.cache import KVCache
from kvcore.config import EvictionConfig
from kvcore.engine.events import EngineStats, Output, StepEvent
from kvcore.engine.generation import Generator
from kvcore.engine.runner import ModelRunner
from kvcore.engine.sampling import token_logprobs
from kvcore.engine.scheduler import Plan
from kvcore.engine.sequence import Sequence
from kvcore.models.loader import LoadedModel
from kvcore.policies import Policy, elect, evict


class Executor:
    """Carries out plans on one model and one cache."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        eviction: EvictionConfig,
        policy: Policy | None,
        generator: Generator,
        stats: EngineStats,
    ) -> None:
        self._vocab = model.vocab
        self._cache = cache
        self._eviction = eviction
        self._policy = policy
        self._generator = generator
        self._runner = ModelRunner(model, cache)
        self._stats = stats

    def run(self, plan: Plan) -> list[StepEvent]:
        """Feed the planned tokens. Modifies the sequences and the cache; returns what happened.

        If the forward itself raises, the reserved slots are given back and the error passes on.
        """
        store = self._cache.store
        handles = [s.handle for s in plan.seqs if s.handle is not None]
        try:
            batch = self._cache.batch(handles, plan.counts)
            tokens: list[int] = []
            rows: list[int] = []
            wanted: list[int] = []  # output rows of each sequence
            for seq, count in zip(plan.seqs, plan.counts, strict=True):
                base = len(tokens)
                tokens += seq.tokens[seq.cached : seq.cached + count]
                mine = [base + p - seq.cached for p in self._output_positions(seq, count)]
                rows += mine
                wanted.append(len(mine))
            begin = time.perf_counter()
            logits = self._runner.forward(torch.tensor(tokens), batch, torch.tensor(rows))
        except BaseException:
            for seq, count in zip(plan.seqs, plan.counts, strict=True):
                if seq.handle is None:
                    continue
                # What was overwritten, or has added attention, is fed again.
                if store.num_replaced(seq.handle) > 0 or self._cache.stats_plane is not None:
                    self.drop_cache(seq)
                else:
                    store.truncate(seq.handle, count)
            raise
        self._stats.forward_seconds += time.perf_counter() - begin
        if self._cache.replace is not None:
            self._stats.evicted_slots += sum(store.num_replaced(handle) for handle in handles)
        self._stats.decode_steps += 1
        self._note_memory()
        pieces = self._advance(plan)
        outputs = [None] * len(wanted) if logits is None else torch.split(logits, wanted)
        events = self._evict(pieces)
        events += self._finish_feeds(plan, outputs)
        events += self._sample(plan, outputs)
        return events

    def _output_positions(self, seq: Sequence, count: int) -> range:
        """Positions within the next ``count`` tokens whose output somebody wants."""
        end = seq.cached + count
        if not seq.work:
            return range(end - 1, end) if end == len(seq.tokens) else range(0)
        feed = seq.work[0]
        if feed.output is Output.LOGPROBS:
            return range(max(seq.cached, feed.first - 1), end)
        if feed.output is Output.HEAD and end == feed.end:
            return range(end - 1, end)
        return range(0)

    def _advance(self, plan: Plan) -> list[Sequence]:
        """Count the tokens as cached; returns the sequences that completed a piece."""
        done = []
        for seq, count in zip(plan.seqs, plan.counts, strict=True):
            self._stats.recomputed_tokens += max(0, min(count, seq.high_water - seq.cached))
            if seq.advance(count):
                done.append(seq)
        return done

    def _evict(self, candidates: list[Sequence]) -> list[StepEvent]:
        if self._policy is None:
            return []
        due = []
        for seq in candidates:
            assert seq.handle is not None
            if self._is_due(seq, seq.handle):
                due.append(seq)
        if not due:
            return []
        try:
            self._evict_now(due)
            return []
        except ValueError:  # some sequence has keys that are not finite: find out which
            events = []
            for seq in due:
                try:
                    self._evict_now([seq])
                except ValueError as error:
                    events.append(self.fail(seq, f"eviction failed: {error}"))
            return events

    def _is_due(self, seq: Sequence, handle: int) -> bool:
        store, config, shape = self._cache.store, self._eviction, self._cache.shape
        if config.is_steady:  # some lane is full
            return store.max_lane_len(handle) >= min(config.budgets(shape.layers)) + config.protect
        kept = seq.prompt_len if config.protect_prompt else 0
        return store.total_slots(handle) >= (config.trigger + kept) * shape.lanes

    def _evict_now(self, seqs: list[Sequence]) -> None:
        assert self._policy is not None
        handles = [s.handle for s in seqs if s.handle is not None]
        for seq, handle in zip(seqs, handles, strict=True):
            self._note_sequence(seq, handle)
        step = elect if self._eviction.is_steady else evict
        dropped = step(self._policy, self._cache, handles, [s.prompt_len for s in seqs])
        self._stats.evictions += len(seqs)
        self._stats.evicted_slots += dropped

    def _finish_feeds(self, plan: Plan, outputs: Seq[torch.Tensor | None]) -> list[StepEvent]:
        events = []
        for seq, count, output in zip(plan.seqs, plan.counts, outputs, strict=True):
            if seq.error is not None or not seq.work:
                continue
            feed = seq.work[0]
            begin = seq.cached - count
            if output is not None and feed.output is Output.LOGPROBS:
                first = max(begin, feed.first - 1) + 1
                ids = torch.tensor(seq.tokens[first : first + len(output)], dtype=torch.int64)
                feed.values.append(token_logprobs(output, ids, self._vocab))
            elif output is not None and feed.output is Output.HEAD and len(output):
                feed.values.append(output[0].float())
            if seq.cached < feed.end:
                continue
            seq.work.popleft()
            self._stats.prompt_tokens += feed.count
            values = torch.cat(feed.values) if feed.values else None
            events.append(StepEvent(seq.seq_id, extended=True, values=values))
        return events

    def _sample(self, plan: Plan, outputs: Seq[torch.Tensor | None]) -> list[StepEvent]:
        ready = [
            (seq, output)
            for seq, output in zip(plan.seqs, outputs, strict=True)
            if seq.generating is not None
            and seq.error is None
            and not seq.work
            and seq.cached == len(seq.tokens)
            and output is not None
        ]
        if not ready:
            return []
        logits = torch.cat([output for _, output in ready if output is not None])
        events = self._generator.advance([seq for seq, _ in ready], logits)
        self._stats.generated_tokens += sum(e.token is not None for e in events)
        return events

    def fail(self, seq: Sequence, message: str) -> StepEvent:
        """Take a sequence out of service; it keeps its id until it is released."""
        self.drop_cache(seq)
        if seq.generating is not None:
            self._generator.close(seq.generating)
            seq.generating = None
        seq.work.clear()
        seq.error = message
        return StepEvent(seq.seq_id, error=message)

    def drop_cache(self, seq: Sequence) -> None:
        """Give the blocks of a sequence back, if it has any."""
        if seq.handle is not None:
            self._cache.store.release(seq.handle)
            seq.forget_cache()

    def _note_memory(self) -> None:
        self._stats.kv_bytes_peak = max(self._stats.kv_bytes_peak, self._cache.bytes_in_use())

    def _note_sequence(self, seq: Sequence, handle: int) -> None:
        self._stats.kv_bytes_peak_seq = max(
            self._stats.kv_bytes_peak_seq, self._cache.bytes_of(handle)
        )
