"""Sampling, detection and stopping for the sequences of a batch that generate."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from kvcore.config import DetectorConfig
from kvcore.engine.events import Finish, GenerateSpec, Generation, StepEvent
from kvcore.engine.sampling import sample
from kvcore.engine.sequence import Generating, Sequence
from kvcore.models.loader import LoadedModel
from kvcore.native import _C

_FIRINGS = {1: Finish.ENTROPY, 2: Finish.GZIP, 3: Finish.REPETITION}


class Generator:
    """Draws one token per ready sequence and decides who stops.

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
        self._detects = detector is not None
        self._monitor = _make_monitor(detector or DetectorConfig(), model.token_bytes)

    def check(self, spec: GenerateSpec) -> None:
        """Raise ValueError if ``spec`` wants a detector that the engine lacks."""
        if spec.detect and not self._detects:
            raise ValueError("detect: this engine was made without a detector")

    def open(self, spec: GenerateSpec) -> Generating:
        """Begin a generation. REQUIRES: ``check(spec)`` passes."""
        return Generating(spec, self._monitor.open(spec.detect))

    def close(self, generating: Generating) -> None:
        """End a generation without a result."""
        self._monitor.close(generating.monitor)

    def text(self, tokens: Seq[int]) -> bytes:
        """Bytes that ids stand for; ids without bytes (special, padding) stand for none."""
        return b"".join(self._bytes[t] for t in tokens if t < len(self._bytes))

    def advance(self, seqs: list[Sequence], logits: Tensor) -> list[StepEvent]:
        """One token for each of ``seqs`` from its row of ``logits``. Modifies the sequences."""
        jobs = [s.generating for s in seqs if s.generating is not None]
        counters = [len(j.tokens) for j in jobs]
        drawn = sample(logits, [j.spec for j in jobs], counters, self._vocab)
        tokens, logprobs = drawn.token.tolist(), drawn.logprob.tolist()
        valid = [i for i, token in enumerate(tokens) if token >= 0]
        firing, step_end = self._observe(jobs, valid, drawn.token, drawn.entropy)
        events = []
        for i, (seq, job) in enumerate(zip(seqs, jobs, strict=True)):
            finish: Finish | None = Finish.NAN
            if tokens[i] >= 0:
                seq.tokens.append(tokens[i])
                job.tokens.append(tokens[i])
                job.logprobs.append(logprobs[i])
                finish = self._finish(seq, job, firing[i], bool(step_end[i]))
            if finish is None:
                events.append(StepEvent(seq.seq_id, token=tokens[i]))
                continue
            token = tokens[i] if tokens[i] >= 0 else None
            result = self._result(job, finish)
            self.close(job)
            seq.generating = None
            events.append(StepEvent(seq.seq_id, token=token, generation=result))
        return events

    def _observe(
        self, jobs: list[Generating], valid: list[int], token: Tensor, entropy: Tensor
    ) -> tuple[list[int], list[int]]:
        firing, step_end = [0] * len(jobs), [0] * len(jobs)
        if valid:
            index = torch.tensor(valid)
            ids = torch.tensor([jobs[i].monitor for i in valid], dtype=torch.int64)
            fired = torch.empty(len(valid), dtype=torch.uint8)
            ended = torch.empty(len(valid), dtype=torch.uint8)
            self._monitor.push(ids, token[index], entropy[index], fired, ended)
            for i, f, e in zip(valid, fired.tolist(), ended.tolist(), strict=True):
                firing[i], step_end[i] = f, e
        return firing, step_end

    def _finish(self, seq: Sequence, job: Generating, fired: int, step_end: bool) -> Finish | None:
        if fired:
            return _FIRINGS[fired]
        if job.tokens[-1] in self._eos:
            return Finish.EOS
        if step_end and job.spec.stop_at_step:
            return Finish.STEP
        full = len(seq.tokens) >= self._context_len
        if full or len(job.tokens) >= job.spec.sampling.max_new_tokens:
            return Finish.LENGTH
        return None

    def _result(self, job: Generating, finish: Finish) -> Generation:
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
