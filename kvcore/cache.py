"""The KV cache of one engine: tensors on this side, tables and lengths written by the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvcore import ops
from kvcore.checks import require, require_int
from kvcore.native import _C

ATTENTION_STATS = "attention_stats"


@dataclass(frozen=True)
class CacheShape:
    """What the model fixes about its cache."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def lanes(self) -> int:
        """Lanes of one sequence."""
        return self.layers * self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.lanes * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of the keys and values of one block (16 slots of one lane)."""
        return 2 * ops.BLOCK_SLOTS * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Plane:
    """Numbers that the cache keeps of every slot.

    They begin with ``start`` when the slot is written, move with it when others are evicted, and
    are copied with its block. Forks of a cache with planes never share blocks, since later tokens
    may write to any slot.

    Attributes:
        name: 1 to 31 bytes; the operations find the plane by it.
        dtype: of 1, 2, 4 or 8 bytes.
        channels: numbers of one slot.
        start: one number for all channels, or one for each.
    """

    name: str
    dtype: torch.dtype
    channels: int = 1
    start: float | Sequence[float] = 0

    def __post_init__(self) -> None:
        require_int(self.channels, "channels", 1, 2**20)
        given = [self.start] if isinstance(self.start, (int, float)) else list(self.start)
        right = len(given) in (1, self.channels)
        require(right, "start", f"1 or {self.channels} numbers for plane {self.name!r}", self.start)

    def starts(self) -> Tensor:
        """[channels] of ``dtype``."""
        start = torch.tensor(self.start, dtype=self.dtype)
        return start.expand(self.channels).contiguous() if start.numel() == 1 else start


def attention_plane(shape: CacheShape, accumulates: Literal["sum", "per_head"]) -> Plane:
    """What attention adds up in every slot (csrc/ops/attend.h)."""
    if accumulates == "sum":
        return Plane(ATTENTION_STATS, torch.float32)
    group = shape.q_heads // shape.kv_heads
    start = [0.0] * group + [1.0] * group + [0.0] * group
    return Plane(ATTENTION_STATS, torch.float32, 3 * group, start)


class KVCache:
    """Paged keys and values of up to ``rows`` sequences; a sequence is named by its store handle.

    Args:
        shape: of the model.
        blocks: in the pool. Memory is touched only when used.
        rows: sequences at once.
        max_len: slots that one lane can hold.
        window: queries kept per query head for policies that observe; 0 for none.
        replaces: lanes may have a slot that their next token overwrites (the steady cadence).
        observe: settings of the fused R-KV pass, which attention then runs.
        state_slots: longest lane that the fused pass keeps a state of.
        states: of lanes at once, handed out by ``store.take_states``; None for all lanes of all
            rows. Memory is touched only when used.
        accumulates: what attention adds up in every slot (``attention_stats``): "sum", "per_head",
            or nothing.
        planes: what else is kept of every slot.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        blocks: int,
        rows: int,
        max_len: int,
        window: int = 0,
        replaces: bool = False,
        observe: _C.RkvSettings | None = None,
        state_slots: int = 0,
        states: int | None = None,
        accumulates: Literal["sum", "per_head"] | None = None,
        planes: Sequence[Plane] = (),
    ) -> None:
        self.shape = shape
        self.blocks = blocks
        self.window = window
        elements = ops.BLOCK_SLOTS * shape.head_dim
        max_blocks = ops.blocks_for(max_len)
        self.key_blocks = torch.empty((blocks, elements), dtype=shape.dtype)
        self.value_blocks = torch.empty((blocks, elements), dtype=shape.dtype)
        self.position = torch.empty((blocks, ops.BLOCK_SLOTS), dtype=torch.int32)
        table = (rows, shape.layers, shape.kv_heads, max_blocks)
        self.block_table = torch.zeros(table, dtype=torch.int32)
        self.lane_len = torch.zeros(table[:3], dtype=torch.int32)
        self.seq_len = torch.zeros(rows, dtype=torch.int32)
        ring = (rows, shape.layers, shape.q_heads, window, shape.head_dim)
        self.query_ring = torch.empty(ring, dtype=shape.dtype) if window else None
        no_slot = torch.tensor(_C.NO_REPLACE, dtype=torch.int32)
        self.replace = no_slot.expand(table[:3]).clone() if replaces else None
        self.observe = observe
        self.scale = shape.head_dim**-0.5  # of the attention, as last seen
        self._has_scale = False
        self._not_finite = torch.zeros(rows, dtype=torch.int32)
        self.states = self.state_bytes = 0
        self.lane_state = self.state_of = None
        if observe is not None:
            self.states = rows * shape.lanes if states is None else states
            self.state_bytes = _C.rkv_state_bytes(state_slots, window, shape.head_dim)
            self.lane_state = torch.empty((self.states, self.state_bytes), dtype=torch.uint8)
            self.state_of = torch.full(table[:3], -1, dtype=torch.int32)
        declared = list(planes)
        if accumulates is not None:
            declared.append(attention_plane(shape, accumulates))
        self.planes = {
            p.name: torch.empty((blocks, p.channels, ops.BLOCK_SLOTS), dtype=p.dtype)
            for p in declared
        }
        row_states = [("not_finite", self._not_finite, torch.zeros(1, dtype=torch.int32))]
        if self.replace is not None:
            row_states.append(("replace", self.replace, no_slot[None]))
        self.store = _C.KvStore(
            self.key_blocks,
            self.value_blocks,
            self.position,
            self.block_table,
            self.lane_len,
            self.seq_len,
            self.query_ring,
            shape.head_dim,
            planes=[(p.name, self.planes[p.name], p.starts()) for p in declared],
            row_states=row_states,
            lane_state=self.lane_state,
            state_of=self.state_of,
            state_slots=state_slots,
        )
        self._scratch_threads = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def extend(self, seqs: Sequence[int], counts: Sequence[int]) -> ops.RaggedBatch:
        """Make room for ``counts[i]`` new tokens of ``seqs[i]`` and say where they go.

        Raises:
            OutOfBlocks: the pool lacks blocks; nothing has changed.
            ValueError: a lane would outgrow ``max_len``, or a handle is not live.
        """
        self.store.extend(seqs, counts)
        return self.batch(seqs, counts)

    def batch(self, seqs: Sequence[int], counts: Sequence[int]) -> ops.RaggedBatch:
        """Where the newest ``counts[i]`` tokens of ``seqs[i]`` go, after the store was extended."""
        batch = ops.RaggedBatch(
            rows=torch.empty(len(seqs), dtype=torch.int32),
            cu_tokens=torch.empty(len(seqs) + 1, dtype=torch.int32),
            positions=torch.empty(sum(counts), dtype=torch.int64),
        )
        self.store.fill_batch(seqs, counts, batch.rows, batch.cu_tokens, batch.positions)
        return batch

    def update_and_attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: ops.RaggedBatch,
        scale: float,
    ) -> Tensor:
        """Append one layer's keys and values [tokens, kv_heads, head_dim], then attend.

        Returns [tokens, q_heads, head_dim].

        Raises:
            ValueError: the policy reads queries, which it weighs by one attention scale, and this
                layer's differs from another's; nothing of this layer has been appended.
        """
        if self.window:
            same = not self._has_scale or scale == self.scale
            require(same, "scale", f"one for all layers ({self.scale}) with this policy", scale)
        observed = query if self.window else None
        ops.append_kv(self.store, layer, key, value, observed, batch)
        self.scale, self._has_scale = scale, True
        return ops.attend(
            self.store,
            layer,
            query,
            batch,
            scale,
            self._attend_scratch(),
            self.observe,
            accumulate=ATTENTION_STATS in self.planes,
        )

    @property
    def stats_plane(self) -> Tensor | None:
        """f32 [blocks, channels, 16], or None: what ``attention_stats`` reads."""
        return self.planes.get(ATTENTION_STATS)

    def set_replace(self, seqs: Sequence[int], slots: Tensor) -> None:
        """Name the slot of every lane that its next token overwrites when it comes alone.

        Args:
            slots: i32 [seqs, layers, kv_heads], below the lane's length, or ``_C.NO_REPLACE`` for
                lanes that append.
        Raises:
            ValueError: a slot that is not live (names row, layer and kv head), or a cache that does
                not replace or whose attention elects; nothing has changed.
        """
        self.store.elect(seqs, slots)

    def _attend_scratch(self) -> Tensor:
        """Scratch for the present number of threads; never shrinks."""
        threads = _C.num_threads()
        if threads > self._scratch_threads:
            self._scratch, self._scratch_threads = ops.attend_scratch(self.store), threads
        return self._scratch

    def not_finite(self, seqs: Sequence[int]) -> list[int]:
        """For each sequence 1 + the smallest position whose key, value or query, or whose attention
        over what it sees, was not finite in some layer; 0 if there is none.
        """
        rows = self.store.rows(seqs)
        found: list[int] = self._not_finite[rows].tolist()
        return found

    def rows(self, seqs: Sequence[int]) -> Tensor:
        """i32 [seqs]: rows of the cache tensors."""
        return torch.tensor(self.store.rows(seqs), dtype=torch.int32)

    def longest_lane(self, seqs: Sequence[int]) -> int:
        """Slots of the longest lane of these sequences."""
        return max((self.store.max_lane_len(s) for s in seqs), default=0)

    def positions(self, seqs: Sequence[int]) -> Tensor:
        """i32 [seqs, layers, kv_heads, slots]: position held by each slot, -1 past a lane's end."""
        return self._gather(self.position, seqs, -1)

    def attention_stats(self, seqs: Sequence[int]) -> Tensor:
        """f32 [seqs, layers, kv_heads, channels, slots]: attention that each slot has got from the
        tokens that saw it since it was appended; -inf past a lane's end.

        ``accumulates="sum"``: one channel, the sum of means over the query heads of a kv head.
        ``"per_head"``: for each of these query heads the largest share that a token gave the slot,
        then for each the smallest, then for each the sum.
        """
        return self.plane(ATTENTION_STATS, seqs, -torch.inf)

    def plane(self, name: str, seqs: Sequence[int], missing: float = 0) -> Tensor:
        """[seqs, layers, kv_heads, channels, slots] of a plane; ``missing`` past a lane's end.

        Raises:
            ValueError: the cache keeps no plane of this name.
        """
        kept = ", ".join(self.planes) or "none"
        require(name in self.planes, "name", f"a plane of this cache ({kept})", name)
        return self._gather(self.planes[name].movedim(1, 0), seqs, missing).movedim(0, -2)

    def score_rkv(self, seqs: Sequence[int], **settings: Any) -> Tensor:
        """``ops.score_rkv`` of all lanes of these sequences."""
        return ops.score_rkv(self.store, *self._lanes(seqs), scale=self.scale, **settings)

    def score_tova(self, seqs: Sequence[int], *, protect: int) -> Tensor:
        """``ops.score_tova`` of all lanes of these sequences."""
        return ops.score_tova(self.store, *self._lanes(seqs), scale=self.scale, protect=protect)

    def score_keys(
        self, seqs: Sequence[int], *, kind: Literal["norm", "difference"], protect: int
    ) -> Tensor:
        """``ops.score_keys`` of all lanes of these sequences."""
        return ops.score_keys(self.store, *self._lanes(seqs), kind=kind, protect=protect)

    def score_random(self, seqs: Sequence[int], *, seed: int, protect: int) -> Tensor:
        """``ops.score_random`` of all lanes of these sequences."""
        return ops.score_random(self.store, *self._lanes(seqs), seed=seed, protect=protect)

    def _lanes(self, seqs: Sequence[int]) -> tuple[Tensor, tuple[int, int], int]:
        """Rows, (layers, kv_heads) and slots, as the scoring operations take them."""
        lanes = (self.shape.layers, self.shape.kv_heads)
        return self.rows(seqs), lanes, self.longest_lane(seqs)

    def _gather(self, plane: Tensor, seqs: Sequence[int], missing: float) -> Tensor:
        """[..., seqs, layers, kv_heads, slots] of ``plane`` [..., blocks, 16]; ``missing`` past the
        end.
        """
        slots = self.longest_lane(seqs)
        rows = self.rows(seqs).long()
        blocks = self.block_table[rows][..., : ops.blocks_for(slots)].long()
        live = torch.arange(slots) < self.lane_len[rows][..., None]
        flat = plane[..., blocks.clamp(0, self.blocks - 1), :].flatten(-2)[..., :slots]
        return flat.masked_fill(~live, missing)

    def bytes_of(self, seq: int) -> int:
        """Bytes of the blocks that this sequence holds, shared ones included, and of the states of
        its lanes.
        """
        blocks = self.store.num_blocks(seq) * self.shape.block_bytes
        return blocks + self.store.num_states(seq) * self.state_bytes

    def bytes_in_use(self) -> int:
        """Bytes of all blocks that some sequence holds, shared ones once, and of lane states."""
        blocks = (self.blocks - self.store.free_blocks()) * self.shape.block_bytes
        return blocks + (self.states - self.store.free_states()) * self.state_bytes
