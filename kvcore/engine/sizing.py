"""How large the cache of an engine is: blocks, and lane states of the fused steady cadence."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.cache import CacheShape, KVCache
from kvcore.config import EngineConfig
from kvcore.models.loader import LoadedModel
from kvcore.native import _C
from kvcore.ops import blocks_for
from kvcore.policies import Policy


def make_cache(
    model: LoadedModel, config: EngineConfig, context_len: int, policy: Policy | None
) -> KVCache:
    """The cache of an engine, within ``kv_bytes``.

    Raises:
        ValueError: one sequence would not fit, or the machine does not have the memory.
    """
    shape = model.shape
    window = policy.window if policy is not None else 0
    steady = _steady(policy, shape, window, context_len)
    most_states = config.max_seqs * shape.lanes
    state_bytes = steady.state_bytes if steady is not None else 0
    blocks = config.kv_blocks or min(
        _blocks_within(config.kv_bytes, shape, steady, most_states),
        most_states * blocks_for(context_len),
    )
    if state_bytes and steady is not None and config.kv_blocks is None:
        least = steady.full_blocks
        least_states = min(least // steady.lane_blocks, most_states)
        if blocks < least:
            raise ValueError(
                f"kv_bytes: expected at least "
                f"{least * shape.block_bytes + least_states * state_bytes} for one sequence with "
                f"full lanes ({least} blocks of {shape.block_bytes} bytes and {least_states} lane "
                f"states of {state_bytes} bytes, which grow with the square of budget + protect), "
                f"got {config.kv_bytes}"
            )
    if blocks < shape.lanes:
        raise ValueError(
            f"kv_bytes: expected at least {shape.lanes * shape.block_bytes} (one block for each of "
            f"{shape.lanes} lanes), got {blocks * shape.block_bytes}"
        )
    states = min(most_states, blocks // steady.lane_blocks) if steady is not None else 0
    try:
        return KVCache(
            shape,
            blocks=blocks,
            rows=config.max_seqs,
            max_len=context_len,
            window=window,
            accumulates=policy.accumulates if policy is not None else None,
            replaces=steady is not None,
            observe=steady.observe if steady is not None else None,
            state_slots=steady.state_slots if steady is not None else 0,
            states=states,
        )
    except (RuntimeError, MemoryError) as error:
        name = "kv_bytes" if config.kv_blocks is None else "kv_blocks"
        raise ValueError(
            f"{name}: expected what this machine can allocate, got {blocks} blocks of "
            f"{shape.block_bytes} bytes and {states} lane states of {state_bytes} bytes "
            f"({blocks * shape.block_bytes + states * state_bytes} bytes): lower budget or {name}"
        ) from error


@dataclass(frozen=True)
class _Steady:
    """What the cache keeps for the steady cadence; without ``observe`` no lane states."""

    observe: _C.RkvSettings | None
    state_slots: int  # longest lane with a state
    state_bytes: int
    lane_blocks: int  # that a lane with a state holds at least
    full_blocks: int  # of one sequence whose lanes are all full, or as long as the context


def _steady(
    policy: Policy | None, shape: CacheShape, window: int, context_len: int
) -> _Steady | None:
    """None where no lane ever overwrites a slot.

    Raises:
        ValueError: budgets for another number of layers.
    """
    if policy is None:
        return None
    config = policy.config
    limits = [budget + config.protect for budget in config.budgets(shape.layers)]
    if not config.is_steady or min(limits) > context_len:
        return None
    lane_blocks = blocks_for(min(limits))
    longest = [min(limit, context_len) for limit in limits]
    full_blocks = shape.kv_heads * sum(blocks_for(slots) for slots in longest)
    if not policy.is_fused:
        return _Steady(None, 0, 0, lane_blocks, full_blocks)
    observe = _C.RkvSettings(config.protect, config.kernel, policy.mix, config.threshold)
    state_bytes = _C.rkv_state_bytes(max(longest), window, shape.head_dim)
    return _Steady(observe, max(longest), state_bytes, lane_blocks, full_blocks)


def _blocks_within(
    kv_bytes: int, shape: CacheShape, steady: _Steady | None, most_states: int
) -> int:
    """Blocks that fit together with the lane states that they can come to need: one for every
    ``lane_blocks`` blocks, since sequences that evict do not share blocks, and never more than
    there are lanes.
    """
    if steady is None or not steady.state_bytes:
        return kv_bytes // shape.block_bytes
    group = steady.lane_blocks * shape.block_bytes + steady.state_bytes
    by_share = kv_bytes // group * steady.lane_blocks
    by_share += min(kv_bytes % group // shape.block_bytes, steady.lane_blocks - 1)
    by_lanes = (kv_bytes - most_states * steady.state_bytes) // shape.block_bytes
    return max(by_share, by_lanes)
