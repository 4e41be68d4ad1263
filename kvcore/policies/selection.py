"""Which entries go: from the scores of a policy to the slots that are dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcore import ops
from kvcore.cache import KVCache
from kvcore.checks import require
from kvcore.config import EvictionConfig
from kvcore.policies.base import Policy


def evict(policy: Policy, cache: KVCache, seqs: Sequence[int], prompt_lens: Sequence[int]) -> int:
    """Drop the lowest scored slots of each lane so that ``budget`` scored and ``protect`` newest
    stay.

    Args:
        seqs: store handles. Lanes already within their limit lose nothing.
        prompt_lens: tokens of each sequence's prompt; with ``protect_prompt`` those still cached
            are kept besides.
    Returns:
        Slots dropped, summed over lanes.
    Raises:
        ValueError: from ``Policy.score``, or scope "global" and lanes of a sequence that hold
            different positions; nothing has changed.
        OutOfBlocks: shared blocks could not be copied; nothing has changed.
    """
    drop, drop_count = lowest(policy, cache, seqs, prompt_lens)
    return cache.store.evict(seqs, drop, drop_count)


def lowest(
    policy: Policy,
    cache: KVCache,
    seqs: Sequence[int],
    prompt_lens: Sequence[int],
    *,
    besides: int = 0,
) -> tuple[Tensor, Tensor]:
    """The lowest scored slots of each lane, as many as it holds above its limit less ``besides``.

    Returns:
        (slots i32 [seqs, layers, kv_heads, slots], how many of them i32 [seqs, layers, kv_heads]).
    Raises:
        ValueError: as ``evict``.
    """
    config = policy.config
    score = policy.score(cache, seqs)
    if config.scope == "global":
        score = _mean_over_lanes(score, cache.positions(seqs))
    limit, prompt = even_budgets(config, cache, seqs, prompt_lens)
    if prompt is not None:
        score[..., : prompt.shape[-1]].masked_fill_(prompt, torch.inf)
    if config.head_budgets == "adaptive":
        limit = share_by_score(score, limit)
    keep = (limit + policy.protect - besides).contiguous()
    return ops.select_slots(cache.store, cache.rows(seqs), score, keep)


def even_budgets(
    config: EvictionConfig, cache: KVCache, seqs: Sequence[int], prompt_lens: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """What each lane may hold beside its newest ``protect`` slots when heads share evenly, i32
    [seqs, layers, kv_heads], and the slots of a protected prompt, which come on top.
    """
    budgets = torch.tensor(config.budgets(cache.shape.layers), dtype=torch.int32)
    limit = budgets[:, None].expand(len(seqs), -1, cache.shape.kv_heads)
    if not config.protect_prompt:
        return limit, None
    prompt = _prompt_slots(cache, seqs, prompt_lens)
    return limit + prompt.sum(-1, dtype=torch.int32), prompt


def _prompt_slots(cache: KVCache, seqs: Sequence[int], prompt_lens: Sequence[int]) -> Tensor:
    """bool [seqs, layers, kv_heads, slots]: slots that hold a token of the prompt."""
    position = cache.positions(seqs)
    ends = torch.tensor(list(prompt_lens), dtype=torch.int32).view(-1, 1, 1, 1)
    return (position >= 0) & (position < ends)


_FLOOR = 0.2  # of its even share, that every head keeps: AdaKV's safeguard


def share_by_score(score: Tensor, limit: Tensor) -> Tensor:
    """Shares each layer's budget among its heads by how many of the layer's best scores they have.

    Args:
        score: [seqs, layers, kv_heads, slots]; only finite ones compete.
        limit: i32 [seqs, layers, kv_heads], even shares.
    Returns:
        i32 like ``limit``, with the same sum in every layer.
    Source: AdaKV (arXiv 2407.11550), algorithm 1, with a floor under every head.
    """
    shared = limit.clone()
    slots = score.shape[-1]
    for seq in range(score.shape[0]):
        for layer in range(score.shape[1]):
            even = limit[seq, layer]
            scored = score[seq, layer].isfinite().sum(-1)
            floor = torch.minimum((even * _FLOOR).int(), scored.int())
            spare = int((even - floor).sum())
            flat = score[seq, layer].masked_fill(~score[seq, layer].isfinite(), -torch.inf).clone()
            # What the floor keeps of a head does not compete for the rest.
            kept = flat.argsort(dim=-1, descending=True, stable=True)
            for head, count in enumerate(floor.tolist()):
                flat[head, kept[head, :count]] = -torch.inf
            best = flat.flatten().argsort(dim=0, descending=True, stable=True)[:spare]
            best = best[flat.flatten()[best] > -torch.inf]
            won = torch.bincount(best // slots, minlength=len(even)).int()
            shared[seq, layer] = floor + won
            # Short lanes: what nobody can use goes back to where it came from.
            left = int(even.sum() - shared[seq, layer].sum())
            if left > 0:
                shared[seq, layer, 0] += left
    return shared


def _mean_over_lanes(score: Tensor, position: Tensor) -> Tensor:
    """Give every lane of a sequence the mean score of its lanes, slot by slot.

    Lanes that always dropped the same positions hold them in the same slots.
    Source: the one kept set of R-KV's vLLM port, a mean over heads and a sum over layers.
    """
    same = bool((position == position[:, :1, :1]).all())
    require(same, "scope", "lanes that hold the same positions for 'global'", "different ones")
    lanes = score.flatten(1, 2).unbind(1)
    total = torch.zeros_like(lanes[0])
    for lane in lanes:  # in a fixed order: the sum must not depend on who is evicted together
        total += lane
    return (total / len(lanes))[:, None, None].expand(score.shape).contiguous()
