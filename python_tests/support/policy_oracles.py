"""What each policy should score, in double, from the keys and queries of one layer.

Every function takes
    keys [kv_heads][n, dim]   of the entries held, oldest first
    queries [q_heads, tokens, dim]   of all tokens so far
    positions [n]   of the entries held
    config   EvictionConfig; its ``protect`` newest entries are not scored
    scale    of the attention
and returns [kv_heads, n - protect]. Sources: kvcore/policies/<name>.py.
"""

import math

import numpy as np

from support import rkv_oracle


def streamingllm(keys, queries, positions, config, scale):
    past = positions[: len(positions) - config.protect]
    score = np.where(past < 4, 1e9, past.astype(float))
    return np.stack([score] * len(keys))


def knorm(keys, queries, positions, config, scale):
    past = len(positions) - config.protect
    return np.array([[-math.sqrt(float(k @ k)) for k in head[:past]] for head in keys])


def keydiff(keys, queries, positions, config, scale):
    past = len(positions) - config.protect
    rows = []
    for head in keys:
        unit = [k / (math.sqrt(float(k @ k)) + 1e-8) for k in head]  # a key may be zero
        mean = sum(unit) / len(unit)
        mean = mean / math.sqrt(float(mean @ mean))
        rows.append([-float(u @ mean) for u in unit[:past]])
    return np.array(rows)


def attention(keys, query, head, kv_heads, scale):
    """[n]: what ``query`` [q_heads, dim] gives each of ``keys`` [n, dim] of a kv head, a mean over
    its query heads.
    """
    group = len(query) // kv_heads
    total = np.zeros(len(keys))
    for q in query[head * group : (head + 1) * group]:
        logit = scale * np.array([float(q @ k) for k in keys])
        weight = np.exp(logit - logit.max())
        total += weight / weight.sum() / group
    return total


def tova(keys, queries, positions, config, scale):
    past = len(positions) - config.protect
    q_heads = len(queries)
    group = q_heads // len(keys)
    total = np.zeros(len(positions))
    for h in range(q_heads):
        logit = scale * np.array([float(queries[h, -1] @ k) for k in keys[h // group]])
        weight = np.exp(logit - logit.max())
        total += weight / weight.sum() / q_heads
    return np.stack([total[:past]] * len(keys))


def rkv(keys, queries, positions, config, scale, mix=None):
    window = queries[:, -config.window :]
    mix = config.mix if mix is None else mix
    threshold = getattr(config, "threshold", 0.5)  # of nothing where mix is 1
    settings = (config.protect, mix, config.kernel, threshold, config.pool_first)
    return rkv_oracle.score(window, np.stack(keys), *settings, scale)


def snapkv(keys, queries, positions, config, scale):
    return rkv(keys, queries, positions, config, scale, mix=1.0)


ORACLES = {
    "keydiff": keydiff,
    "knorm": knorm,
    "rkv": rkv,
    "snapkv": snapkv,
    "streamingllm": streamingllm,
    "tova": tova,
}
