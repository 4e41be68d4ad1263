"""Which sequences run in the next forward, and who makes room when blocks run out.

Oldest first. A sequence that does not fit pushes out younger ones, never an older one that runs:
they lose their cache and get it back later by forking again, or by feeding the same pieces again.
The oldest can therefore always go on, and nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcore.cache import KVCache
from kvcore.engine.sequence import Sequence
from kvcore.ops import blocks_for
from kvcore.policies import Evictor


@dataclass
class Plan:
    """The next forward: ``counts[i]`` tokens of ``seqs[i]``; ``failed`` can never fit."""

    seqs: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    preempted: int = 0
    started: int = 0  # forks taken off their parents, or given back to theirs


def _by_urgency(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Oldest first. One that only gets its cache back for forks that wait is as old as the first of
    these: else it would take the place of an older one, and give it back before they start.
    """
    everyone = list(sequences)
    first_fork: dict[Sequence, tuple[int, int]] = {}
    for seq in everyone:
        if not seq.started and seq.parent is not None:
            known = first_fork.get(seq.parent, seq.order)
            first_fork[seq.parent] = min(known, seq.order)

    def urgency(seq: Sequence) -> tuple[tuple[int, int], bool]:
        for_forks = seq.restoring and not seq.feeds
        return (first_fork[seq], False) if for_forks else (seq.order, True)

    return sorted(everyone, key=urgency)


class Scheduler:
    """Plans forwards over one cache.

    Args:
        evictor: where sequences evict, forks copy all live blocks instead of sharing full ones, and
            pieces are replayed one by one.
        max_batched_tokens: most tokens of one forward.
    """

    def __init__(self, cache: KVCache, evictor: Evictor, *, max_batched_tokens: int) -> None:
        self._store = cache.store
        self._blocks = cache.blocks
        self._lanes = cache.shape.lanes
        self._evictor = evictor
        self._max_tokens = max_batched_tokens

    def plan(self, sequences: Iterable[Sequence]) -> Plan:
        """Choose sequences, make them resident and reserve their slots in the cache."""
        everyone = _by_urgency(sequences)
        busy = [s for s in everyone if s.busy]
        plan = Plan()
        # Every sequence that decodes gets its token; long prompts use what is left.
        spare = max(1, self._max_tokens - sum(not s.work for s in busy))
        total = 0
        newcomers = True  # one that does not fit keeps later ones from overtaking it
        for seq in busy:
            if total >= self._max_tokens:
                break
            if not seq.started and not self._start(seq, plan):
                continue
            if not (seq.feeds or seq.restoring) or (seq.work and spare <= 0):
                continue
            resident = seq.resident
            if not resident and not newcomers:
                continue
            limit = min(max(spare, 1), self._max_tokens - total)
            count = self._admit(seq, limit, everyone, plan)
            if count == 0:
                newcomers = newcomers and (resident or not seq.busy)
                continue
            plan.seqs.append(seq)
            plan.counts.append(count)
            total += count
            spare -= count if count > 1 else 0
        return plan

    def _start(self, seq: Sequence, plan: Plan) -> bool:
        """Fork ``seq`` off its parent if that is idle; a copy that only waits takes its row now."""
        assert seq.parent is not None
        if seq.parent.busy:
            return False
        seq.start_fork()
        plan.started += 1
        if not seq.feeds:
            self._make_resident(seq)
        return True

    def _admit(self, seq: Sequence, limit: int, everyone: list[Sequence], plan: Plan) -> int:
        """Tokens of ``seq`` to feed now, slots reserved; 0 if it has to wait or has failed.

        A sequence that has to wait holds neither a row nor a block unless it did before.
        """
        newcomer = not seq.resident
        while True:
            count = 0
            missing = self._make_resident(seq)
            if missing == 0 and not (seq.feeds or seq.restoring):
                plan.started += 1  # a fork of its own parent gave all that its forks wait for
                return 0
            if missing == 0 and newcomer and plan.seqs:
                missing = self._missing_to_stay(seq)
            if missing == 0:
                count = min(seq.open_segment(self._evictor.evicts) - seq.cached, limit)
                missing = self._reserve(seq, count)
            if missing == 0:
                return count
            if newcomer:
                self._withdraw(seq)
                if plan.seqs:
                    return 0  # nobody loses work to a newcomer while others run
            victim = self._victim(seq, everyone, plan)
            if victim is not None:
                self._withdraw(victim)
                plan.preempted += 1
                continue
            if not plan.seqs:  # nothing else holds a block: waiting would not help
                pool = f"the pool has {self._blocks} blocks and this sequence lacks {missing} more"
                plan.failed.append((seq, f"out of KV blocks: {pool}; raise kv_bytes or kv_blocks"))
            return 0

    def _make_resident(self, seq: Sequence) -> int:
        """Give ``seq`` a row of the cache. Returns 0, or how many blocks are missing (1 for a
        row).
        """
        if seq.handle is not None:
            return 0
        if self._store.free_rows() == 0:
            return 1
        parent = seq.forkable_parent()
        if parent is None or parent.handle is None:
            seq.handle = self._store.create()
            return 0
        missing = self._store.blocks_to_fork(parent.handle, 1, self._evictor.evicts)
        missing -= self._store.free_blocks()
        if missing > 0:
            return missing
        [seq.handle] = self._store.fork(parent.handle, 1, self._evictor.evicts)
        seq.cached, seq.next_segment = seq.fork_cached, seq.fork_segments
        return 0

    def _missing_to_stay(self, seq: Sequence) -> int:
        """Blocks that are missing for all tokens that ``seq`` has to take in and one block more a
        lane: with less it would be pushed out again at once. 0 if none.
        """
        assert seq.handle is not None
        slots = self._evictor.most_slots(seq.known_end, seq.prompt_len, seq.longest_known_piece)
        wanted = self._lanes * (blocks_for(slots) + 1)
        wanted -= self._store.num_blocks(seq.handle)
        return max(0, wanted - self._store.free_blocks())

    def _reserve(self, seq: Sequence, count: int) -> int:
        """Slots for ``count`` more tokens of the open piece. Returns 0, or how many blocks are
        missing.
        """
        assert seq.handle is not None
        self._evictor.begin(seq.handle, count, seq.open_piece_len())
        missing = self._store.blocks_to_extend([seq.handle], [count]) - self._store.free_blocks()
        if missing > 0:
            return missing
        self._store.extend([seq.handle], [count])
        return 0

    def _victim(self, seq: Sequence, everyone: list[Sequence], plan: Plan) -> Sequence | None:
        """Whose cache to drop for ``seq``: the youngest that runs; an idle one only when nothing
        runs, its own parent last. None means wait.
        """
        place = everyone.index(seq)
        younger = [s for s in everyone[place + 1 :] if s.handle is not None and s.busy]
        if younger:
            return younger[-1]
        if plan.seqs:
            return None
        idle = [s for s in everyone if s.handle is not None and s is not seq and not s.busy]
        strangers = [s for s in idle if s is not seq.parent]
        candidates = strangers or idle
        return candidates[-1] if candidates else None

    def _withdraw(self, seq: Sequence) -> None:
        """Take row and blocks from ``seq``, if it has any."""
        if seq.handle is not None:
            self._store.release(seq.handle)
            seq.forget_cache()
