"""How large the cache of an engine is: blocks, and the states of lanes that a policy asks for."""

from __future__ import annotations

from kvcore.cache import CacheShape, KVCache
from kvcore.config import EngineConfig
from kvcore.models.loader import LoadedModel
from kvcore.ops import blocks_for
from kvcore.policies import Policy
from kvcore.policies.evictor import CachePlan, plan_cache


def make_cache(
    model: LoadedModel, config: EngineConfig, context_len: int, policy: Policy | None
) -> KVCache:
    """The cache of an engine, within ``kv_bytes``.

    Raises:
        ValueError: one sequence would not fit, the machine does not have the memory, or eviction
            is set for another model.
    """
    shape = model.shape
    plan = plan_cache(policy, shape, context_len)
    most_states = config.max_seqs * shape.lanes
    state_bytes = plan.state_bytes
    blocks = config.kv_blocks or min(
        _blocks_within(config.kv_bytes, shape, plan, most_states),
        most_states * blocks_for(context_len),
    )
    if state_bytes and config.kv_blocks is None:
        least = plan.full_blocks
        least_states = min(least // plan.lane_blocks, most_states)
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
    states = min(most_states, blocks // plan.lane_blocks) if state_bytes else 0
    try:
        return plan.make(
            shape, blocks=blocks, rows=config.max_seqs, max_len=context_len, states=states
        )
    except (RuntimeError, MemoryError) as error:
        name = "kv_bytes" if config.kv_blocks is None else "kv_blocks"
        raise ValueError(
            f"{name}: expected what this machine can allocate, got {blocks} blocks of "
            f"{shape.block_bytes} bytes and {states} lane states of {state_bytes} bytes "
            f"({blocks * shape.block_bytes + states * state_bytes} bytes): lower budget or {name}"
        ) from error


def _blocks_within(kv_bytes: int, shape: CacheShape, plan: CachePlan, most_states: int) -> int:
    """Blocks that fit together with the lane states that they can come to need: one for every
    ``lane_blocks`` blocks, since sequences that evict do not share blocks, and never more than
    there are lanes.
    """
    if not plan.state_bytes:
        return kv_bytes // shape.block_bytes
    group = plan.lane_blocks * shape.block_bytes + plan.state_bytes
    by_share = kv_bytes // group * plan.lane_blocks
    by_share += min(kv_bytes % group // shape.block_bytes, plan.lane_blocks - 1)
    by_lanes = (kv_bytes - most_states * plan.state_bytes) // shape.block_bytes
    return max(by_share, by_lanes)
