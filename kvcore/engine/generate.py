"""Prompts to texts on one engine: what ``Engine.generate`` and ``Engine.stream`` do."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcore.config import INT32_MAX, INT64_MAX, SamplingParams, require, require_bool, require_int
from kvcore.engine.events import Finish, GenerateSpec, StepEvent
from kvcore.engine.outputs import CacheUse, Output
from kvcore.engine.text_stream import TextStream
from kvcore.native import _C
from kvcore.ops import BLOCK_SLOTS

if TYPE_CHECKING:
    from kvcore.engine.engine import Engine

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """Checked settings of one call; see ``Engine.generate``."""

    sampling: SamplingParams
    n: int
    stops: tuple[str, ...]
    logprobs: int | None
    seed: int
    detect: bool

    @classmethod
    def of(
        cls,
        engine: Engine,
        sampling: SamplingParams | str | None,
        *,
        n: int,
        stop: str | Sequence[str] | None,
        logprobs: int | None,
        seed: int,
        detect: bool,
    ) -> Request:
        """Raises ValueError naming the argument, or a model that does not generate."""
        if engine.model.has_head:
            raise ValueError(
                f"model: expected one that generates, got the reward model {engine.model.name!r}"
            )
        if sampling is None:
            sampling = SamplingParams()
        elif isinstance(sampling, str):
            require(sampling == "model", "sampling", "SamplingParams or 'model'", sampling)
            own = engine.model.sampling
            if own is None:
                raise ValueError(
                    f"sampling: expected SamplingParams: model {engine.model.name!r} has no "
                    "generation_config.json that says how to sample it"
                )
            sampling = own
        require(isinstance(sampling, SamplingParams), "sampling", "SamplingParams", sampling)
        require_int(n, "n", 1, INT32_MAX)
        stops = (stop,) if isinstance(stop, str) else stop if stop is not None else ()
        require(isinstance(stops, Sequence), "stop", "a text or a list of texts", stop)
        for text in stops:
            require(isinstance(text, str) and text != "", "stop", "texts that are not empty", text)
        if logprobs is not None:
            require_int(logprobs, "logprobs", 0, INT32_MAX)
        require_int(seed, "seed", 0, INT64_MAX)
        require_bool(detect, "detect")
        has_detector = not detect or engine.detector is not None
        require(has_detector, "detect", "False: this engine has no detector", detect)
        return cls(sampling, n, tuple(stops), logprobs, seed, detect)

    def spec(self, prompt: Sequence[int], sample: int) -> GenerateSpec:
        """How to continue ``prompt`` for the ``sample``-th time in this call.

        The random numbers are a function of the seed, the prompt and ``sample``, and so the same
        wherever among which others the prompt stands.
        """
        data = b"".join(token.to_bytes(8, "little") for token in prompt)
        digest = hashlib.blake2b(data, digest_size=8).digest()
        key = _C.hash_key(self.seed, int.from_bytes(digest, "little"))
        return GenerateSpec(
            self.sampling,
            rng_key=_C.hash_key(key, sample),
            detect=self.detect,
            top_logprobs=self.logprobs or 0,
        )


@dataclass(eq=False)
class _Run:
    """One continuation: ``events`` is all that has been told of it."""

    prompt: list[int]
    prompt_index: int
    index: int
    spec: GenerateSpec
    live: TextStream
    seq: int | None = None
    events: list[StepEvent] = field(default_factory=list)
    output: Output | None = None


class Batch:
    """Continues prompts on an engine that has no other work.

    Events are kept before anything is made of them, and outputs are made of events alone: an
    exception at any point, Ctrl-C included, loses nothing that the engine has told.
    """

    def __init__(self, engine: Engine, request: Request, prompts: Sequence[list[int]]) -> None:
        check_idle(engine)
        self._engine = engine
        self._request = request
        self._runs: list[_Run] = []
        told: Counter[tuple[int, ...]] = Counter()
        for place, ids in enumerate(prompts):
            for index in range(request.n):
                spec = request.spec(ids, told[tuple(ids)])
                told[tuple(ids)] += 1
                self._runs.append(_Run(ids, place, index, spec, TextStream(request.stops)))
        self._waiting = deque(self._runs)
        self._of_seq: dict[int, _Run] = {}
        self._parent: int | None = None  # whose forks, the runs below, have not all begun
        self._forks: list[_Run] = []
        self._adding: int | None = None  # the first id of sequences that are being made
        self._pending: deque[StepEvent] = deque()

    @property
    def unfinished(self) -> int:
        """Continuations without an output."""
        return sum(run.output is None for run in self._runs)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(run.events) for run in self._runs)

    def advance(self) -> list[str]:
        """One step of the engine. Returns the texts that it has made certain, in order of events.

        Raises:
            RuntimeError: somebody else has stepped the engine and taken its events.
        """
        self._admit()
        if not self._engine.has_work:
            raise RuntimeError("engine: its events were taken by somebody else (Engine.step)")
        self._pending.extend(self._engine.step())
        return self._take()

    def outputs(self) -> list[Output]:
        """All outputs in order of prompts; those that are not finished end as "abort"."""
        engine = self._engine
        engine._settle()  # what an interrupted step has left
        self._pending.extend(engine._events)
        engine._events = []
        self._take()
        for run in self._runs:
            if run.output is None:
                run.output = self._output(run, "abort")
        return [run.output for run in self._runs if run.output is not None]

    def close(self) -> KeyboardInterrupt | None:
        """Release all sequences. Goes on when it is interrupted once, and returns that."""
        interrupted: KeyboardInterrupt | None = None
        left = [*self._of_seq, *([] if self._parent is None else [self._parent])]
        if self._adding is not None:
            left = [*range(self._engine._next_id - 1, self._adding - 1, -1), *left]
        for seq in left:
            for _ in range(2):
                try:
                    self._engine.release(seq)
                except ValueError:  # it is gone
                    pass
                except KeyboardInterrupt as error:
                    interrupted = error
                    continue
                break
        self._of_seq.clear()
        self._waiting.clear()
        self._parent = self._adding = None
        return interrupted

    # ---- helpers -------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Hand the engine the next prompts. Those that are continued several times come one after
        the other: a prompt that waits for its forks holds cache that others could use.
        """
        engine, n = self._engine, self._request.n
        while self._waiting and self._parent is None:
            rows = n + (n > 1)
            if self._of_seq and engine.num_sequences + rows > engine.max_seqs:
                return
            runs = [self._waiting[i] for i in range(n)]
            self._adding = engine._next_id
            if n == 1:
                seqs = [engine.add(runs[0].prompt, runs[0].spec)]
            else:
                self._parent, self._forks = engine.add(runs[0].prompt), runs
                seqs = engine.fork(self._parent, [run.spec for run in runs])
            for run, seq in zip(runs, seqs, strict=True):
                run.seq = seq
                self._of_seq[seq] = run
                self._waiting.popleft()
            self._adding = None

    def _take(self) -> list[str]:
        """Book what was told. May be interrupted and repeated."""
        pieces = []
        while self._pending:
            event = self._pending[0]
            run = self._of_seq.get(event.seq)
            if run is not None and not event.extended:
                if not run.events or run.events[-1] is not event:
                    run.events.append(event)
                    pieces.append(_piece(self._engine, run.live, event))
                reason = _reason(run.live, event)
                if reason is not None:
                    run.output = run.output or self._output(run, reason)
                    self._engine.release(event.seq)
                    del self._of_seq[event.seq]
            self._pending.popleft()
        if self._parent is not None and all(run.events for run in self._forks):
            self._engine.release(self._parent)
            self._parent = None
        return pieces

    def _output(self, run: _Run, reason: str) -> Output:
        events = [event for event in run.events if event.token is not None]
        stream = TextStream(self._request.stops)
        text = "".join(_piece(self._engine, stream, event) for event in run.events)
        if stream.stopped is not None:
            reason = "stop"
        elif reason == "abort":
            text += stream.end()
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = [_logprobs_of(event) for event in events]
        return Output(
            prompt_index=run.prompt_index,
            index=run.index,
            text=text,
            token_ids=[event.token for event in events if event.token is not None],
            finish_reason=reason,
            stop_reason=stream.stopped,
            logprobs=logprobs,
            cache=self._cache_use(run),
            prompt_token_ids=list(run.prompt),
            error=run.events[-1].error if run.events else None,
        )

    def _cache_use(self, run: _Run) -> CacheUse:
        engine = self._engine
        entries = 0 if run.seq is None else engine.cache_len(run.seq)
        if run.seq is None or entries == 0:
            return CacheUse()
        fed = len(engine.tokens(run.seq)) - 1  # the last one is not in the cache
        shape = engine.model.shape
        return CacheUse(
            entries=entries,
            bytes=engine.kv_bytes(run.seq),
            full_bytes=shape.lanes * -(-fed // BLOCK_SLOTS) * shape.block_bytes,
            evicted=max(0, fed - entries),
        )


def check_idle(engine: Engine) -> None:
    """Raises ValueError if somebody else waits for events of ``engine``."""
    if engine.has_work:
        raise ValueError(
            "engine: expected one without other work, got one whose sequences still run or have "
            "events to be read (Engine.step)"
        )


def _piece(engine: Engine, stream: TextStream, event: StepEvent) -> str:
    """The text that has become certain with ``event``."""
    ended = event.generation
    text = ""
    # What ends a text is not part of it, even where it has a text of its own.
    if event.token is not None and (ended is None or ended.finish is not Finish.EOS):
        text = stream.push(engine.text([event.token]))
    return text + stream.end() if ended is not None or event.error is not None else text


def _reason(stream: TextStream, event: StepEvent) -> str | None:
    """Why ``event`` is a continuation's last; None if it is not."""
    if stream.stopped is not None:
        return "stop"
    if event.error is not None:
        return "error"
    if event.generation is None:
        return None
    finish = event.generation.finish
    return "stop" if finish is Finish.EOS else finish.value


def _logprobs_of(event: StepEvent) -> dict[int, float]:
    assert event.token is not None and event.logprob is not None
    chosen = {event.token: event.logprob}
    return {**chosen, **{i: p for i, p in event.top_logprobs if i not in chosen}}


def generate(
    engine: Engine, request: Request, prompts: Sequence[list[int]], *, progress: bool
) -> list[Output]:
    """See ``Engine.generate``."""
    batch = Batch(engine, request, prompts)
    try:
        with _bar(progress, batch.unfinished) as told:
            while batch.unfinished:
                batch.advance()
                told(batch)
    except KeyboardInterrupt as interrupt:
        outputs = batch.outputs()
        done = sum(output.finish_reason != "abort" for output in outputs)
        _log.warning("generate: interrupted with %d of %d finished", done, len(outputs))
        if done == 0:
            interrupt.outputs = outputs  # type: ignore[attr-defined]
            raise
        return outputs
    finally:
        batch.close()
    return batch.outputs()


def stream(engine: Engine, request: Request, prompt: list[int]) -> Generator[str, None, Output]:
    """See ``Engine.stream``; the generator returns the Output."""
    batch = Batch(engine, request, [prompt])
    try:
        while batch.unfinished:
            for piece in batch.advance():
                if piece:
                    yield piece
        [output] = batch.outputs()
    finally:
        interrupted = batch.close()
    if interrupted is not None:
        raise interrupted
    if output.finish_reason in ("error", "nan"):
        raise RuntimeError(output.error or "the model gave no finite distribution")
    return output


@contextlib.contextmanager
def _bar(wanted: bool, total: int) -> Iterator[Any]:
    """A progress bar on standard error; what it yields is called with the batch."""
    if not wanted:
        yield lambda batch: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rate = TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s")
    columns = (BarColumn(), MofNCompleteColumn(), rate, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generate", total=total, tokens=0, rate=0.0)

        def show(batch: Batch) -> None:
            tokens = batch.num_tokens
            seconds = bar.tasks[0].elapsed or 0.0
            done, rate = total - batch.unfinished, tokens / seconds if seconds else 0.0
            bar.update(task, completed=done, tokens=tokens, rate=rate)

        yield show
