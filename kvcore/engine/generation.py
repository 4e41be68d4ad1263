"""Sampling, detection and stopping for the sequences of a batch that generate."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kvcore.config import DetectorConfig
from kvcore.engine.events import Finish, GenerateSpec, Generation
from kvcore.engine.sampling import sample
from kvcore.engine.sequence import Generating
from kvcore.models.loader import LoadedModel
from kvcore.native import _C
from kvcore.ops import Samples

_FIRINGS = {1: Finish.ENTROPY, 2: Finish.GZIP, 3: Finish.REPETITION}


class Generator:
    """Draws one token per ready generation and decides who stops.

    A token that is end of text, fires the detector and completes a step at once stops for the first
    of: no finite distribution, detector, end of text, step, length.
    """

    def __init__(
        self, model: LoadedModel, detector: DetectorConfig | None, context_len: int
    ) -> None:
        self._vocab = model.vocab
        self._eos = model.eos_ids
        self._context_len = context_len
        self._bytes = model.token_bytes
        self.set_detector(detector)

    def set_detector(self, detector: DetectorConfig | None) -> None:
        """REQUIRES: no generation is open."""
        self._detects = detector is not None
        self._monitor = _make_monitor(detector or DetectorConfig(), self._bytes)

    def check(self, spec: GenerateSpec) -> None:
        """Raise ValueError if ``spec`` wants a detector that the engine lacks."""
        if spec.detect and not self._detects:
            raise ValueError("detect: this engine was made without a detector")

    def open(self, spec: GenerateSpec) -> Generating:
        """Begin a generation. REQUIRES: ``check(spec)`` passes."""
        return Generating(spec, self._monitor.open(spec.detect, spec.separators))

    def close(self, generating: Generating) -> None:
        """Forget a generation; does nothing the second time."""
        with contextlib.suppress(ValueError):  # not open any more
            self._monitor.close(generating.monitor)

    def text(self, tokens: Seq[int]) -> bytes:
        """Bytes that ids stand for; ids without bytes (special, padding) stand for none."""
        return b"".join(self._bytes[t] for t in tokens if t < len(self._bytes))

    def draw(self, jobs: list[Generating], logits: Tensor, seen: Seq[Seq[int]]) -> Samples:
        """The next token of each of ``jobs`` from its row of ``logits``. Changes nothing.

        Args:
            seen: all tokens of the job's sequence, prompt included.
        """
        counters = [len(job.tokens) for job in jobs]
        return sample(logits, [job.spec for job in jobs], counters, self._vocab, seen)

    def push(
        self,
        jobs: Seq[Generating],
        places: Seq[int],
        tokens: Seq[int],
        entropy: Seq[float],
        firing: Tensor,
        step_end: Tensor,
    ) -> None:
        """Show the detector one new token of each of ``jobs``, which had ``places`` before; u8
        ``firing`` and ``step_end`` are written. Does nothing if it has seen them: it takes the
        tokens of all jobs or of none.
        """
        if not jobs or self._monitor.num_tokens(jobs[0].monitor) > places[0]:
            return
        self._monitor.push(
            torch.tensor([job.monitor for job in jobs], dtype=torch.int64),
            torch.tensor(list(tokens), dtype=torch.int64),
            torch.tensor(list(entropy), dtype=torch.float32),
            firing,
            step_end,
        )

    def finish(
        self, job: Generating, token: int, count: int, length: int, firing: int, step_end: int
    ) -> Finish | None:
        """Why the generation ends with ``token``, its token number ``count``, in a sequence of
        ``length`` tokens; None if it goes on.
        """
        if token < 0:
            return Finish.NAN
        if firing:
            return _FIRINGS[firing]
        if token in self._eos:
            return Finish.EOS
        if step_end and job.spec.stop_at_step:
            return Finish.STEP
        full = length >= self._context_len
        if full or count >= job.spec.sampling.max_tokens:
            return Finish.LENGTH
        return None

    def result(self, job: Generating, finish: Finish) -> Generation:
        """What an ended generation came to. REQUIRES: it has not been closed."""
        count = len(job.tokens)
        monitor = self._monitor
        return Generation(
            tokens=job.tokens,
            text=monitor.text(job.monitor),
            finish=finish,
            mean_logprob=sum(job.logprobs) / count if count else float("nan"),
            logprobs=job.logprobs,
            max_entropy=monitor.max_mean_entropy(job.monitor),
            min_gzip_ratio=monitor.min_gzip_ratio(job.monitor),
            fired_at=monitor.fired_at(job.monitor),
        )


def _make_monitor(config: DetectorConfig, token_bytes: _C.TokenBytes) -> _C.CandidateMonitor:
    return _C.CandidateMonitor(
        token_bytes,
        entropy=config.entropy,
        entropy_threshold=config.entropy_threshold,
        entropy_window=config.entropy_window,
        entropy_guard=config.entropy_guard,
        gzip=config.gzip,
        gzip_threshold=config.gzip_threshold,
        gzip_window=config.gzip_window,
        gzip_exact=config.gzip_exact,
        repetition=config.repetition,
        repetition_max_pattern_size=config.repetition_max_pattern_size,
        repetition_min_count=config.repetition_min_count,
        repetition_min_tokens=config.repetition_min_tokens,
    )
