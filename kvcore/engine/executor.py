"""One forward over a plan and all that follows from it: draw, count, deliver, evict.

A step goes through two parts. The first computes: the forward, the draws, the values that were
asked for; it writes nothing but the newest slots of the cache, which can be given back. The second
writes what was computed (``commit``) and can be done again from any point. So whatever is raised in
between, Ctrl-C included, every sequence can be brought to where it was or to where it should be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from kvcore.cache import KVCache
from kvcore.engine.commit import Commit, Draw, Entry
from kvcore.engine.events import EngineStats, FeedOutput, StepEvent
from kvcore.engine.generation import Generator
from kvcore.engine.runner import ModelRunner
from kvcore.engine.sampling import token_logprobs, top_logprobs
from kvcore.engine.scheduler import Plan
from kvcore.engine.sequence import Sequence
from kvcore.models.loader import LoadedModel
from kvcore.policies import Evictor


class Executor:
    """Carries out plans on one model and one cache."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        evictor: Evictor,
        generator: Generator,
        stats: EngineStats,
    ) -> None:
        self._vocab = model.vocab
        self._cache = cache
        self._evictor = evictor
        self._generator = generator
        self._runner = ModelRunner(model, cache)
        self._stats = stats
        self._commit: Commit | None = None  # computed and not yet written to its end

    def run(self, plan: Plan, events: list[StepEvent]) -> None:
        """Feed the planned tokens, whose slots are reserved, and add what happened to ``events``.

        Whatever this raises, ``settle`` makes it good.
        """
        self._commit = self._compute(plan, len(events))
        self.finish(events)

    def finish(self, events: list[StepEvent]) -> None:
        """Write what was computed, if something still has to be. May be interrupted and repeated.

        A policy that breaks down is raised when all else is written; the sequences that it should
        have looked at are fed again.
        """
        commit = self._commit
        if commit is None:
            return
        commit.observe(self._generator)
        for entry in commit.entries:
            entry.write(self._generator)
        for entry in commit.entries:
            entry.close(self._generator)
            if entry.feed is not None and entry.not_finite and entry.seq.error is None:
                where = f"position {entry.not_finite - 1}"
                self.fail(entry.seq, f"its keys, values or queries are not finite at {where}")
        failure: Exception | None = None
        if not commit.looked:
            try:
                self._look(commit)
            except Exception as error:
                failure = error
                for entry in self._due(commit):
                    self.drop_cache(entry.seq)
            commit.looked = True
        for entry in commit.entries:
            if entry.draw is not None and entry.draw.token < 0:
                self._leave_pending(entry.seq)
        self._count(commit)
        alive = [entry for entry in commit.entries if entry.seq.error is None]
        events[commit.place :] = [event for entry in alive for event in entry.events]
        self._commit = None
        if failure is not None:
            raise failure

    def settle(self, seq: Sequence) -> None:
        """Make the cache of ``seq`` agree with what is counted as cached. REQUIRES: ``finish``."""
        store = self._cache.store
        if seq.handle is None:
            return
        surplus = store.seq_len(seq.handle) - seq.cached
        if seq.error is not None or surplus < 0:
            self.drop_cache(seq)
        elif surplus > 0 and not self._evictor.take_back(seq.handle, surplus):
            self.drop_cache(seq)  # and it is fed again

    # ---- computing -----------------------------------------------------------------------------

    def _compute(self, plan: Plan, num_events: int) -> Commit:
        handles = [s.handle for s in plan.seqs if s.handle is not None]
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
        self._stats.forward_seconds += time.perf_counter() - begin
        outputs = [None] * len(wanted) if logits is None else torch.split(logits, wanted)
        entries = [
            self._entry(seq, count, output)
            for seq, count, output in zip(plan.seqs, plan.counts, outputs, strict=True)
        ]
        for entry, found in zip(entries, self._cache.not_finite(handles), strict=True):
            entry.not_finite = found
        drawn = self._draw(entries, outputs)
        firing, step_end = torch.zeros((2, drawn), dtype=torch.uint8)
        return Commit(entries, num_events, firing, step_end)

    def _entry(self, seq: Sequence, count: int, output: torch.Tensor | None) -> Entry:
        assert seq.handle is not None
        entry = Entry(
            seq,
            seq.handle,
            cached=seq.cached + count,
            length=len(seq.tokens),
            recomputed=max(0, min(count, seq.high_water - seq.cached)),
            replaced=self._cache.store.num_replaced(seq.handle),
            ends_piece=seq.cached + count >= seq.segments[seq.next_segment],
        )
        if seq.work:
            feed = entry.feed = seq.work[0]
            entry.place = len(feed.values)
            if output is not None and feed.output is FeedOutput.LOGPROBS:
                first = max(seq.cached, feed.first - 1) + 1
                ids = torch.tensor(seq.tokens[first : first + len(output)], dtype=torch.int64)
                entry.values = token_logprobs(output, ids, self._vocab)
            elif output is not None and feed.output is FeedOutput.HEAD and len(output):
                entry.values = output[0].float()
        return entry

    def _draw(self, entries: Seq[Entry], outputs: Seq[torch.Tensor | None]) -> int:
        """Draw for the sequences that have all their tokens; returns how many got one."""
        ready = [
            (entry, output)
            for entry, output in zip(entries, outputs, strict=True)
            if entry.seq.generating is not None
            and entry.feed is None
            and entry.cached == entry.length
            and output is not None
        ]
        if not ready:
            return 0
        jobs = [entry.seq.generating for entry, _ in ready if entry.seq.generating is not None]
        logits = torch.cat([output for _, output in ready])
        # Something that the last layers have hidden: there is nothing to draw from.
        hidden = [entry.not_finite > 0 for entry, _ in ready]
        if any(hidden):  # writing through a mask passes over all logits
            logits[hidden] = torch.nan
        drawn = self._generator.draw(jobs, logits, [entry.seq.tokens for entry, _ in ready])
        columns = (drawn.token.tolist(), drawn.logprob.tolist(), drawn.entropy.tolist())
        top = top_logprobs(logits, [job.spec.top_logprobs for job in jobs], self._vocab)
        for (entry, _), job, *values in zip(ready, jobs, *columns, top, strict=True):
            entry.draw = Draw(job, len(job.tokens), *values)
        return sum(token >= 0 for token in columns[0])

    def _output_positions(self, seq: Sequence, count: int) -> range:
        """Positions within the next ``count`` tokens whose output somebody wants."""
        end = seq.cached + count
        if not seq.work:
            return range(end - 1, end) if end == len(seq.tokens) else range(0)
        feed = seq.work[0]
        if feed.output is FeedOutput.LOGPROBS:
            return range(max(seq.cached, feed.first - 1), end)
        if feed.output is FeedOutput.HEAD and end == feed.end:
            return range(end - 1, end)
        return range(0)

    # ---- writing -------------------------------------------------------------------------------

    def _count(self, commit: Commit) -> None:
        stats = self._stats
        stats.decode_steps += 1
        stats.kv_bytes_peak = max(stats.kv_bytes_peak, self._cache.bytes_in_use())
        for entry in commit.entries:
            stats.recomputed_tokens += entry.recomputed
            if entry.feed_done and entry.feed is not None:
                stats.prompt_tokens += entry.feed.count
            stats.generated_tokens += entry.draw is not None and entry.draw.token >= 0
            stats.evicted_slots += entry.replaced

    def _leave_pending(self, seq: Sequence) -> None:
        """Take the last token out of the cache, for nothing follows it: whoever forks feeds it."""
        while seq.segments and seq.segments[-1] >= len(seq.tokens):
            seq.segments.pop()
        self.drop_cache(seq)

    def _look(self, commit: Commit) -> None:
        """Evict where a piece has filled the cache. Looking again changes nothing."""
        due = self._due(commit)
        if not due:
            return
        try:
            self._evict(due)
        except ValueError:  # some sequence has keys that are not finite: find out which
            for entry in due:
                try:
                    self._evict([entry])
                except ValueError as error:
                    self.fail(entry.seq, f"eviction failed: {error}")

    def _due(self, commit: Commit) -> list[Entry]:
        fed = [
            entry
            for entry in commit.entries
            if entry.ends_piece and entry.seq.error is None and entry.seq.handle == entry.handle
        ]
        handles = [entry.handle for entry in fed]
        due = self._evictor.due(handles, [entry.seq.prompt_len for entry in fed])
        return [entry for entry, is_due in zip(fed, due, strict=True) if is_due]

    def _evict(self, entries: Seq[Entry]) -> None:
        handles = [entry.handle for entry in entries]
        largest = max(self._cache.bytes_of(handle) for handle in handles)
        dropped = self._evictor.settle(handles, [entry.seq.prompt_len for entry in entries])
        self._stats.kv_bytes_peak_seq = max(self._stats.kv_bytes_peak_seq, largest)
        self._stats.evictions += len(entries)
        self._stats.evicted_slots += dropped

    def fail(self, seq: Sequence, message: str) -> None:
        """Take a sequence out of service; it keeps its id until it is released."""
        seq.error = message
        if seq.generating is not None:
            self._generator.close(seq.generating)
            seq.generating = None
        seq.work.clear()
        self.drop_cache(seq)

    def drop_cache(self, seq: Sequence) -> None:
        """Give the blocks of a sequence back, if it has any."""
        if seq.handle is not None:
            self._cache.store.release(seq.handle)
            seq.forget_cache()
