"""The OpenVINO GenAI side of ``bench/decode.py``: runs in the interpreter that has it.

    python bench/openvino_peer.py MODEL_DIR f32|bf16 THREADS

Reads one request a line from standard input, {"prompts": [[id, ...], ...], "count": tokens}, and
answers each with {"tokens": [[id, ...], ...], "rate": decode tokens a second}. Needs openvino-genai
and numpy, nothing of kvcore.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


def generate(pipe: Any, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
    """(tokens of each prompt, seconds); greedy, and never stops early. Prompts have one length."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
    ids = np.array(prompts, dtype=np.int64)
    inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
    begin = time.perf_counter()
    tokens = pipe.generate(inputs, config).tokens
    return [list(map(int, row)) for row in tokens], time.perf_counter() - begin


def main() -> None:
    folder, precision, threads = sys.argv[1:]
    pipe = genai.LLMPipeline(
        folder, "CPU", INFERENCE_PRECISION_HINT=precision, INFERENCE_NUM_THREADS=int(threads)
    )
    print(json.dumps({"ready": ov.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts, count = request["prompts"], request["count"]
        _, prefill = generate(pipe, prompts, 1)
        tokens, seconds = generate(pipe, prompts, count)
        rate = len(prompts) * (count - 1) / (seconds - prefill)
        print(json.dumps({"tokens": tokens, "rate": rate}), flush=True)


if __name__ == "__main__":
    main()
