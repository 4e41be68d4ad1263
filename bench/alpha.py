"""What eviction costs on top of attention: alpha of the fused R-KV pass.

    python bench/alpha.py --json alpha.json

alpha = (attend with the R-KV state kept and a slot elected - plain attend) / plain attend, for one
decode token of bf16 lanes with head_dim 128, nine of ten key pairs similar as in real models
(docs/results/real_keys.md): the median over tokens that are attended to both ways in turn. "warm":
the lanes stay in cache; "cold": every call reads other lanes, more than any cache holds; a layer's
token is appended just before, as in decoding. Beside it, on the same keys: the sawtooth (one direct
scoring per headroom tokens), direct scoring for every token, and the released algorithm in plain
torch operations. Elections are compared with direct scoring before anything is timed. One thread
unless --threads says otherwise. The last lines are alpha.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvcore import ops
from kvcore.cache import CacheShape, KVCache
from kvcore.files import write_json
from kvcore.native import _C, set_threads

HEAD_DIM, WINDOW, KV_HEADS = 128, 8, 2
HEADROOM = 120  # tokens between two events of the sawtooth with budget + 8 protected, at + 128


class Lanes:
    """Full lanes of one sequence, layer by layer, with random keys around a common mean.

    Args:
        observed: the fused pass keeps their state and elects; else any slot of the past goes.
    """

    def __init__(
        self, slots: int, group: int, layers: int, protect: int, *, observed: bool
    ) -> None:
        q_heads = KV_HEADS * group
        self.shape = CacheShape(layers, q_heads, KV_HEADS, HEAD_DIM, torch.bfloat16)
        self.slots, self.layers, self.protect = slots, layers, protect
        self.observed = observed
        self.settings = _C.RkvSettings(protect, 7, 0.1, 0.5)
        per_lane = -(-slots // ops.BLOCK_SLOTS)
        self.cache = KVCache(
            self.shape,
            blocks=layers * KV_HEADS * per_lane,
            rows=1,
            max_len=slots,
            window=WINDOW,
            replaces=True,
            observe=self.settings if observed else None,
            state_slots=slots if observed else 0,
        )
        self.scale = HEAD_DIM**-0.5
        self.mean = 1.2 * torch.randn(layers, 1, KV_HEADS, HEAD_DIM)
        self.seq = self.cache.store.create()
        self.batch = self.cache.extend([self.seq], [slots])
        for layer in range(layers):
            self.append(layer, slots)
        self.tokens = 0
        if observed:
            rows = self.cache.rows([self.seq])
            full = torch.full((layers, KV_HEADS), slots, dtype=torch.int32)
            self.cache.store.take_states([self.seq], full)
            ops.build_rkv_state(self.cache.store, rows, full, self.settings, self.scale)

    def append(self, layer: int, count: int) -> Tensor:
        """Returns the newest query, [1, q_heads, head_dim]."""
        key = torch.randn(count, KV_HEADS, HEAD_DIM) + self.mean[layer]
        value = torch.randn(count, KV_HEADS, HEAD_DIM)
        query = torch.randn(count, self.shape.q_heads, HEAD_DIM).bfloat16()
        store = self.cache.store
        ops.append_kv(store, layer, key.bfloat16(), value.bfloat16(), query, self.batch)
        return query[-1:]

    def token(self) -> float:
        """Takes in one token in all layers. Returns a layer's mean time to attend, in seconds."""
        if not self.observed:
            self.tokens += 1
            slot = self.tokens * 7 % (self.slots // 4)
            lanes = torch.full((1, self.layers, KV_HEADS), slot, dtype=torch.int32)
            self.cache.set_replace([self.seq], lanes)
        self.batch = self.cache.extend([self.seq], [1])
        seconds = 0.0
        for layer in range(self.layers):
            query = self.append(layer, 1)
            begin = time.perf_counter()
            self.out = self.attend(layer, query, observed=self.observed)
            seconds += time.perf_counter() - begin
            self.query = query
        return seconds / self.layers

    def attend(self, layer: int, query: Tensor, *, observed: bool) -> Tensor:
        observe = self.settings if observed else None
        scratch = self.cache._attend_scratch()
        store = self.cache.store
        return ops.attend(store, layer, query, self.batch, self.scale, scratch, observe)

    def direct_scores(self) -> Tensor:
        return ops.score_rkv(
            self.cache.store,
            self.cache.rows([self.seq]),
            (self.layers, KV_HEADS),
            self.slots,
            protect=self.protect,
            kernel=7,
            mix=0.1,
            threshold=0.5,
            pool_first=False,
            scale=self.scale,
        )

    def check(self) -> None:
        """Elections and outputs equal those of direct scoring and plain attention."""
        for _ in range(3):
            self.token()
            plain = self.attend(self.layers - 1, self.query, observed=False)
            if not torch.equal(plain, self.out):
                raise SystemExit("error: the observed pass attends to something else")
        score = self.direct_scores()[0]
        elected = self.cache.replace[0].long()
        chosen = score.gather(-1, elected[..., None])[..., 0]
        if not (chosen - score.min(-1).values < 1e-6).all():
            raise SystemExit("error: the fused pass elects other slots than direct scoring")


def released_in_torch(key: Tensor, query: Tensor, protect: int) -> Tensor:
    """R-KV's scoring as its authors run it, in torch operations, for one sequence and layer.

    key [kv_heads, n, dim], query [kv_heads, group, window, dim], in the model's dtype.
    """
    n = key.shape[1]
    logits = (query @ key[:, None].transpose(-1, -2)) / math.sqrt(key.shape[-1])
    logits = logits.max(1).values[..., : n - protect]
    weight = logits.float().softmax(-1).to(key.dtype).mean(-2)
    pooled = torch.nn.functional.max_pool1d(weight, 7, padding=3, stride=1)
    unit = key / (key.norm(dim=-1, keepdim=True) + 1e-8)
    similar = unit @ unit.transpose(-1, -2)
    similar.diagonal(dim1=-2, dim2=-1).fill_(0)
    place = torch.where(similar > 0.5, torch.arange(n), 0)
    similar.scatter_(-1, place.max(-1, keepdim=True).values, 0)
    redundancy = similar.mean(-2).softmax(-1)[..., : n - protect]
    return (0.1 * pooled - 0.9 * redundancy).argmin(-1)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(slots: int, group: int, *, cold: bool, repeats: int) -> dict[str, float]:
    """Seconds per layer of one sequence, medians over ``repeats`` tokens."""
    protect = min(128, slots // 2)
    bytes_per_layer = 2 * KV_HEADS * slots * HEAD_DIM * 2
    layers = max(8, 400_000_000 // bytes_per_layer) if cold else 2
    plain_lanes, lanes = (
        Lanes(slots, group, layers, protect, observed=observed) for observed in (False, True)
    )
    lanes.check()
    plain, observed = [], []
    for _ in range(repeats):
        plain.append(plain_lanes.token())
        observed.append(lanes.token())
    direct = [timed(lanes.direct_scores) / layers for _ in range(5)]
    key = torch.randn(KV_HEADS, slots, HEAD_DIM).bfloat16()
    query = torch.randn(KV_HEADS, group, WINDOW, HEAD_DIM).bfloat16()
    released = [timed(lambda: released_in_torch(key, query, protect)) for _ in range(9)]
    return {
        "attend": statistics.median(plain),
        "observed": statistics.median(observed),
        "alpha": statistics.median(o / p for o, p in zip(observed, plain, strict=True)) - 1,
        "direct": statistics.median(direct),
        "released_in_torch": statistics.median(released),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--repeats", type=int, default=60, help="tokens")
    add("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.repeats < 2 or args.threads < 1:
        parser.error("--repeats: expected >= 2, --threads: expected >= 1")
    torch.manual_seed(0)
    set_threads(args.threads)
    rows = []
    print(
        "| slots | group | cache | attend us | observed us | alpha | sawtooth alpha | "
        "direct per token | released, torch |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for slots in (192, 640):
        for group in (6, 7):
            for cold in (False, True):
                found = measure(slots, group, cold=cold, repeats=args.repeats)
                base = found["attend"]
                saw = found["direct"] / HEADROOM / base
                row = {"slots": slots, "group": group, "cache": "cold" if cold else "warm"}
                rows.append({**row, **found, "sawtooth_alpha": saw})
                print(
                    f"| {slots} | {group} | {row['cache']} | {base * 1e6:.1f} | "
                    f"{found['observed'] * 1e6:.1f} | {found['alpha']:.3f} | {saw:.3f} | "
                    f"{found['direct'] / base:.1f} | {found['released_in_torch'] / base:.1f} |",
                    flush=True,
                )
    if args.json is not None:
        write_json(args.json, {"rows": rows})
    for row in rows:
        print(f"alpha slots={row['slots']} G={row['group']} {row['cache']}: {row['alpha']:.3f}")


if __name__ == "__main__":
    main()
