"""R-KV scoring of one kv head in double precision, written as loops over the definition.

Source: R-KV (arXiv 2505.24133) as in the released code: max over the group before the softmax,
softmax over past keys only, mean over the window's queries, then max-pool (before the mean with
pool_first, as in the paper's eq. 4); redundancy over all keys, with the newest similar entry of
every row set to zero (column 0 where there is none).
"""

import math

import numpy as np

EPSILON = 1e-8


def max_pool(x: np.ndarray, kernel: int) -> np.ndarray:
    half = kernel // 2
    return np.array([x[max(0, r - half) : r + half + 1].max() for r in range(len(x))])


def importance(
    q: np.ndarray,
    k: np.ndarray,
    protect: int,
    kernel: int,
    pool_first: bool = False,
    scale: float | None = None,
) -> np.ndarray:
    """q [group, window, dim], k [n, dim] in order of position; returns [n - protect].

    scale: of the attention; 1 / sqrt(dim) by default.
    """
    group, window, dim = q.shape
    scale = 1 / math.sqrt(dim) if scale is None else scale
    past = len(k) - protect
    mean = np.zeros(past)
    for t in range(window):
        logit = np.full(past, -math.inf)
        for g in range(group):
            for r in range(past):
                logit[r] = max(logit[r], scale * float(q[g, t] @ k[r]))
        weight = np.exp(logit - logit.max())
        weight /= weight.sum()
        mean += (max_pool(weight, kernel) if pool_first else weight) / window
    return mean if pool_first else max_pool(mean, kernel)


def redundancy(k: np.ndarray, threshold: float) -> np.ndarray:
    """k [n, dim]; returns [n], which sums to 1."""
    n = len(k)
    unit = [row / (math.sqrt(float(row @ row)) + EPSILON) for row in k]
    column_sum = np.zeros(n)
    for r in range(n):
        row = np.array([0.0 if j == r else float(unit[r] @ unit[j]) for j in range(n)])
        newest_similar = 0
        for j in range(n):
            if row[j] > threshold:
                newest_similar = j
        row[newest_similar] = 0.0
        column_sum += row
    weight = np.exp(column_sum / n - (column_sum / n).max())
    return weight / weight.sum()


def score(
    q: np.ndarray,
    k: np.ndarray,
    protect: int,
    mix: float,
    kernel: int = 7,
    threshold: float = 0.5,
    pool_first: bool = False,
    scale: float | None = None,
) -> np.ndarray:
    """Scores [kv_heads, n - protect] from q [q_heads, window, dim] and k [kv_heads, n, dim]."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    kv_heads = len(k)
    grouped = q.reshape(kv_heads, len(q) // kv_heads, *q.shape[1:])
    rows = []
    for h in range(kv_heads):
        past = len(k[h]) - protect
        wanted = importance(grouped[h], k[h], protect, kernel, pool_first, scale)
        rows.append(mix * wanted - (1 - mix) * redundancy(k[h], threshold)[:past])
    return np.stack(rows)


def kept_past(scores: np.ndarray, keep: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``keep`` best of each row, ascending, and the gap in score at the cut.

    Equal scores keep the newer.
    """
    ids, gaps = [], []
    for row in scores:
        order = sorted(range(len(row)), key=lambda r: (-row[r], -r))
        ids.append(sorted(order[:keep]))
        gaps.append(row[order[keep - 1]] - row[order[keep]])
    return np.array(ids), np.array(gaps)
