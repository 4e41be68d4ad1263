"""Likelihood of a step under a model that sees the whole context."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvcore.engine.events import FeedOutput
from kvcore.models.templates import check_template
from kvcore.models.text_ids import encode_text
from kvcore.search.ports import Lease, ModelFacts, ModelPort
from kvcore.search.prompt import (
    DEFAULT_SYSTEM_PROMPT,
    Prompt,
    Translator,
    prompt_ids,
    translator,
)
from kvcore.search.scorers.base import Score, ScorerContext, ScoreRequest
from kvcore.search.scorers.tree import TreeScorer


class LoglikScorer(TreeScorer):
    """Mean log-probability of a candidate's tokens, in nats, raw distribution (temperature 1).

    Needs no reward model, and is worth little beside one: a model likes its own words best (on
    GSM8K the helper's text won 117 of 130 steps). On the search's own helper (``engine=None``) the
    helper's candidates bring their value with them, the base model's are fed to forks of the
    helper's sequence, and the winner's fork becomes the helper's state: what is fed for the winner
    is not fed again.

    Args:
        engine: any model with a full cache; None takes the helper of the search.
        system_prompt: of ``engine``'s prompt; the search's if it is the default. Not used with the
            helper, which has its own.
    """

    name = "loglik"
    output = FeedOutput.LOGPROBS
    reserve = 0

    def __init__(
        self, engine: ModelPort | None = None, *, system_prompt: str | None = DEFAULT_SYSTEM_PROMPT
    ) -> None:
        if engine is not None and engine.model.has_head:
            raise ValueError(f"engine: expected a language model, got {engine.model.name!r}")
        if engine is not None and engine.eviction.evicts:
            raise ValueError(f"engine: expected a full cache, got {engine.eviction!r}")
        self.engine = engine
        self.system_prompt = system_prompt

    def prompted_model(self) -> ModelFacts | None:
        return None if self.engine is None else self.engine.model

    def join(self, context: ScorerContext) -> Lease:
        helper, engine = context.helper, self.engine
        self._on_helper = engine is None or (helper is not None and helper.port is engine)
        lease = helper if engine is None or self._on_helper else context.ports.get(engine)
        if lease is None:
            raise ValueError("scorer 'loglik': expected a helper or an engine of its own")
        model = lease.port.model
        self._tokenizer = model.tokenizer
        self._template_args = context.template_args
        self._system_prompt = context.system_prompt_for(self.system_prompt, self._tokenizer)
        if not self._on_helper:
            check_template("scorer", model, self._system_prompt, self._template_args)
        givers = {"base": context.base, "helper": context.helper}
        self._translators: dict[str, Translator] = {
            source: translator(giver.port.model, model)
            for source, giver in givers.items()
            if giver is not None
        }
        return lease

    def rows(self, num_base: int, num_helper: int) -> tuple[ModelPort, int] | None:
        if self._on_helper:
            return self._lease.port, num_base
        return super().rows(num_base, num_helper)

    def begin(
        self, problem: int, prompt: Prompt, prefix: Sequence[str] = (), root: int | None = None
    ) -> None:
        if self._on_helper:
            assert root is not None
            self.plant_on(problem, root)
            return
        ids = prompt_ids(self._tokenizer, prompt, self._system_prompt, self._template_args)
        for text in prefix:
            ids += encode_text(self._tokenizer, text)
        self.plant(problem, ids)

    def known(self, request: ScoreRequest) -> Score | None:
        if self._on_helper and request.source == "helper":
            return Score(value=request.mean_logprob, rank=request.mean_logprob)
        return None

    def ids(self, step: ScoreRequest) -> list[int]:
        carrier = self._translators.get(step.source)
        if carrier is None:
            return encode_text(self._tokenizer, step.text)
        return carrier.ids(step.tokens, step.data, ends=step.ends)

    def read(self, values: torch.Tensor) -> Score:
        terms = values.flatten().tolist()
        mean = math.fsum(terms) / len(terms)
        return Score(value=mean, rank=mean)
