"""The one place that knows when and how entries leave a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcore import ops
from kvcore.cache import CacheShape, KVCache
from kvcore.checks import require
from kvcore.config import EvictionConfig
from kvcore.native import _C
from kvcore.policies.base import Needs, Policy, check_window
from kvcore.policies.cadences import CADENCES, Cadence
from kvcore.policies.selection import even_budgets, evict, lowest

_NONE = Needs()


@dataclass(frozen=True)
class CachePlan:
    """What a policy in its cadence asks of a cache, whatever its size.

    Attributes:
        needs: of the policy.
        replaces: lanes come to exchange entries, so the cache keeps which one goes next.
        observe: settings of the fused pass that elects it; None where scores are computed anew.
        state_slots: longest lane that the fused pass keeps a state of.
        state_bytes: of one such state.
        lane_blocks: that a lane with a state holds at least.
        full_blocks: of one sequence whose lanes are all full, or as long as the context.
    """

    needs: Needs = _NONE
    replaces: bool = False
    observe: _C.RkvSettings | None = None
    state_slots: int = 0
    state_bytes: int = 0
    lane_blocks: int = 1
    full_blocks: int = 0

    def make(
        self, shape: CacheShape, *, blocks: int, rows: int, max_len: int, states: int | None = None
    ) -> KVCache:
        """A cache that the policy can work on; arguments as of ``KVCache``."""
        return KVCache(
            shape,
            blocks=blocks,
            rows=rows,
            max_len=max_len,
            window=self.needs.window,
            accumulates=self.needs.attention,
            planes=self.needs.planes,
            replaces=self.replaces,
            observe=self.observe,
            state_slots=self.state_slots,
            states=0 if self.observe is None else states,
        )


def plan_cache(policy: Policy | None, shape: CacheShape, context_len: int) -> CachePlan:
    """What ``policy`` asks of a cache for sequences of at most ``context_len`` tokens.

    Raises:
        ValueError: budgets for another number of layers, or a window above ``protect``.
    """
    if policy is None:
        return CachePlan()
    config, needs = policy.config, policy.needs(shape)
    check_window(config, needs.window)
    limits = lane_limits(policy, shape)
    if not _cadence(config).overwrites or min(limits) > context_len:  # never full
        return CachePlan(needs)
    longest = [min(limit, context_len) for limit in limits]
    lane_blocks = ops.blocks_for(min(limits))
    full_blocks = shape.kv_heads * sum(ops.blocks_for(slots) for slots in longest)
    fused = needs.fused
    if fused is None or config.scope != "lane" or config.protect_prompt:
        return CachePlan(needs, True, lane_blocks=lane_blocks, full_blocks=full_blocks)
    observe = _C.RkvSettings(fused.protect, fused.kernel, fused.mix, fused.threshold)
    state_bytes = _C.rkv_state_bytes(max(longest), needs.window, shape.head_dim)
    return CachePlan(needs, True, observe, max(longest), state_bytes, lane_blocks, full_blocks)


def lane_limits(policy: Policy, shape: CacheShape) -> list[int]:
    """Slots that each layer's lanes hold after an eviction, a protected prompt not counted."""
    return [budget + policy.protect for budget in policy.config.budgets(shape.layers)]


class Evictor:
    """Says which sequences of a cache are due, and evicts from them.

    After each piece of tokens that went in (a prompt, a chunk that belongs together, a generated
    token) ``due`` is asked and ``settle`` called for what it names. A piece that is fed in several
    forwards is looked at once, when it is complete, so that the result does not depend on chunks.

    Args:
        policy: None keeps everything: nothing is ever due.
        cache: made by ``plan_cache(policy, ...)``.
    Raises:
        ValueError: the cache lacks what the policy needs.
    """

    def __init__(self, policy: Policy | None, cache: KVCache) -> None:
        self.policy = policy
        self.cache = cache
        self.config = EvictionConfig() if policy is None else policy.config
        self.limits: list[int] = []
        if policy is None:
            return
        self.limits = lane_limits(policy, cache.shape)
        self._cadence = _cadence(self.config)
        self._check_cache(policy)

    @property
    def evicts(self) -> bool:
        """Sequences may lose entries: forks of them share no block, and to get a lost cache back
        the same pieces are fed again, one by one.
        """
        return self.policy is not None

    def due(self, handles: Sequence[int], prompt_lens: Sequence[int]) -> list[bool]:
        """Whether each of these sequences has something to settle.

        Args:
            handles: of the store; a piece of each has just been fed.
            prompt_lens: tokens of each sequence's prompt.
        """
        if self.policy is None:
            return [False] * len(handles)
        pairs = zip(handles, prompt_lens, strict=True)
        return [self._cadence.is_due(self, handle, length) for handle, length in pairs]

    def settle(self, handles: Sequence[int], prompt_lens: Sequence[int]) -> int:
        """Evict from sequences that are due. Doing it again changes nothing.

        Returns:
            Slots dropped, summed over lanes.
        Raises:
            ValueError: keys, queries or attention are not finite: names row, layer and kv head. Or
                scope "global" and lanes that hold different positions.
            OutOfBlocks: shared blocks could not be copied.
            Entries of this call's sequences may then be settled in part.
        """
        if self.policy is None or not handles:
            return 0
        return self._cadence.settle(self, handles, prompt_lens)

    def most_slots(self, tokens: int, prompt_len: int, longest_piece: int) -> int:
        """Mean slots per lane that a sequence holds at most on its way to ``tokens`` tokens, fed in
        pieces of at most ``longest_piece``.
        """
        if self.policy is None:
            return tokens
        kept = prompt_len if self.config.protect_prompt else 0
        return min(tokens, self.config.trigger + kept + longest_piece)

    def begin(self, handle: int, count: int, piece_len: int) -> None:
        """Before slots for the next ``count`` tokens, out of a piece of ``piece_len``, are taken: a
        piece is appended as a whole in however many forwards it is fed.
        """
        if count == 1 and piece_len > 1 and self.cache.replace is not None:
            self.cache.store.forget_replace(handle)

    def take_back(self, handle: int, count: int) -> bool:
        """Undo the newest ``count`` tokens, which were fed and not settled. False, with nothing
        changed, if they have overwritten, evicted or added to what was there.
        """
        if self.cache.planes or self.cache.store.undoable(handle) < count:
            return False
        self.cache.store.truncate(handle, count)
        return True

    # ---- what cadences are made of -------------------------------------------------------------

    def drop(self, handles: Sequence[int], prompt_lens: Sequence[int]) -> int:
        """Evict every lane down to its limit; returns slots dropped."""
        assert self.policy is not None
        return evict(self.policy, self.cache, handles, prompt_lens)

    def exchange(self, handles: Sequence[int], prompt_lens: Sequence[int]) -> int:
        """Lanes above their limit drop what is too much, and every lane at its limit gets the slot
        that its next token overwrites, that of the lowest score. Returns slots dropped.

        Raises:
            ValueError: as ``settle``.
        """
        assert self.policy is not None and self.cache.replace is not None
        rows = self.cache.rows(handles).long()
        length = self.cache.lane_len[rows]
        limit = even_budgets(self.config, self.cache, handles, prompt_lens)[0] + self.policy.protect
        dropped = 0
        over = _any_lane(length > limit)
        if over:
            dropped = self.drop([handles[i] for i in over], [prompt_lens[i] for i in over])
            length = self.cache.lane_len[rows]
        full = length >= limit
        if self.cache.observe is not None:
            self._build_missing(handles, rows, full, limit[0].contiguous())
            return dropped
        chosen = _any_lane(full)
        if chosen:
            due, prompts = [handles[i] for i in chosen], [prompt_lens[i] for i in chosen]
            slots, found = lowest(self.policy, self.cache, due, prompts, besides=1)
            elected = torch.where(found > 0, slots[..., 0], _C.NO_REPLACE)
            self.cache.set_replace(due, elected.int())
        return dropped

    def _build_missing(
        self,
        handles: Sequence[int],
        rows: torch.Tensor,
        full: torch.Tensor,
        limit: torch.Tensor,
    ) -> None:
        """States of full lanes that attention has not kept: after a chunk, or never yet.

        limit: i32 [layers, kv_heads], the same for all sequences of a fused policy.
        """
        cache = self.cache
        assert cache.replace is not None and cache.observe is not None
        missing = _any_lane(full & (cache.replace[rows] == _C.NO_REPLACE))
        if missing:
            cache.store.take_states([handles[i] for i in missing], limit)
            ops.build_rkv_state(cache.store, rows[missing].int(), limit, cache.observe, cache.scale)
        bad = (cache.replace[rows] == _C.NOT_FINITE).nonzero()
        if len(bad):
            i, layer, head = bad[0].tolist()
            raise ValueError(
                f"steady: expected finite keys and queries, got NaN or infinity in row "
                f"{int(rows[i])}, layer {layer}, kv head {head}"
            )

    def _check_cache(self, policy: Policy) -> None:
        cache, needs = self.cache, policy.needs(self.cache.shape)
        longest = (cache.block_table.shape[-1] - 1) * ops.BLOCK_SLOTS
        exchanges = self._cadence.overwrites and min(self.limits) <= longest
        stats = None if cache.stats_plane is None else cache.stats_plane.shape[1]
        wanted = {None: None, "sum": 1, "per_head": 3 * cache.shape.q_heads // cache.shape.kv_heads}
        expected = {
            f"window={needs.window}": cache.window == needs.window,
            f"accumulates={needs.attention!r}": stats == wanted[needs.attention],
            f"replaces={exchanges}": not exchanges or cache.replace is not None,
            f"planes={needs.planes}": all(p.name in cache.planes for p in needs.planes),
        }
        for keyword, is_so in expected.items():
            require(is_so, "cache", f"one with {keyword} for {self.config!r}", "another")


def _cadence(config: EvictionConfig) -> Cadence:
    assert config.cadence is not None
    return CADENCES[config.cadence]


def _any_lane(mask: torch.Tensor) -> list[int]:
    """Sequences for which some lane of ``mask`` [seqs, layers, kv_heads] is set."""
    return mask.flatten(1).any(1).nonzero().flatten().tolist()
