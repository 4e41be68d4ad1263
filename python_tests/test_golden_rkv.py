"""R-KV against numbers computed elsewhere, through the extension.

python_tests/data/rkv_small.npz comes from the fp64 oracle in support/. The larger vectors, if they
are there, come from the authors' released code and an independent fp64 recomputation.

Tolerances: scores 1e-6, the difference between float and double over these sizes; kept sets are
equal where the gap at the cut exceeds that.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from support import rkv_oracle
from support.lanes import Lanes

from kvcore import ops
from kvcore.cache import CacheShape, KVCache
from kvcore.config import EvictionConfig
from kvcore.policies import evict, make_policy

HERE = Path(__file__).resolve().parent
SMALL = np.load(HERE / "data" / "rkv_small.npz")
SMALL_CASES = sorted({name.rsplit("-", 1)[0] for name in SMALL.files})
VECTORS = HERE.parent.parent / "shared" / "vectors"

needs_vectors = pytest.mark.skipif(not VECTORS.is_dir(), reason="no folder of golden vectors")


def to_tensor(x: np.ndarray) -> torch.Tensor:
    """bfloat16 arrays are stored as their bits."""
    if x.dtype == np.uint16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.astype(np.float32))


def fill_lane(q: np.ndarray, k: np.ndarray, chunks: tuple[int, ...] = ()) -> Lanes:
    """A lane holding all of k [kv_heads, n, dim] whose ring holds q [q_heads, window, dim]."""
    queries, keys = to_tensor(q), to_tensor(k)
    (q_heads, window, dim), (kv_heads, n, _) = queries.shape, keys.shape
    lanes = Lanes(
        kv_heads=kv_heads,
        q_heads=q_heads,
        head_dim=dim,
        window=window,
        max_slots=n,
        dtype=keys.dtype,
    )
    # Queries before the window are poison: the ring must hold the last ones only.
    every_query = torch.full((n, q_heads, dim), torch.nan, dtype=keys.dtype)
    every_query[n - window :] = queries.transpose(0, 1)
    values = torch.randn((n, kv_heads, dim), generator=torch.Generator().manual_seed(7))
    begin = 0
    for count in (*chunks, n - sum(chunks)):
        part = slice(begin, begin + count)
        key = keys.transpose(0, 1)[part]
        lanes.append(key, values[part].to(keys.dtype), every_query[part])
        begin += count
    return lanes


def check_scores(got: torch.Tensor, want: np.ndarray, protect: int) -> None:
    """got [kv_heads, n]: the past within 1e-6, the protected tail at +inf."""
    past = got.shape[1] - protect
    assert np.abs(got[:, :past].double().numpy() - want).max() < 1e-6
    assert torch.all(got[:, past:] == torch.inf)


def check_kept(lanes: Lanes, want: np.ndarray, gap: np.ndarray, protect: int) -> None:
    """Kept positions are want [kv_heads, keep] and the window, wherever the cut is decidable."""
    positions = lanes.positions().sort(dim=1).values.numpy()
    n = lanes.store.seq_len(lanes.seq)
    assert np.all(gap > -1e-12)
    for head in range(len(want)):
        kept, window = positions[head][:-protect], positions[head][-protect:]
        assert list(window) == list(range(n - protect, n))
        if gap[head] > 1e-6:
            assert list(kept) == list(want[head])


def check_kept_modulo_ties(
    positions: torch.Tensor, want: np.ndarray, keep: int, protect: int
) -> None:
    """Every kept score reaches the cut and no dropped one exceeds it, up to 1e-6."""
    positions = positions.sort(dim=1).values.numpy()
    for head in range(len(want)):
        kept = positions[head][:-protect]
        assert len(set(kept)) == keep
        cut = np.sort(want[head])[-keep]
        dropped = np.setdiff1d(np.arange(want.shape[1]), kept)
        assert want[head][kept].min() >= cut - 1e-6
        assert want[head][dropped].max(initial=-np.inf) <= cut + 1e-6


@pytest.mark.parametrize("case", SMALL_CASES)
@pytest.mark.parametrize("chunks", [(), (1, 15, 3)], ids=["whole", "chunks"])
def test_small_scores_and_kept_sets_equal_the_oracle(case: str, chunks: tuple[int, ...]) -> None:
    q, k, mix = (SMALL[f"{case}-{field}"] for field in ("q", "k", "mix"))
    window, keep = q.shape[1], SMALL[f"{case}-kept"].shape[1]
    lanes = fill_lane(q, k, chunks)
    score = lanes.score_rkv(protect=window, mix=float(mix))
    check_scores(score[0], SMALL[f"{case}-score"], window)
    dropped = lanes.evict(score, keep + window)
    assert dropped == len(k) * (k.shape[1] - keep - window)
    check_kept(lanes, SMALL[f"{case}-kept"], SMALL[f"{case}-gap"], window)


@pytest.mark.parametrize("case", SMALL_CASES)
def test_small_file_still_follows_from_the_oracle(case: str) -> None:
    q, k, mix = (SMALL[f"{case}-{field}"] for field in ("q", "k", "mix"))
    q64, k64 = (to_tensor(x).double().numpy() for x in (q, k))
    want = rkv_oracle.score(q64, k64, q.shape[1], float(mix))
    assert np.abs(want - SMALL[f"{case}-score"]).max() < 1e-12


def test_small_file_decides_most_cuts() -> None:
    gaps = np.concatenate([SMALL[f"{case}-gap"] for case in SMALL_CASES])
    assert (gaps > 1e-6).mean() > 0.6  # max-pool makes exact ties; the rest compares sets


@needs_vectors
@pytest.mark.parametrize("letter", "abcdefghij")
def test_released_code_vectors(letter: str) -> None:
    (path,) = VECTORS.glob(f"rkv_{letter}_*.npz")
    z = np.load(path)
    _, _, _, window, budget, kernel, _ = (int(x) for x in z["meta"])
    lanes = fill_lane(z["q"], z["k"])

    pooled = lanes.score_rkv(protect=window, kernel=kernel, mix=1.0)
    check_scores(pooled[0], z["ref64_importance_pooled"], window)
    redundancy = -lanes.score_rkv(protect=window, kernel=kernel, mix=0.0)[0]
    past = z["ref64_final"].shape[1]
    assert np.abs(redundancy[:, :past].numpy() - z["ref64_redundancy"][:, :past]).max() < 1e-6

    score = lanes.score_rkv(protect=window, kernel=kernel, mix=float(z["lam"]))
    check_scores(score[0], z["ref64_final"], window)
    if z["q"].dtype == np.float32:
        check_scores(score[0], z["final"], window)
    lanes.evict(score, budget)
    check_kept(lanes, z["ref64_kept_past_sorted"], z["ref64_gap"], window)
    overlap = [
        len(np.intersect1d(mine, theirs)) / len(theirs)
        for mine, theirs in zip(lanes.positions().numpy(), z["kept_past_sorted"], strict=True)
    ]
    # The released code scores in bfloat16, which ties many scores at the cut.
    assert min(overlap) >= (1.0 if z["q"].dtype == np.float32 else 0.96)


@needs_vectors
def test_three_rounds_keep_the_same_tokens_in_order_of_position() -> None:
    z = np.load(VECTORS / "rkv_seq_fp32_3rounds.npz")
    kv_heads, _, total, window, budget, kernel, step = (int(x) for x in z["meta"])
    q, k = to_tensor(z["q"]).transpose(0, 1), to_tensor(z["k"]).transpose(0, 1)
    lanes = Lanes(
        kv_heads=kv_heads,
        q_heads=q.shape[1],
        head_dim=q.shape[2],
        window=window,
        max_slots=budget + step,
    )
    lanes.append(k[:budget], k[:budget], q[:budget])
    rounds = 0
    for end in range(budget + step, total + 1, step):
        part = slice(end - step, end)
        lanes.append(k[part], k[part], q[part])
        order = lanes.positions().argsort(dim=1)
        score = lanes.score_rkv(protect=window, kernel=kernel, mix=float(z["lam"]))
        by_position = score[0].gather(1, order)
        check_scores(by_position, z[f"sorted_round{rounds}_final"], window)
        lanes.evict(score, budget)
        kept = lanes.positions().sort(dim=1).values
        assert np.array_equal(kept.numpy(), z[f"sorted_round{rounds}_tokens"])
        rounds += 1
    assert rounds == 3


@needs_vectors
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_snapkv_is_rkv_with_importance_only(dtype: str) -> None:
    (path,) = VECTORS.glob(f"snapkv_decode_{dtype}_*.npz")
    z = np.load(path)
    window, budget, kernel = (int(x) for x in z["meta"][3:6])
    lanes = fill_lane(z["q"], z["k"])
    score = lanes.score_rkv(protect=window, kernel=kernel, mix=1.0)
    past = z["score"].shape[1]
    heads = len(z["k"])
    q64, k64 = (to_tensor(z[x]).double().numpy() for x in ("q", "k"))
    grouped = q64.reshape(heads, -1, *q64.shape[1:])
    want = np.stack(
        [rkv_oracle.importance(grouped[h], k64[h], window, kernel) for h in range(heads)]
    )
    check_scores(score[0], want, window)
    # In the bf16 file logits and probabilities went through bfloat16, 8 bits each.
    tolerance = 1e-6 if dtype == "fp32" else 2**-6 * z["score"].max()
    assert np.abs(score[0, :, :past].numpy() - z["score"]).max() < tolerance
    lanes.evict(score, budget)
    check_kept_modulo_ties(lanes.positions(), want, budget - window, window)


@needs_vectors
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_snapkv_policy_keeps_what_the_released_code_keeps(dtype: str) -> None:
    (path,) = VECTORS.glob(f"snapkv_decode_{dtype}_*.npz")
    z = np.load(path)
    q, k = to_tensor(z["q"]), to_tensor(z["k"])
    heads, _, n, window, budget, kernel = (int(x) for x in z["meta"])
    shape = CacheShape(1, len(q), heads, q.shape[2], k.dtype)
    cache = KVCache(shape, blocks=heads * n, rows=1, max_len=n, window=window)
    seq = cache.store.create()
    batch = cache.extend([seq], [n])
    queries = torch.full((n, len(q), q.shape[2]), torch.nan, dtype=q.dtype)
    queries[n - window :] = q.transpose(0, 1)
    key = k.transpose(0, 1)
    ops.append_kv(cache.store, 0, key, torch.zeros_like(key), queries, batch)
    config = EvictionConfig(
        "snapkv", budget=budget - window, protect=window, window=window, kernel=kernel
    )
    assert evict(make_policy(config), cache, [seq], [n]) == heads * (n - budget)

    positions = cache.positions([seq])[0, 0]
    theirs = z["kept_past_topk_order"]
    overlap = []
    for head in range(heads):
        mine = positions[head].sort().values.numpy()
        assert list(mine[-window:]) == list(range(n - window, n))
        overlap.append(len(np.intersect1d(mine[:-window], theirs[head])) / (budget - window))
    # Max-pool makes exact ties at the cut, of which topk keeps any; bfloat16 makes more.
    assert min(overlap) >= 0.96
    if dtype == "fp32":
        check_kept_modulo_ties(positions, z["score"], budget - window, window)
