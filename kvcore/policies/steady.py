"""The steady cadence: one entry out, one in, per token and lane, and nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcore import ops
from kvcore.cache import KVCache
from kvcore.native import _C
from kvcore.policies.base import Policy, even_budgets, evict, score_and_limit


def elect(policy: Policy, cache: KVCache, seqs: Sequence[int], prompt_lens: Sequence[int]) -> int:
    """After a forward: what a chunk brought too much goes, and every full lane gets the slot that
    its next token overwrites, the one with the lowest score.

    Args:
        seqs: store handles.
        prompt_lens: as in ``evict``.
    Returns:
        Slots dropped, summed over lanes.
    Raises:
        ValueError: keys or queries are not finite; names row, layer and kv head.
        OutOfBlocks: as ``evict``.
    """
    rows = cache.rows(seqs).long()
    length = cache.lane_len[rows]
    limit = even_budgets(policy.config, cache, seqs, prompt_lens)[0] + policy.config.protect
    over = (length > limit).flatten(1).any(1)
    dropped = 0
    if bool(over.any()):
        chosen = [i for i, is_over in enumerate(over.tolist()) if is_over]
        dropped = evict(policy, cache, [seqs[i] for i in chosen], [prompt_lens[i] for i in chosen])
        length = cache.lane_len[rows]
    full = length >= limit
    assert cache.replace is not None
    if policy.is_fused:
        _build_missing(cache, seqs, rows, full, limit[0].contiguous())
        return dropped
    chosen = [i for i, is_full in enumerate(full.flatten(1).any(1).tolist()) if is_full]
    if chosen:
        due = [seqs[i] for i in chosen]
        score, keep = score_and_limit(policy, cache, due, [prompt_lens[i] for i in chosen])
        lowest, found = ops.select_slots(cache.store, cache.rows(due), score, keep - 1)
        cache.set_replace(due, torch.where(found > 0, lowest[..., 0], _C.NO_REPLACE).int())
    return dropped


def _build_missing(
    cache: KVCache,
    seqs: Sequence[int],
    rows: torch.Tensor,
    full: torch.Tensor,
    limit: torch.Tensor,
) -> None:
    """States of full lanes that attention has not kept: after a chunk, or never yet.

    limit: i32 [layers, kv_heads], the same for all sequences of a fused policy.
    """
    assert cache.replace is not None and cache.observe is not None
    missing = (full & (cache.replace[rows] == _C.NO_REPLACE)).flatten(1).any(1)
    if bool(missing.any()):
        cache.store.take_states([seqs[i] for i in missing.nonzero().flatten().tolist()], limit)
        ops.build_rkv_state(cache.store, rows[missing].int(), limit, cache.observe, cache.scale)
    bad = (cache.replace[rows] == _C.NOT_FINITE).nonzero()
    if len(bad):
        i, layer, head = bad[0].tolist()
        raise ValueError(
            f"steady: expected finite keys and queries, got NaN or infinity in row "
            f"{int(rows[i])}, layer {layer}, kv head {head}"
        )
