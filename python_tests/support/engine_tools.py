"""Drivers that tests share: run an engine to its end, and what transformers says about the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvcore.config import EngineConfig, EvictionConfig, SamplingParams
from kvcore.engine import Engine, GenerateSpec, StepEvent
from kvcore.policies import available


def seeded(policy: str, seed: int) -> dict[str, int]:
    """The seed, for the one policy that reads it."""
    return {"seed": seed} if policy == "random" else {}


EVICTING = {
    name: EvictionConfig(name, 24, cadence="sawtooth", headroom=32, **seeded(name, 5))
    for name in available()
    if name != "full"
}
every_policy = pytest.mark.parametrize("eviction", EVICTING.values(), ids=EVICTING)


def small_config(**changes: object) -> EngineConfig:
    return EngineConfig(**{"max_seqs": 16, "context_len": 1024, "kv_bytes": 64 << 20, **changes})


def greedy(tokens: int) -> GenerateSpec:
    return GenerateSpec(SamplingParams(temperature=0.0, max_new_tokens=tokens))


def sampled(tokens: int, key: int = 0, **options: object) -> GenerateSpec:
    return GenerateSpec(SamplingParams(max_new_tokens=tokens), rng_key=key, **options)


def run(engine: Engine, limit: int = 100_000) -> list[StepEvent]:
    """Step until nothing is left to do."""
    events = []
    for _ in range(limit):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], spec: GenerateSpec
) -> list[list[int]]:
    """Continuations of all prompts, run together."""
    ids = [engine.add(p, spec) for p in prompts]
    results = {e.seq: e.generation for e in run(engine) if e.generation is not None}
    out = [results[i].tokens for i in ids]
    for i in ids:
        engine.release(i)
    return out


def hf_greedy(module: torch.nn.Module, prompt: Sequence[int], tokens: int) -> list[int]:
    """The same from transformers' own generate, unbatched."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        out = module.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def make_prompts(lengths: Sequence[int], *, seed: int = 0, high: int = 256) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, high, (n,), generator=generator).tolist() for n in lengths]
