"""One forward of the model over a flattened ragged batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcore.cache import KVCache
from kvcore.models.attention import AttentionContext
from kvcore.models.loader import LoadedModel
from kvcore.native import follow_torch_threads
from kvcore.ops import RaggedBatch


class ModelRunner:
    """Runs ``model`` on ``cache``; holds no state between calls."""

    def __init__(self, model: LoadedModel, cache: KVCache) -> None:
        self._module: Any = model.model  # its forward takes more than nn.Module declares
        self._trunk: Any = model.model.model
        self._has_head = model.has_head
        self._cache = cache

    @torch.inference_mode()
    def forward(self, tokens: Tensor, batch: RaggedBatch, logit_rows: Tensor) -> Tensor | None:
        """Feed ``tokens`` i64 [tokens]; the cache must have room for them already.

        Args:
            logit_rows: i64 [rows], token indices whose output is wanted.
        Returns:
            [rows, vocabulary] (or [rows, labels] with a head), None for no rows.
        Raises:
            UnsupportedModel: a layer attends without the cache.
        """
        follow_torch_threads()
        context = AttentionContext(self._cache, batch)
        output = self._run(tokens, context, logit_rows)
        context.check_complete()
        return output

    def _run(self, tokens: Tensor, context: AttentionContext, logit_rows: Tensor) -> Tensor | None:
        inputs = {
            "input_ids": tokens[None],
            "position_ids": context.batch.positions[None],
            "use_cache": False,
            "kv_batch": context,
        }
        if len(logit_rows) == 0:
            self._trunk(**inputs)
            return None
        if self._has_head:
            hidden = self._trunk(**inputs).last_hidden_state[0, logit_rows]
            scores: Tensor = self._module.score(hidden)
            return scores
        logits: Tensor = self._module(**inputs, logits_to_keep=logit_rows).logits[0]
        return logits
