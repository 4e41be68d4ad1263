"""Writes rkv_small.npz beside this file: R-KV scores of small lanes, by the fp64 oracle.

Run from anywhere: python python_tests/data/make_rkv_small.py
"""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from support import rkv_oracle  # noqa: E402

KV_HEADS, DIM, WINDOW, KEEP = 2, 16, 8, 24
IN_BOTH = ("plain", "duplicates", "common")  # the other cases are stored as float32 only


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, ties to even, as uint16."""
    wide = x.astype(np.float32).view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def make_cases(rng: np.random.Generator) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """name -> (queries [q_heads, window, dim], keys [kv_heads, n, dim], mix)."""

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    cases = {"plain": (draw(6, WINDOW, DIM), draw(KV_HEADS, 50, DIM), 0.1)}

    keys = draw(KV_HEADS, 49, DIM)
    keys[:, 20:40] = keys[:, 5:25] + 0.1 * draw(KV_HEADS, 20, DIM)  # near duplicates
    keys[:, 7] = 0.0  # a key of norm zero
    keys[:, 11] *= 20.0
    cases["duplicates"] = (draw(4, WINDOW, DIM), keys, 0.1)

    loop = np.concatenate([draw(KV_HEADS, 6, DIM)] * 8, axis=1) + 0.05 * draw(KV_HEADS, 48, DIM)
    cases["loop"] = (draw(4, WINDOW, DIM), loop, 0.07)

    common = draw(KV_HEADS, 40, DIM) + 4.0 * draw(KV_HEADS, 1, DIM)  # nearly all pairs similar
    cases["common"] = (draw(2, WINDOW, DIM), common, 0.1)

    axes = np.tile(np.eye(DIM, dtype=np.float32), (KV_HEADS, 3, 1))[:, :33]
    signs = np.array([1, -1, 1], dtype=np.float32).repeat(DIM)[:33, None]
    cases["dissimilar"] = (draw(6, WINDOW, DIM), 0.3 * signs * axes, 0.5)

    cases["importance_only"] = (draw(4, WINDOW, DIM), draw(KV_HEADS, 47, DIM), 1.0)
    cases["redundancy_only"] = (draw(4, WINDOW, DIM), draw(KV_HEADS, 47, DIM), 0.0)
    cases["wide_window"] = (draw(4, 16, DIM), draw(KV_HEADS, 64, DIM), 0.1)
    return cases


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, (q, k, mix) in make_cases(np.random.default_rng(20240601)).items():
        for dtype in ("float32", "bfloat16") if name in IN_BOTH else ("float32",):
            stored = (q, k) if dtype == "float32" else (bf16_bits(q), bf16_bits(k))
            seen = stored if dtype == "float32" else tuple(from_bits(x) for x in stored)
            scores = rkv_oracle.score(*seen, protect=q.shape[1], mix=mix)
            kept, gap = rkv_oracle.kept_past(scores, KEEP)
            case = {"q": stored[0], "k": stored[1], "mix": np.float64(mix)}
            case |= {"score": scores, "kept": kept, "gap": gap}
            arrays |= {f"{name}-{dtype}-{field}": value for field, value in case.items()}
    np.savez_compressed(HERE / "rkv_small.npz", **arrays)


if __name__ == "__main__":
    main()
