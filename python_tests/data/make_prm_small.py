"""Writes prm_small.json beside this file: scores of steps, by the fp64 oracle.

Run from anywhere: python python_tests/data/make_prm_small.py
"""

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2Model

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from support import prm_oracle  # noqa: E402
from support.tiny_models import SIZES, byte_tokenizer  # noqa: E402

from kvcore.models.token_head import TokenHeadModel  # noqa: E402

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
CASES = [
    ("What is 2 + 3?", ["First, 2 + 3 = 5.", "So the answer is \\boxed{5}."]),
    ("Sum of the first 20 odd numbers?", ["The sum is n².", "n = 20", "20² = 400\n= 400", "400"]),
    ("汉字 👍?", ["naïve ∑ step", "x"]),
]


def main() -> None:
    config = Qwen2Config(**SIZES)
    with torch.device("meta"):
        module = TokenHeadModel(Qwen2Model(config), config.hidden_size, 2)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    weights = prm_oracle.formula_weights(shapes)
    tokenizer = byte_tokenizer()
    separator = tokenizer.convert_tokens_to_ids(prm_oracle.SEPARATOR)
    cases = []
    for question, steps in CASES:
        ids = prm_oracle.conversation(tokenizer, SYSTEM, question, steps)
        scores = prm_oracle.step_scores(weights, config, ids, separator)
        cases.append({"question": question, "steps": steps, "scores": scores})
    content = {"system_prompt": SYSTEM, "cases": cases}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (HERE / "prm_small.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
