"""What a forward has decided, written into the sequences so that it can be interrupted anywhere.

Everything that can fail is computed before (``Executor``). What is left are assignments, and every
one of them gives the same when it is done again: a commit that an exception cut short, Ctrl-C
included, is simply run once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvcore.engine.events import Finish, Generation, StepEvent
from kvcore.engine.generation import Generator
from kvcore.engine.sequence import Feed, Generating, Sequence


@dataclass
class Draw:
    """The next token of a generation.

    Attributes:
        job: the generation.
        place: tokens that it had before.
        token: -1 without a finite distribution.
        top: the most likely ids and their log-probabilities, as many as were asked for.
        finish: why the generation ends here, if it does; ``result`` is what it came to.
    """

    job: Generating
    place: int
    token: int
    logprob: float
    entropy: float
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    result: Generation | None = None


@dataclass
class Entry:
    """One sequence of a forward.

    Attributes:
        handle: of the cache that was fed; a sequence that has lost it since keeps its tokens only.
        cached: tokens cached after it.
        length: of ``seq.tokens`` before.
        recomputed: tokens of it that had been cached before.
        replaced: slots that it overwrote.
        ends_piece: a piece is complete: time for a look at eviction.
        feed: what it was feeding; ``place`` values were there before, ``values`` come now.
        not_finite: 1 + the first position with a key, value or query that is not finite, or 0.
    """

    seq: Sequence
    handle: int
    cached: int
    length: int
    recomputed: int
    replaced: int
    ends_piece: bool
    feed: Feed | None = None
    place: int = 0
    values: Tensor | None = None
    draw: Draw | None = None
    not_finite: int = 0
    events: list[StepEvent] = field(default_factory=list)

    @property
    def feed_done(self) -> bool:
        return self.feed is not None and self.cached >= self.feed.end

    def write(self, generator: Generator) -> None:
        """Book tokens and values, and decide on ``events``. May be repeated."""
        seq = self.seq
        if seq.error is not None:
            return
        seq.high_water = max(seq.high_water, self.cached)
        if seq.handle == self.handle:
            seq.advance_to(self.cached)
        if self.feed is not None:
            self._write_feed(self.feed)
        elif self.draw is not None:
            self._write_draw(self.draw, generator)

    def _write_feed(self, feed: Feed) -> None:
        if self.values is not None and self.seq.handle == self.handle:
            feed.values[self.place :] = [self.values]
        if self.feed_done:
            values = torch.cat(feed.values) if feed.values else None
            self.events = [StepEvent(self.seq.seq_id, extended=True, values=values)]

    def _write_draw(self, draw: Draw, generator: Generator) -> None:
        seq, job = self.seq, draw.job
        if draw.token >= 0:
            seq.tokens[self.length :] = [draw.token]
            job.tokens[draw.place :] = [draw.token]
            job.logprobs[draw.place :] = [draw.logprob]
        if draw.finish is not None and draw.result is None:
            draw.result = generator.result(job, draw.finish)
        event = StepEvent(seq.seq_id, generation=draw.result)
        if draw.token >= 0:
            event = replace(event, token=draw.token, logprob=draw.logprob, top_logprobs=draw.top)
        self.events = [event]

    def close(self, generator: Generator) -> None:
        """Take off the sequence what is done. May be repeated."""
        seq = self.seq
        if self.feed_done and seq.work and seq.work[0] is self.feed:
            seq.work.popleft()
        if self.draw is not None and self.draw.result is not None:
            if seq.generating is self.draw.job:
                seq.generating = None
            generator.close(self.draw.job)


@dataclass
class Commit:
    """A forward's entries, and how far they have been written.

    Attributes:
        place: events that were undelivered before.
        firing, step_end: u8 [tokens drawn], what the detector says of them.
        observed: the detector has seen them, and it is known who stops.
        looked: eviction has been looked at.
    """

    entries: list[Entry]
    place: int
    firing: Tensor
    step_end: Tensor
    observed: bool = False
    looked: bool = False

    def observe(self, generator: Generator) -> None:
        """Show the drawn tokens to the detector and find out who stops. May be repeated."""
        if self.observed:
            return
        drawn = [(entry, entry.draw) for entry in self.entries if entry.draw is not None]
        valid = [(entry, draw) for entry, draw in drawn if draw.token >= 0]
        generator.push(
            [draw.job for _, draw in valid],
            [draw.place for _, draw in valid],
            [draw.token for _, draw in valid],
            [draw.entropy for _, draw in valid],
            self.firing,
            self.step_end,
        )
        verdicts = zip(self.firing.tolist(), self.step_end.tolist(), strict=True)
        for entry, draw in drawn:
            fired, ended = next(verdicts) if draw.token >= 0 else (0, 0)
            count, length = draw.place + 1, entry.length + 1
            draw.finish = generator.finish(draw.job, draw.token, count, length, fired, ended)
        self.observed = True
