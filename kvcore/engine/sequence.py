"""One sequence of an engine: its tokens, its place in the cache, and the work that is left to do.

Invariants:
    * ``cached`` tokens are in the cache, in order; the rest of ``tokens`` is pending. Of a model
      that generates, the last token of an idle sequence is pending: whoever continues feeds it, so
      every fork gets its own next-token distribution without keeping logits.
    * ``segments`` are the ends of the pieces in which tokens went in; eviction is looked at after
      each piece. Feeding the same pieces again rebuilds the same cache: that is how a preempted
      sequence comes back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from kvcore.engine.events import FeedOutput, GenerateSpec


@dataclass(eq=False)
class Feed:
    """``count`` given tokens from index ``first`` on; ``end`` tokens are cached when it is done."""

    first: int
    count: int
    end: int
    output: FeedOutput
    values: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Generating:
    """A generation in progress."""

    spec: GenerateSpec
    monitor: int  # handle in the engine's CandidateMonitor
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Sequence:
    """See the module's text.

    Attributes:
        order: (root's id, own id): age, for admission and preemption.
        handle: of the cache's store; None while not resident.
        high_water: most tokens ever cached; feeding below it is recomputation.
        longest_piece: tokens of the longest of ``segments``.
        parent: whom to fork from; ``parent_version`` tells whether it still is what it was.
        started: the fork has happened (always True without a parent).
        fork_cached, fork_segments: state of the parent at the fork.
        version: counts extends and adoptions.
        waiting_children: forks of this sequence that have not started.
        work: feeds in order; ``generating`` comes after them.
        error: why it was taken out of service; ``error_told`` once its event was made.
    """

    seq_id: int
    order: tuple[int, int]
    tokens: list[int]
    prompt_len: int
    handle: int | None = None
    cached: int = 0
    high_water: int = 0
    segments: list[int] = field(default_factory=list)
    next_segment: int = 0
    longest_piece: int = 0
    parent: Sequence | None = None
    parent_version: int = 0
    started: bool = True
    fork_cached: int = 0
    fork_segments: int = 0
    version: int = 0
    waiting_children: int = 0
    work: deque[Feed] = field(default_factory=deque)
    generating: Generating | None = None
    error: str | None = None
    error_told: bool = False

    @property
    def busy(self) -> bool:
        """Something is left to do: feed, generate, fork, or get a lost cache back for a fork."""
        if self.error is not None:
            return False
        return bool(self.feeds or not self.started or self.restoring)

    @property
    def feeds(self) -> bool:
        """Tokens are pending that somebody waits for."""
        return bool(self.work or self.generating)

    @property
    def restoring(self) -> bool:
        """Lost its cache while children wait to fork from it."""
        return bool(self.waiting_children and self.segments and self.cached < self.segments[-1])

    @property
    def resident(self) -> bool:
        """The cache holds some of its tokens."""
        return self.handle is not None and self.cached > 0

    @property
    def known_end(self) -> int:
        """Tokens that the cache holds once all that is known now has been fed."""
        if self.work:
            return self.work[-1].end
        return len(self.tokens) if self.generating else max(self.segments, default=0)

    @property
    def longest_known_piece(self) -> int:
        """Tokens of the longest piece that was fed or waits."""
        longest, begin = self.longest_piece, max(self.segments, default=0)
        for feed in self.work:
            longest, begin = max(longest, feed.end - begin), feed.end
        return max(longest, self.known_end - begin)

    def start_fork(self) -> None:
        """Take over the parent's pieces. REQUIRES: the parent is not busy."""
        parent = self.parent
        assert parent is not None and not parent.busy
        self.segments = list(parent.segments)
        self.longest_piece = parent.longest_piece
        self.fork_cached = self.segments[-1] if self.segments else 0
        self.fork_segments = len(self.segments)
        self.high_water = self.fork_cached
        self.started = True
        parent.waiting_children -= 1

    def forkable_parent(self) -> Sequence | None:
        """The resident parent whose cache still is what this sequence forked from, if any."""
        parent = self.parent
        if parent is None or parent.handle is None or parent.busy:
            return None
        same = parent.version == self.parent_version and parent.cached == self.fork_cached
        return parent if same else None

    def open_segment(self, evicts: bool) -> int:
        """End of the piece to feed now. After a preemption the old pieces come first; without
        eviction their borders do not matter and they are fed as one.
        """
        if self.next_segment < len(self.segments):
            return self.segments[self.next_segment] if evicts else self.segments[-1]
        begin = self.segments[-1] if self.segments else 0
        end = self.work[0].end if self.work else len(self.tokens)
        self.longest_piece = max(self.longest_piece, end - begin)
        self.segments.append(end)
        return end

    def open_piece_len(self) -> int:
        """Tokens of the piece that ``open_segment`` named, those already cached included."""
        begin = self.segments[self.next_segment - 1] if self.next_segment else 0
        return self.segments[self.next_segment] - begin

    def advance_to(self, cached: int) -> None:
        """Count ``cached`` tokens as cached; a second call changes nothing."""
        self.cached = cached
        self.high_water = max(self.high_water, cached)
        while self.next_segment < len(self.segments):
            if self.segments[self.next_segment] > cached:
                break
            self.next_segment += 1

    def forget_cache(self) -> None:
        """The cache is gone: everything has to be fed again."""
        self.handle = None
        self.cached = 0
        self.next_segment = 0
        for feed in self.work:
            feed.values.clear()
