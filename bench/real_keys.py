"""R-KV on the keys of a real model: similar pairs, the fused pass, approximations.

    python bench/real_keys.py --model DIR --data gsm8k_train.jsonl --json FILE

Texts are chains of solved GSM8K questions. Printed, in this order:

    similar     share of key pairs whose cosine is above the threshold, per layer
    fused       every election of the steady cadence (budget 64 + 128 newest), token by token over
                all texts and lanes, against direct scoring of the same cache
    agreement   entries that an approximation keeps in common with exact R-KV, of those kept: one
                eviction of n entries down to a budget (the 8 newest besides), in double
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcore import ops
from kvcore.cache import CacheShape, KVCache
from kvcore.config import EvictionConfig
from kvcore.engine.runner import ModelRunner
from kvcore.files import write_json
from kvcore.models import LoadedModel, load_model
from kvcore.native import _C, set_threads
from kvcore.policies import Evictor, make_policy

WINDOW, PROTECT, KERNEL, MIX, THRESHOLD = 8, 8, 7, 0.1, 0.5
EVENTS = ((192, 64), (640, 512))  # entries, budget
STEADY = EvictionConfig("rkv", budget=64, protect=128, cadence="steady")
TIE = 1e-6

# Settings of ``scores`` that differ from exact R-KV.
APPROXIMATIONS: dict[str, dict[str, Any]] = {
    "no zeroing of the newest similar entry": {"zeroing": "none"},
    "zeroing as in the paper's formula": {"zeroing": "paper"},
    "lambda 0.07": {"mix": 0.07},
    "bf16 arithmetic": {"dtype": torch.bfloat16},
    "max-pool before the mean (paper, eq. 4)": {"pool_first": True},
}


def texts_of(model: LoadedModel, path: Path, count: int, tokens: int) -> list[list[int]]:
    """Token ids: each text chains solved questions until it is long enough."""
    texts: list[list[int]] = [[]]
    for line in path.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        text = f"Question: {told['question']}\nAnswer: {told['answer']}\n\n"
        texts[-1] += model.tokenizer(text, add_special_tokens=False).input_ids
        if len(texts[-1]) >= tokens:
            texts[-1] = texts[-1][:tokens]
            if len(texts) == count:
                return texts
            texts.append([])
    raise SystemExit(f"error: --data: expected {count} texts of {tokens} tokens, got fewer")


class Feeder:
    """Texts of one length in one cache, fed piece by piece."""

    def __init__(self, model: LoadedModel, texts: list[list[int]], **settings: Any) -> None:
        config = model.model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = next(model.model.parameters()).dtype
        heads = (config.num_attention_heads, config.num_key_value_heads)
        self.shape = CacheShape(config.num_hidden_layers, *heads, dim, dtype)
        longest = len(texts[0])
        blocks = self.shape.lanes * len(texts) * (longest // ops.BLOCK_SLOTS + 2)
        self.cache = KVCache(
            self.shape,
            blocks=blocks,
            rows=len(texts),
            max_len=longest + ops.BLOCK_SLOTS,
            window=WINDOW,
            **settings,
        )
        self.seqs = [self.cache.store.create() for _ in texts]
        self._texts = texts
        self._runner = ModelRunner(model, self.cache)
        self.fed = 0

    def feed(self, count: int) -> None:
        """The next ``count`` tokens of every text."""
        for at in range(0, len(self.seqs), 4) if count > 1 else [0]:
            few = slice(at, at + 4) if count > 1 else slice(None)
            seqs, texts = self.seqs[few], self._texts[few]
            batch = self.cache.extend(seqs, [count] * len(seqs))
            tokens = [t for text in texts for t in text[self.fed : self.fed + count]]
            self._runner.forward(torch.tensor(tokens), batch, torch.empty(0, dtype=torch.int64))
        self.fed += count

    def lanes(self) -> tuple[Tensor, Tensor]:
        """Keys [texts, layers, kv_heads, n, dim] by position and the last queries
        [texts, layers, kv_heads, group, window, dim], in double; of a cache that has lost nothing.
        """
        cache, shape, n = self.cache, self.shape, self.fed
        rows = cache.rows(self.seqs).long()
        blocks = cache.block_table[rows][..., : -(-n // ops.BLOCK_SLOTS)].long()
        pairs = cache.key_blocks[blocks].unflatten(-1, (shape.head_dim // 2, ops.BLOCK_SLOTS, 2))
        keys = pairs.transpose(-3, -2).flatten(-2).flatten(-3, -2)[..., :n, :]
        assert cache.query_ring is not None
        ring = cache.query_ring[rows]
        group = shape.q_heads // shape.kv_heads
        return keys.double(), ring.unflatten(2, (shape.kv_heads, group)).double()


def cosines(keys: Tensor) -> Tensor:
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    similar = unit @ unit.transpose(-1, -2)
    similar.diagonal(dim1=-2, dim2=-1).fill_(0)
    return similar


def scores(
    keys: Tensor,
    queries: Tensor,
    *,
    mix: float = MIX,
    zeroing: str = "released",
    pool_first: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """R-KV scores of the past, [..., n - protect], computed in ``dtype``."""
    n = keys.shape[-2]
    past = n - PROTECT
    keys, queries = keys.to(dtype), queries.to(dtype)
    logits = queries @ keys[..., None, :past, :].transpose(-1, -2) / math.sqrt(keys.shape[-1])
    weight = logits.amax(-3).double().softmax(-1)

    def pool(x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)[:, None]
        return torch.nn.functional.max_pool1d(flat, KERNEL, 1, KERNEL // 2)[:, 0].view_as(x)

    importance = pool(weight).mean(-2) if pool_first else pool(weight.mean(-2).to(dtype).double())
    similar = cosines(keys)
    column = similar.sum(-2)
    if zeroing != "none":
        index = torch.arange(n)
        newest = torch.where(similar > THRESHOLD, index, 0).amax(-1)
        value = similar.gather(-1, newest[..., None])[..., 0]
        if zeroing == "paper":
            column = column - value
        else:
            column = column - torch.zeros_like(column).scatter_add_(-1, newest, value)
    redundancy = (column / n).softmax(-1).double()[..., :past]
    return mix * importance - (1 - mix) * redundancy


def kept(score: Tensor, budget: int) -> Tensor:
    """bool like ``score``: the best ``budget``, of equal ones the newer."""
    newest_first = score.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :budget]
    mask = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, newest_first, True)
    return mask.flip(-1)


def check_elections(model: LoadedModel, texts: list[list[int]]) -> dict[str, Any]:
    """The fused pass against direct scoring after every token."""
    policy = make_policy(STEADY)
    assert policy is not None
    slots = STEADY.trigger
    settings = _C.RkvSettings(STEADY.protect, STEADY.kernel, STEADY.mix, STEADY.threshold)
    feeder = Feeder(model, texts, replaces=True, observe=settings, state_slots=slots)
    cache, evictor = feeder.cache, Evictor(policy, feeder.cache)
    feeder.feed(slots)
    elections = same = 0
    worst = 0.0
    while True:
        evictor.settle(feeder.seqs, [slots] * len(texts))
        direct = policy.score(cache, feeder.seqs)
        assert cache.replace is not None
        chosen = cache.replace[cache.rows(feeder.seqs).long()].long()
        if bool((chosen < 0).any()):
            raise SystemExit("error: a full lane has no elected slot")
        gap = direct.gather(-1, chosen[..., None])[..., 0] - direct.min(-1).values
        elections += gap.numel()
        same += int((gap == 0).sum())
        worst = max(worst, float(gap.max()))
        if feeder.fed == len(texts[0]):
            break
        feeder.feed(1)
    if worst > TIE:
        raise SystemExit(f"error: an elected slot scores {worst} above the lowest")
    return {"elections": elections, "same_slot": same, "largest_gap": worst}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="directory of a model")
    add("--data", required=True, type=Path, help="GSM8K as JSONL (question, answer)")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--texts", type=int, default=10)
    add("--dtype", default="float32", help="float32, bfloat16 or float16, of the model")
    add("--threads", type=int)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.threads is not None:
        set_threads(args.threads)
    model = load_model(args.model, dtype=args.dtype, argument="--model")
    texts = texts_of(model, args.data, args.texts, max(n for n, _ in EVENTS))
    similar: dict[str, list[float]] = {}
    agreement: dict[str, dict[str, float]] = {name: {} for name in APPROXIMATIONS}
    feeder = Feeder(model, texts)
    for n, budget in EVENTS:
        feeder.feed(n - feeder.fed)
        keys, queries = feeder.lanes()
        shares, common = [], dict.fromkeys(APPROXIMATIONS, 0.0)
        layers = feeder.shape.layers
        for layer in range(layers):
            k, q = keys[:, layer], queries[:, layer]
            hits = (cosines(k) > THRESHOLD).double().sum((-1, -2)) / (n * (n - 1))
            shares.append(float(hits.mean()))
            exact = kept(scores(k, q), budget)
            for name, changed in APPROXIMATIONS.items():
                both = (kept(scores(k, q, **changed), budget) & exact).sum(-1) / budget
                common[name] += float(both.double().mean()) / layers
        similar[str(n)] = shares
        for name, value in common.items():
            agreement[name][f"{n} to {budget}"] = value
    print("| layer | " + " | ".join(f"similar pairs of {n}" for n, _ in EVENTS) + " |")
    print("| --- |" + " --- |" * len(EVENTS))
    for layer in range(len(shares)):
        print(
            f"| {layer} | " + " | ".join(f"{similar[str(n)][layer]:.1%}" for n, _ in EVENTS) + " |"
        )
    fused = check_elections(model, texts)
    print(
        f"\n{fused['elections']:,} elections, {fused['same_slot']:,} the slot of the lowest direct "
        f"score; largest difference of scores {fused['largest_gap']:.1e}\n"
    )
    print(
        "| kept in common with exact R-KV | " + " | ".join(f"{n} to {b}" for n, b in EVENTS) + " |"
    )
    print("| --- |" + " --- |" * len(EVENTS))
    for name, found in agreement.items():
        print(f"| {name} | " + " | ".join(f"{value:.1%}" for value in found.values()) + " |")
    if args.json is not None:
        told = {"similar": similar, "fused": fused, "agreement": agreement}
        write_json(args.json, told)


if __name__ == "__main__":
    main()
