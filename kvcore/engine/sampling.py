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
    logits: Tensor, specs: Sequence[GenerateSpec], counters: Sequence[int], vocab: int
) -> ops.Samples:
    """Draw one token per row; token ``counters[i]`` of generation ``specs[i]``.

    Args:
        logits: [len(specs), columns].
    """
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
