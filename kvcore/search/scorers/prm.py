"""Process reward models of the Qwen2.5-Math-PRM family, on an engine.

The conversation is the model card's: a system message, the question, and an assistant message that
is the steps, each followed by the separator token ``<extra_0>``; a step's score is the probability
of the positive label at its separator. Committed steps stay cached, and a candidate costs its own
tokens. A candidate that does not fit the model's context cannot be chosen; when none fits, the
problem ends as "max_tokens".

Source: Qwen/Qwen2.5-Math-PRM-7B model card; KV-Rescue, appendix C for ``newline_last``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from kvcore.config import require
from kvcore.engine.events import FeedOutput
from kvcore.models.templates import check_template, has_template, head_ids
from kvcore.models.text_ids import encode_text
from kvcore.search.ports import Lease, ModelFacts, ModelPort
from kvcore.search.prompt import DEFAULT_SYSTEM_PROMPT, Prompt
from kvcore.search.scorers.base import Score, ScorerContext, ScoreRequest
from kvcore.search.scorers.tree import TreeScorer

SEPARATOR = "<extra_0>"
Mode = Literal["extra0", "newline_last"]


def separator_id(tokenizer: Any) -> int:
    """Id of ``<extra_0>``. Raises ValueError if the vocabulary lacks it."""
    found = tokenizer.get_vocab().get(SEPARATOR)
    if found is None:
        raise ValueError(f"engine: expected a tokenizer with {SEPARATOR!r}, got one without")
    return int(found)


def conversation_head(
    tokenizer: Any,
    question: str,
    system_prompt: str | None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of everything before the first step: system message, question, start of the answer.

    Names of special tokens in both texts are ordinary text. A tokenizer without a chat template
    gets them as plain text, as a generator without one does.
    """
    return head_ids(tokenizer, question, system_prompt, template_args, answer=True)


def step_ids(tokenizer: Any, text: str, separator: int | None) -> list[int]:
    """Ids that a step adds to the conversation; the score is read at the last.

    A step is stripped of surrounding white space, its "\\n\\n" included, and names of special
    tokens in it are ordinary text: each step adds exactly one separator, whatever it says.

    Args:
        separator: id that closes a step; None closes it with the text "\\n\\n".
    """
    if separator is None:
        return encode_text(tokenizer, text.strip() + "\n\n")
    return [*encode_text(tokenizer, text.strip()), separator]


class PrmScorer(TreeScorer):
    """Scores steps with a process reward model.

    Args:
        engine: over ``load_prm(...)``; its cache must be full (no eviction).
        mode: "extra0" as the model card says; "newline_last" joins steps by "\\n\\n" and reads at
            the last token, as KV-Rescue's appendix C has it (an ablation: the labels were trained
            elsewhere).
        system_prompt: of the scorer's conversation; the model was trained with the default. Without
            a chat template the search's is used instead of the default.
    Raises:
        ValueError: the engine's model has no token head of two labels, or no ``<extra_0>``.
    """

    name = "prm"
    output = FeedOutput.HEAD
    reserve = 1  # the separator

    def __init__(
        self,
        engine: ModelPort,
        *,
        mode: Mode = "extra0",
        system_prompt: str = DEFAULT_SYSTEM_PROMPT,
    ) -> None:
        require(mode in ("extra0", "newline_last"), "mode", "'extra0' or 'newline_last'", mode)
        if not engine.model.has_head:
            raise ValueError(
                f"engine: expected a model with a token head, got {engine.model.name!r}"
            )
        if engine.eviction.evicts:
            raise ValueError(f"engine: expected a full cache, got {engine.eviction!r}")
        self.engine = engine
        self.mode: Mode = mode
        self.separator = separator_id(engine.model.tokenizer) if mode == "extra0" else None
        self.system_prompt = system_prompt

    def prompted_model(self) -> ModelFacts:
        return self.engine.model

    def join(self, context: ScorerContext) -> Lease:
        self._tokenizer = self.engine.model.tokenizer
        self._template_args = context.template_args
        self._system_prompt: str | None = self.system_prompt
        if not has_template(self._tokenizer):
            self._system_prompt = context.system_prompt_for(self.system_prompt, self._tokenizer)
        check_template(
            "scorer",
            self.engine.model,
            self._system_prompt,
            self._template_args,
            answer=True,
            remedy='system_prompt="" of the scorer, --system-prompt does not concern it',
        )
        return context.ports.get(self.engine)

    def begin(
        self, problem: int, prompt: Prompt, prefix: Sequence[str] = (), root: int | None = None
    ) -> None:
        ids = conversation_head(
            self._tokenizer, prompt.question, self._system_prompt, self._template_args
        )
        for text in prefix:
            ids += step_ids(self._tokenizer, text, self.separator)
        self.plant(problem, ids)

    def ids(self, step: ScoreRequest) -> list[int]:
        return step_ids(self._tokenizer, step.text, self.separator)

    def read(self, values: torch.Tensor) -> Score:
        negative, positive = (float(x) for x in values.flatten().tolist())
        rank = positive - negative
        return Score(value=1.0 / (1.0 + math.exp(-rank)) if rank > -700 else 0.0, rank=rank)
