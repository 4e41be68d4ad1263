"""One sequence in a bare KvStore, its tensors poisoned wherever nothing was written."""

import torch
from torch import Tensor

from kvcore.native import _C

BLOCK_SLOTS = _C.BLOCK_SLOTS
HUGE_ID = 2**30


class Lanes:
    """The tensors of a store with the given shape, and one live sequence ``seq``.

    Floats start as NaN and table entries as a huge id, so that reading what is not live shows.
    """

    def __init__(
        self,
        *,
        kv_heads: int,
        q_heads: int,
        head_dim: int,
        window: int,
        max_slots: int,
        layers: int = 1,
        rows: int = 2,
        blocks: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layers, self.kv_heads = layers, kv_heads
        max_blocks = -(-max_slots // BLOCK_SLOTS)
        if blocks is None:
            blocks = rows * layers * kv_heads * max_blocks
        self.key_blocks = torch.full((blocks, BLOCK_SLOTS * head_dim), torch.nan, dtype=dtype)
        self.value_blocks = torch.full_like(self.key_blocks, torch.nan)
        self.position = torch.full((blocks, BLOCK_SLOTS), HUGE_ID, dtype=torch.int32)
        shape = (rows, layers, kv_heads)
        self.block_table = torch.full((*shape, max_blocks), HUGE_ID, dtype=torch.int32)
        self.lane_len = torch.full(shape, HUGE_ID, dtype=torch.int32)
        self.seq_len = torch.full((rows,), HUGE_ID, dtype=torch.int32)
        ring = (rows, layers, q_heads, window, head_dim)
        self.query_ring = torch.full(ring, torch.nan, dtype=dtype) if window else None
        self.store = _C.KvStore(
            key_blocks=self.key_blocks,
            value_blocks=self.value_blocks,
            position=self.position,
            block_table=self.block_table,
            lane_len=self.lane_len,
            seq_len=self.seq_len,
            query_ring=self.query_ring,
            head_dim=head_dim,
        )
        self.seq = self.store.create()

    def rows(self) -> Tensor:
        return torch.tensor(self.store.rows([self.seq]), dtype=torch.int32)

    def extend(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Make room; returns (rows, cu_tokens, positions)."""
        self.store.extend([self.seq], [tokens])
        rows = torch.empty(1, dtype=torch.int32)
        cu_tokens = torch.empty(2, dtype=torch.int32)
        positions = torch.empty(tokens, dtype=torch.int64)
        self.store.fill_batch([self.seq], [tokens], rows, cu_tokens, positions)
        return rows, cu_tokens, positions

    def append(self, key: Tensor, value: Tensor, query: Tensor | None, layer: int = 0) -> None:
        """Extend by key [tokens, kv_heads, head_dim] and store it. Only for stores of one layer."""
        rows, cu_tokens, _ = self.extend(len(key))
        _C.append_kv(self.store, layer, key, value, query, rows, cu_tokens)

    def score_rkv(
        self, *, protect: int, mix: float, kernel: int = 7, threshold: float = 0.5
    ) -> Tensor:
        """f32 [layers, kv_heads, slots]."""
        slots = self.store.max_lane_len(self.seq)
        score = torch.full((1, self.layers, self.kv_heads, slots), torch.nan)
        scratch = torch.empty(_C.score_rkv_scratch_bytes(self.store, slots), dtype=torch.uint8)
        _C.score_rkv(
            self.store, self.rows(), score, scratch, protect, kernel, mix, threshold=threshold
        )
        return score[0]

    def evict(self, score: Tensor, keep: int) -> int:
        """Keep the ``keep`` best slots of every lane; returns slots dropped."""
        score = score[None]
        wanted = torch.full(score.shape[:3], keep, dtype=torch.int32)
        drop = torch.full(score.shape, HUGE_ID, dtype=torch.int32)
        drop_count = torch.full(score.shape[:3], HUGE_ID, dtype=torch.int32)
        _C.select_slots(self.store, self.rows(), score, wanted, drop, drop_count)
        dropped = self.store.evict([self.seq], drop, drop_count)
        self.store.check_integrity()
        return dropped

    def positions(self, layer: int = 0) -> Tensor:
        """i64 [kv_heads, slots]: position of every live slot; all heads must be equally long."""
        row = self.store.row(self.seq)
        lanes = []
        for head in range(self.kv_heads):
            length = int(self.lane_len[row, layer, head])
            blocks = self.block_table[row, layer, head, : -(-length // BLOCK_SLOTS)].long()
            lanes.append(self.position[blocks].flatten()[:length].long())
        return torch.stack(lanes)


def small_lanes(**changes: int) -> Lanes:
    settings = {"kv_heads": 2, "q_heads": 4, "head_dim": 8, "window": 4, "max_slots": 64}
    return Lanes(**(settings | changes))
