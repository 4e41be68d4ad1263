"""Keys and logits that broke other kernels, by the number of their case: P12 and P13."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import rkv_oracle
from support.lanes import Lanes

from kvcore.native import _C


def fp16_lane(keys: torch.Tensor) -> tuple[Lanes, np.ndarray]:
    """A lane of half precision keys [n, 2, 16] and the queries that it remembers."""
    lanes = Lanes(
        kv_heads=2, q_heads=4, head_dim=16, window=8, max_slots=len(keys), dtype=torch.float16
    )
    query = torch.randn((len(keys), 4, 16), generator=torch.Generator().manual_seed(1)).half()
    lanes.append(keys, keys, query)
    return lanes, query[-8:].transpose(0, 1).double().numpy()


def test_p12_tiny_and_zero_keys_in_half_precision_score_finite_and_exact():
    keys = torch.randn((40, 2, 16), generator=torch.Generator().manual_seed(2)) * 1e-4
    keys[11] = 0
    keys = keys.half()
    assert keys.double().norm(dim=-1).max() < 1e-3
    lanes, query = fp16_lane(keys)
    score = lanes.score_rkv(protect=8, mix=0.1)[0]
    want = rkv_oracle.score(query, keys.transpose(0, 1).double().numpy(), 8, 0.1)
    assert torch.isfinite(score[:, :-8]).all()
    assert np.abs(score[:, :-8].double().numpy() - want).max() < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_p12_keys_that_are_not_finite_raise_before_anything_is_selected(bad):
    keys = torch.randn((40, 2, 16), generator=torch.Generator().manual_seed(2)).half()
    keys[17, 1, 3] = bad
    lanes, _ = fp16_lane(keys)
    with pytest.raises(ValueError, match=r"row 0, layer 0, kv head 1"):
        lanes.score_rkv(protect=8, mix=0.1)
    assert lanes.store.max_lane_len(lanes.seq) == 40


def attended(lanes: Lanes, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log of the softmax denominator) of the newest tokens."""
    out = torch.full_like(query, torch.nan)
    lse = torch.full(query.shape[:2], torch.nan)
    scratch = torch.empty(_C.attend_scratch_bytes(lanes.store), dtype=torch.uint8)
    ends = torch.tensor([0, len(query)], dtype=torch.int32)
    _C.attend(lanes.store, 0, query, out, lse, scratch, lanes.rows(), ends, 0.25)
    return out, lse


def float_lane(slots: int) -> tuple[Lanes, torch.Tensor, torch.Tensor]:
    """A lane of keys and values [slots, 2, 16], all entries in [0.5, 1.5]."""
    lanes = Lanes(kv_heads=2, q_heads=4, head_dim=16, window=0, max_slots=64)
    generator = torch.Generator().manual_seed(slots)
    key, value = torch.rand((2, slots, 2, 16), generator=generator) + 0.5
    lanes.append(key, value, None)
    return lanes, key, value


def test_p13_a_token_that_sees_no_slot_gets_zero():
    lanes, _, _ = float_lane(16)
    lanes.lane_len[lanes.rows().long()] = 0
    out, lse = attended(lanes, torch.ones(1, 4, 16))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_p13_logits_far_below_zero_still_make_a_distribution():
    lanes, key, value = float_lane(21)
    query = torch.full((1, 4, 16), -3e4)
    keys, values = (x.double().repeat_interleave(2, dim=1) for x in (key, value))
    logits = 0.25 * torch.einsum("hd,shd->hs", query[0].double(), keys)
    assert (logits < -5e4).all()
    out, lse = attended(lanes, query)
    torch.testing.assert_close(lse[0].double(), logits.logsumexp(-1), rtol=1e-6, atol=0)
    want = torch.einsum("hs,shd->hd", logits.softmax(-1), values)
    # Logits of 1e5 carry a rounding of 1e-2 in float, and so do probabilities.
    torch.testing.assert_close(out[0].double(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("slots", [1, 15, 17, 31, 33])
def test_p13_what_lies_behind_the_last_slot_is_never_read(slots):
    clean, _, _ = float_lane(slots)
    dirty, _, _ = float_lane(slots)
    for blocks in (dirty.key_blocks, dirty.value_blocks):
        blocks[torch.isnan(blocks)] = 1e3
    query = torch.randn((1, 4, 16), generator=torch.Generator().manual_seed(9))
    for mine, theirs in zip(attended(clean, query), attended(dirty, query), strict=True):
        assert torch.isfinite(mine).all() and torch.equal(mine, theirs)
