"""Does decoding stay as fast as the text grows? Tokens per second along one long generation.

    python bench/flat.py --tokens 16384 --budget 512 --json flat.json

Random weights by default: a Qwen2 of 4 layers whose step is mostly attention and overhead, the
worst case for flatness. --model DIR takes a checkpoint. The steady R-KV cadence, the sawtooth and
the full cache decode the same number of tokens; blocks in use are checked to stay constant once the
lanes are full. The last line is the flatness: tokens/s at the end over tokens/s at 1,024 tokens.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvcore.config import EngineConfig, EvictionConfig, SamplingParams
from kvcore.engine import Engine, GenerateSpec
from kvcore.files import write_json
from kvcore.models import LoadedModel, load_model
from kvcore.models.loader import bind_model
from kvcore.native import set_threads

PROTECT = 128
WINDOW = 512  # tokens that a speed is averaged over


def random_model(context: int) -> LoadedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=context,
        eos_token_id=None,
        bos_token_id=None,
    )
    module = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    return bind_model(module, None, name="random")


def decode(model: LoadedModel, eviction: EvictionConfig, tokens: int) -> dict[str, Any]:
    """Generates ``tokens`` tokens; seconds of every stretch of ``WINDOW`` tokens."""
    config = EngineConfig(max_seqs=2, context_len=tokens + 64, kv_bytes=2 << 30)
    engine = Engine(model, config, eviction=eviction)
    spec = GenerateSpec(SamplingParams(max_new_tokens=tokens))
    engine.add(list(range(5, 37)), spec)
    seconds: list[float] = []
    used: set[int] = set()
    begin, done = time.perf_counter(), 0
    while engine.has_work:
        done += sum(event.token is not None for event in engine.step())
        if eviction.is_steady and done > 2 * eviction.trigger:
            used.add(engine.num_blocks - engine.free_blocks)
        if done and done % WINDOW == 0 and len(seconds) < done // WINDOW:
            now = time.perf_counter()
            seconds.append(now - begin)
            begin = now
    if len(used - {0}) > 1:
        raise SystemExit(f"error: blocks in use changed in the steady cadence: {sorted(used)}")
    return {
        "tokens_per_second": [WINDOW / s for s in seconds],
        "blocks": max(used, default=0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="checkpoint directory")
    add("--tokens", type=int, default=16384)
    add("--budget", type=int, default=512)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--json", type=Path, metavar="FILE", help="write the figures")
    args = parser.parse_args()
    if args.tokens < 3 * WINDOW or args.budget < 1 or args.threads < 1:
        parser.error(f"--tokens: expected >= {3 * WINDOW}, --budget and --threads: expected >= 1")
    set_threads(args.threads)
    model = load_model(args.model) if args.model else random_model(args.tokens + 64)
    runs = {
        "steady": EvictionConfig("rkv", budget=args.budget, protect=PROTECT, cadence="steady"),
        "sawtooth": EvictionConfig.released(args.budget),
        "full": EvictionConfig(),
    }
    found = {}
    print("| cache | tokens/s at 1,024 | at the end | ratio |")
    print("| --- | --- | --- | --- |")
    for name, eviction in runs.items():
        found[name] = decode(model, eviction, args.tokens)
        speed = found[name]["tokens_per_second"]
        found[name]["flatness"] = speed[-1] / speed[1]
        print(
            f"| {name} | {speed[1]:.1f} | {speed[-1]:.1f} | {speed[-1] / speed[1]:.3f} |",
            flush=True,
        )
    if args.json is not None:
        write_json(args.json, found)
    print(f"flatness of the steady cadence: {found['steady']['flatness']:.3f}")


if __name__ == "__main__":
    main()
