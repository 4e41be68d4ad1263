"""The operations of the core on torch tensors: outputs and scratch are allocated here, never in
csrc.

Each function is a thin call into the extension; contracts (shapes, laws) stand in ``csrc/ops/*.h``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvcore.checks import require
from kvcore.native import _C

BLOCK_SLOTS = _C.BLOCK_SLOTS  # slots of one block
LINEAR_PANEL = 16  # outputs of a packed linear layer that lie together
_KEY_SCORES = {"norm": 0, "difference": 1}  # KeyScore of csrc/ops/score_keys.h


def blocks_for(slots: int) -> int:
    """Blocks that hold ``slots`` slots of one lane."""
    return -(-slots // BLOCK_SLOTS)


@dataclass(frozen=True)
class RaggedBatch:
    """Which tokens of a flattened batch belong to which row of the cache.

    Attributes:
        rows: i32 [seqs], rows of the cache tensors.
        cu_tokens: i32 [seqs + 1], token offsets.
        positions: i64 [tokens], position of each token in its sequence (RoPE).
    """

    rows: Tensor
    cu_tokens: Tensor
    positions: Tensor


def append_kv(
    store: _C.KvStore,
    layer: int,
    key: Tensor,
    value: Tensor,
    query: Tensor | None,
    batch: RaggedBatch,
) -> None:
    """Write keys and values [tokens, kv_heads, head_dim] into the newest slots of one layer."""
    _C.append_kv(store, layer, key, value, query, batch.rows, batch.cu_tokens)


def attend(
    store: _C.KvStore,
    layer: int,
    query: Tensor,
    batch: RaggedBatch,
    scale: float,
    scratch: Tensor,
    observe: _C.RkvSettings | None = None,
    *,
    accumulate: bool = False,
) -> Tensor:
    """Causal attention of ``query`` [tokens, q_heads, head_dim] over the cache; same shape out.

    With ``observe`` the pass also keeps the R-KV state of lanes whose token has overwritten a slot,
    and elects the slot that the next one overwrites; with ``accumulate`` it adds up the attention
    that every slot gets (csrc/ops/attend.h).
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _C.attend(
        store,
        layer,
        query,
        out,
        None,
        scratch,
        batch.rows,
        batch.cu_tokens,
        scale,
        observe,
        accumulate,
    )
    return out


def build_rkv_state(
    store: _C.KvStore, rows: Tensor, full: Tensor, observe: _C.RkvSettings, scale: float
) -> None:
    """State and election of the rows' lanes that hold ``full`` [layers, kv_heads] slots, from their
    keys and last queries (csrc/ops/build_rkv_state.h).
    """
    scratch = torch.empty(_C.build_rkv_state_scratch_bytes(store), dtype=torch.uint8)
    _C.build_rkv_state(store, rows, full.contiguous(), scratch, scale, observe)


def attend_scratch(store: _C.KvStore) -> Tensor:
    """u8 scratch of ``attend`` for the present number of threads; with less than for all of them
    it uses fewer. May be used for every layer and step.
    """
    return torch.empty(_C.attend_scratch_bytes(store), dtype=torch.uint8)


def score_rkv(
    store: _C.KvStore,
    rows: Tensor,
    lanes: tuple[int, int],
    slots: int,
    *,
    protect: int,
    kernel: int,
    mix: float,
    threshold: float,
    pool_first: bool,
    scale: float,
) -> Tensor:
    """R-KV score of every live slot, f32 [seqs, layers, kv_heads, slots]; higher is kept.

    Args:
        rows: i32 [seqs].
        lanes: (layers, kv_heads).
        slots: at least the longest lane of these rows.
        protect, kernel, mix, threshold, pool_first: as in ``EvictionConfig``.
        scale: of the attention, that of ``attend``.
    Raises:
        ValueError: a key or query is not finite; the message names row, layer and head.
    Source: R-KV (arXiv 2505.24133); csrc/ops/score_rkv.h.
    """
    score = torch.empty((len(rows), *lanes, slots), dtype=torch.float32)
    scratch = torch.empty(_C.score_rkv_scratch_bytes(store, slots), dtype=torch.uint8)
    _C.score_rkv(
        store, rows, score, scratch, protect, kernel, mix, threshold, pool_first, scale=scale
    )
    return score


def score_random(
    store: _C.KvStore, rows: Tensor, lanes: tuple[int, int], slots: int, *, seed: int, protect: int
) -> Tensor:
    """Uniform scores that depend on (seed, layer, head, position) only; shape as score_rkv."""
    score = torch.empty((len(rows), *lanes, slots), dtype=torch.float32)
    _C.score_random(store, rows, score, seed, protect)
    return score


def score_keys(
    store: _C.KvStore,
    rows: Tensor,
    lanes: tuple[int, int],
    slots: int,
    *,
    kind: Literal["norm", "difference"],
    protect: int,
) -> Tensor:
    """Scores from the keys alone; shape as score_rkv.

    Args:
        kind: "norm" is -|k| (Knorm, arXiv 2406.11430); "difference" is -cos(k, mean of the lane's
            unit keys) (KeyDiff, arXiv 2504.15364).
    Raises:
        ValueError: a key is not finite; the message names row, layer and head.
    """
    require(kind in _KEY_SCORES, "kind", f"one of {', '.join(_KEY_SCORES)}", kind)
    score = torch.empty((len(rows), *lanes, slots), dtype=torch.float32)
    _C.score_keys(store, rows, score, _KEY_SCORES[kind], protect)
    return score


def score_tova(
    store: _C.KvStore,
    rows: Tensor,
    lanes: tuple[int, int],
    slots: int,
    *,
    protect: int,
    scale: float,
) -> Tensor:
    """Attention of the newest query, averaged over the layer's query heads; shape as score_rkv.

    Args:
        scale: of the attention, that of ``attend``.
    Raises:
        ValueError: a key or query is not finite; the message names row, layer and head.
    Source: TOVA (arXiv 2401.06104); csrc/ops/score_tova.h.
    """
    score = torch.empty((len(rows), *lanes, slots), dtype=torch.float32)
    _C.score_tova(store, rows, score, protect, scale=scale)
    return score


def select_slots(
    store: _C.KvStore, rows: Tensor, score: Tensor, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """Slots to drop so that ``keep`` [seqs, layers, kv_heads] (i32) remain in each lane.

    Returns:
        (drop i32 [seqs, layers, kv_heads, slots], drop_count i32 [seqs, layers, kv_heads]).
    """
    drop = torch.empty(score.shape, dtype=torch.int32)
    drop_count = torch.empty(score.shape[:3], dtype=torch.int32)
    _C.select_slots(store, rows, score, keep, drop, drop_count)
    return drop, drop_count


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, *, gated: bool = False
) -> Tensor:
    """``x`` [rows, inputs] through packed ``weight`` [panels, inputs, 16]: f32 [rows, outputs].

    Args:
        x: f32; weight: f32 or bf16; bias: f32 [panels, 16] or None.
        gated: even panels are gates of the odd ones: silu(gate) * up.
    Source: csrc/ops/linear.h. Weights are packed by ``kvcore.models.prepack``.
    """
    out = torch.empty((len(x), outputs), dtype=torch.float32)
    _C.linear(x, weight, bias, out, gated)
    return out


@dataclass(frozen=True)
class Samples:
    """Tokens drawn: i64 [rows] (-1: no finite distribution), entropy and logprob f32 [rows],
    nats.
    """

    token: Tensor
    entropy: Tensor
    logprob: Tensor


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    rng_key: Tensor,
    rng_counter: Tensor,
    vocab: int,
) -> Samples:
    """Draw one token per row of ``logits`` [rows, columns] and measure the raw distribution.

    Args:
        temperature, top_p, min_p: f32 [rows]; top_k: i32 [rows]; 0 = off for min_p and top_k.
        rng_key, rng_counter: i64 [rows]; the draw is a pure function of both.
        vocab: ids at or above are never sampled nor counted in the entropy.
    Source: csrc/ops/sample_tokens.h.
    """
    rows, columns = logits.shape
    token = torch.empty(rows, dtype=torch.int64)
    entropy = torch.empty(rows, dtype=torch.float32)
    logprob = torch.empty(rows, dtype=torch.float32)
    scratch = torch.empty(_C.sample_tokens_scratch_bytes(columns), dtype=torch.uint8)
    _C.sample_tokens(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        rng_key,
        rng_counter,
        token,
        entropy,
        logprob,
        scratch,
        vocab,
    )
    return Samples(token, entropy, logprob)
