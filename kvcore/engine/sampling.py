"""Drawing tokens for the sequences of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcore import ops
from kvcore.engine.events import GenerateSpec

_LOGPROB_ROWS = 64  # rows of f32 logits held at once: 64 x 152k x 4 bytes = 39 MB


def _signed(key: int) -> int:
    """The i64 with the bit pattern of a u64."""
    return key - (1 << 64) if key >= 1 << 63 else key


def sample(
    logits: Tensor,
    specs: Sequence[GenerateSpec],
    counters: Sequence[int],
    vocab: int,
    seen: Sequence[Sequence[int]],
) -> ops.Samples:
    """Draw one token per row; token ``counters[i]`` of generation ``specs[i]``.

    Entropy and log-probability are those of the raw distribution, whatever is penalised.

    Args:
        logits: [len(specs), columns].
        seen: of each row the tokens that its repetition penalty applies to.
    """
    drawn = _draw(logits, specs, counters, vocab)
    rows = [i for i, spec in enumerate(specs) if spec.sampling.repetition_penalty != 1]
    if rows:
        penalised = torch.stack(
            [_penalised(logits[i], seen[i], specs[i].sampling.repetition_penalty) for i in rows]
        )
        again = _draw(penalised, [specs[i] for i in rows], [counters[i] for i in rows], vocab)
        drawn.token[rows] = again.token
        told = token_logprobs(logits[rows], again.token.clamp(min=0), vocab)
        drawn.logprob[rows] = told.masked_fill(again.token < 0, torch.nan)
    return drawn


def _penalised(logits: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """f32 [columns]: ``logits`` with those of ``seen`` tokens penalised.

    Source: CTRL (arXiv 1909.05858), section 4.1, with the signs of vLLM and transformers.
    """
    out = logits.float()
    ids = torch.tensor(list(seen), dtype=torch.int64).unique()
    some = out[ids]
    return out.index_put((ids,), torch.where(some > 0, some / penalty, some * penalty))


def top_logprobs(
    logits: Tensor, counts: Sequence[int], vocab: int
) -> list[tuple[tuple[int, float], ...]]:
    """For each row the ``counts[i]`` most likely ids below ``vocab`` with their log-probabilities
    in nats, falling; the lower id of equals first. Fewer where the vocabulary is smaller; none for
    a row that is not finite.
    """
    out: list[tuple[tuple[int, float], ...]] = []
    for row, count in zip(logits, counts, strict=True):
        if count == 0:
            out.append(())
            continue
        logprob = row[:vocab].float().log_softmax(0)
        least = logprob.topk(min(count, vocab)).values[-1]
        ids = (logprob >= least).nonzero().flatten()  # rising; equals of the last one included
        values, order = logprob[ids].sort(descending=True, stable=True)
        chosen = zip(ids[order].tolist(), values.tolist(), strict=True)
        out.append(tuple(chosen)[: min(count, vocab)])
    return out


def _draw(
    logits: Tensor, specs: Sequence[GenerateSpec], counters: Sequence[int], vocab: int
) -> ops.Samples:
    params = [s.sampling for s in specs]
    return ops.sample_tokens(
        logits,
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        rng_key=torch.tensor([_signed(s.rng_key) for s in specs], dtype=torch.int64),
        rng_counter=torch.tensor(list(counters), dtype=torch.int64),
        vocab=vocab,
    )


def token_logprobs(logits: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    """f32 [rows]: natural log-probability of ``tokens`` [rows] under softmax(logits[:, :vocab])."""
    out = torch.empty(len(tokens), dtype=torch.float32)
    for i in range(0, len(tokens), _LOGPROB_ROWS):
        part = logits[i : i + _LOGPROB_ROWS, :vocab].float()
        chosen = part.gather(1, tokens[i : i + _LOGPROB_ROWS, None]).squeeze(1)
        out[i : i + _LOGPROB_ROWS] = chosen - part.logsumexp(1)
    return out
