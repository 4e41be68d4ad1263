"""Decode speed of the engine against transformers' generate, stock and with its linears packed by
oneDNN, and against OpenVINO GenAI.

    python bench/decode.py [--model DIR] [--dtype float32] [--batch 1 8 32] [--new-tokens 64]
    python bench/decode.py --model DIR --peer openvino --openvino-model DIR --openvino-python PYTHON

Without a model: random weights in the shape of Qwen2.5-0.5B, which decode at the same speed.
Greedy decoding of the same prompts by all, in turn, with the same threads. Correctness comes first:
the tokens of the engine and of OpenVINO are teacher-forced through the stock model; a token counts
as right when its logit is within rounding of the largest. A run's rate is the tokens after the
first of each sequence over the time they took: loading and prefill are not in it.

OpenVINO is no dependency. Its interpreter and its model, of the same checkpoint, are made by

    python -m venv ov && ov/bin/pip install openvino-genai
    python -m venv export && export/bin/pip install "optimum-intel[openvino]"
    export/bin/optimum-cli export openvino -m DIR --task text-generation-with-past \\
        --weight-format fp32 OPENVINO_DIR
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from kvcore.config import EngineConfig, SamplingParams
from kvcore.engine import Engine, GenerateSpec
from kvcore.models import bind_model
from kvcore.native import _C

PROMPT = (
    "Question {i}: a farmer sells {a} eggs a day at {b} dollars each. "
    "Explain step by step what {c} days bring, and what remains after feed for {a} dollars."
)
QWEN_05B = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)
# bf16: two steps at magnitude 32, the size of this family's largest logits.
LOGIT_TOLERANCE = {torch.bfloat16: 0.25, torch.float32: 1e-3}
PRECISION = {"bfloat16": "bf16", "float32": "f32"}  # OpenVINO's names


class OneDnnLinear(nn.Module):
    """A linear layer in oneDNN's packed layout, as any user of torch can have it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_by_onednn(model: nn.Module) -> None:
    """Replace the linears whose packed form is faster: large ones, in bf16 all."""
    for parent in [m for m in model.modules() if type(m) is not nn.Linear]:
        for name in [n for n, child in parent.named_children() if type(child) is nn.Linear]:
            weight = getattr(parent, name).weight
            if weight.dtype == torch.bfloat16 or weight.numel() >= 1 << 18:
                setattr(parent, name, OneDnnLinear(getattr(parent, name)))


class OpenVino:
    """OpenVINO GenAI in a process of its own (``openvino_peer.py``)."""

    def __init__(self, python: str, model: str, dtype: str, threads: int) -> None:
        script = Path(__file__).with_name("openvino_peer.py")
        command = [python, str(script), model, PRECISION[dtype], str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = self._answer()["ready"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("openvino_peer.py ended; its message stands above")
        return json.loads(line)

    def run(self, prompts: list[list[int]], count: int) -> tuple[list, float]:
        """(tokens, decode tokens per second)."""
        assert self._process.stdin is not None
        print(
            json.dumps({"prompts": prompts, "count": count}), file=self._process.stdin, flush=True
        )
        answer = self._answer()
        return answer["tokens"], answer["rate"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def cpu_name() -> str:
    """Model name of the processor, for the record."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def load_transformers(path: str | None, dtype: torch.dtype) -> torch.nn.Module:
    """A model that never stops before it is told to."""
    if path is None:
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(QWEN_05B).to(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def make_prompts(path: str | None, count: int) -> list[list[int]]:
    """Prompts of one length, so that generate needs no padding."""
    if path is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, 50_000, (count, 45), generator=generator).tolist()
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [PROMPT.format(i=10 + i, a=20 + i, b=2 + i % 7, c=3 + i % 5) for i in range(count)]
    ids = [tokenizer(t)["input_ids"] for t in texts]
    shortest = min(map(len, ids))
    return [x[:shortest] for x in ids]


def run_engine(engine: Engine, prompts: list[list[int]], count: int) -> tuple[list, float, float]:
    """(tokens, decode tokens per second, share of the decode steps spent outside the forward)."""
    spec = GenerateSpec(SamplingParams(temperature=0.0, max_new_tokens=count))
    ids = [engine.add(p, spec) for p in prompts]
    done: dict[int, list[int]] = {}
    produced = first = 0
    start = forward = 0.0
    while engine.has_work:
        events = engine.step()
        produced += sum(e.token is not None for e in events)
        done.update({e.seq: e.generation.tokens for e in events if e.generation})
        if not first and produced >= len(prompts):
            start, forward, first = time.perf_counter(), engine.stats.forward_seconds, produced
    seconds = time.perf_counter() - start
    outside = 1 - (engine.stats.forward_seconds - forward) / seconds
    for i in ids:
        engine.release(i)
    return [done[i] for i in ids], (produced - first) / seconds, outside


@torch.inference_mode()
def run_transformers(model, prompts: list[list[int]], count: int) -> tuple[list, float]:
    """(tokens, decode tokens per second) of generate; the first forward, the prefill, is left
    out.
    """
    ids = torch.tensor(prompts)
    ends: list[float] = []
    hook = model.register_forward_hook(lambda *_: ends.append(time.perf_counter()))
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
    )
    seconds = time.perf_counter() - ends[0]
    hook.remove()
    return out[:, ids.shape[1] :].tolist(), len(prompts) * (count - 1) / seconds


@torch.inference_mode()
def wrong_tokens(stock, prompts: list[list[int]], outputs: list[list[int]]) -> int:
    """Tokens whose logit under the stock model lies below the largest by more than rounding."""
    wrong = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = stock(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
        wrong += int((logits.max(1).values - chosen > LOGIT_TOLERANCE[stock.dtype]).sum())
    return wrong


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(str(__doc__).split("\n\n")[0].split()))
    parser.add_argument("--model", help="checkpoint directory")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", choices=("openvino",), nargs="*", default=[])
    parser.add_argument("--openvino-model", help="directory that optimum-cli has written")
    parser.add_argument("--openvino-python", default=sys.executable, help="has openvino-genai")
    parser.add_argument("--json", help="write the rows here")
    args = parser.parse_args()
    if args.peer and not (args.model and args.openvino_model):
        parser.error("--peer openvino: expected --model and --openvino-model of one checkpoint")
    return args


def main() -> None:
    args = parse_arguments()
    dtype = getattr(torch, args.dtype)
    stock, packed = load_transformers(args.model, dtype), load_transformers(args.model, dtype)
    pack_by_onednn(packed)
    bound = bind_model(load_transformers(args.model, dtype), None)
    object.__setattr__(bound, "eos_ids", frozenset())  # all decode the same number of tokens
    engine = Engine(bound, EngineConfig(max_seqs=max(args.batch), context_len=2048))
    runs: dict[str, Callable[[list[list[int]], int], tuple]] = {
        "kvcore": lambda prompts, count: run_engine(engine, prompts, count),
        "hf_stock": lambda prompts, count: run_transformers(stock, prompts, count),
        "hf_prepacked": lambda prompts, count: run_transformers(packed, prompts, count),
    }
    openvino = None
    if args.peer:
        threads = torch.get_num_threads()
        openvino = OpenVino(args.openvino_python, args.openvino_model, args.dtype, threads)
        runs["openvino"] = openvino.run
    rows = []
    for batch in args.batch:
        prompts = make_prompts(args.model, batch)
        for name in [n for n in runs if n in ("kvcore", "openvino")]:
            wrong = wrong_tokens(stock, prompts, runs[name](prompts, 16)[0])  # also warms up
            if wrong:
                sys.exit(
                    f"batch {batch}: {wrong} tokens of {name} are not arg-max of the stock model"
                )
        rates: dict[str, list[float]] = {name: [] for name in runs}
        shares = []
        for _ in range(args.repeats):
            for name, run in runs.items():
                _, rate, *rest = run(prompts, args.new_tokens)
                rates[name].append(rate)
                shares += rest
        median = {name: statistics.median(values) for name, values in rates.items()}
        row = {
            "op": "decode",
            "model": Path(args.model).name if args.model else "random, shape of Qwen2.5-0.5B",
            "dtype": args.dtype,
            "device": cpu_name(),
            "threads": _C.num_threads(),
            "isa": _C.isa(),
            "fused": dict(bound.fused),
            "openvino": openvino and openvino.version,
            "batch": batch,
            "new_tokens": args.new_tokens,
            "tokens_per_second": {k: round(v, 1) for k, v in median.items()},
            "range": {k: [round(min(v), 1), round(max(v), 1)] for k, v in rates.items()},
            "kvcore_against": {
                k: round(median["kvcore"] / v, 2) for k, v in median.items() if k != "kvcore"
            },
            "share_outside_forward": round(statistics.median(shares), 4),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if openvino is not None:
        openvino.close()
    print_table(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Tokens per second of all peers, one batch a line, as markdown."""
    peers = list(rows[0]["tokens_per_second"])
    print("| batch | " + " | ".join(peers) + " | kvcore against the others |")
    print("| --- " * (len(peers) + 2) + "|")
    for row in rows:
        cells = [str(row["batch"]), *(str(row["tokens_per_second"][p]) for p in peers)]
        ratios = ", ".join(f"{k} {v}" for k, v in row["kvcore_against"].items())
        print(f"| {' | '.join(cells)} | {ratios} |")


if __name__ == "__main__":
    main()
