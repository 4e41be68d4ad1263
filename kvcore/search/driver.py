"""Stepwise search over many problems at once: KV-Rescue, and best-of-N without a helper.

Every problem has a root sequence in each model. A step forks candidates from the roots; when the
last of them ends, the scorer is asked; the best becomes the next step and both roots take it in.
Problems share the engines and wait for nobody but themselves.

Source: KV-Rescue, Algorithm 1 and appendix C.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvcore.config import SearchConfig, require, require_int
from kvcore.policies.settings import eviction_notice
from kvcore.search.failures import SearchFailed
from kvcore.search.ports import ModelPort, Ports
from kvcore.search.prompt import DEFAULT_SYSTEM_PROMPT, Prompt, Translator, translator
from kvcore.search.prompting import Prompting
from kvcore.search.rescue import Rescue
from kvcore.search.results import Solution, Source, TraceEvent, Warned
from kvcore.search.scorers.base import Scorer, ScorerContext, SearchScorer
from kvcore.search.scorers.thread import open_scorer
from kvcore.search.trajectory import Model


def _as_prompts(questions: Sequence[str | Prompt]) -> list[Prompt]:
    """Prompts with keys. Raises TypeError or ValueError."""
    if isinstance(questions, str):
        raise TypeError("questions: expected a sequence of questions, got one string")
    prompts = []
    for i, question in enumerate(questions):
        prompt = Prompt(question) if isinstance(question, str) else question
        if not isinstance(prompt, Prompt):
            raise TypeError(f"questions: expected str or Prompt, got {question!r} at {i}")
        prompts.append(prompt if prompt.key is not None else replace(prompt, key=i))
    keys = [prompt.key for prompt in prompts]
    for key in keys:
        require_int(key, "key", 0, 2**63 - 1)
    require(len(set(keys)) == len(keys), "questions", "different keys", keys)
    return prompts


def _check_model(name: str, engine: ModelPort) -> None:
    model = engine.model
    if model.has_head:
        raise ValueError(
            f"{name}: expected a language model, got the token-head model {model.name!r}"
        )
    if model.tokenizer is None:
        raise ValueError(f"{name}: expected a model with a tokenizer, got {model.name!r} without")


class Search:
    """One search. ``run`` yields solutions in the order in which they finish.

    Args:
        base: the model whose cache is bounded: an ``Engine``, or another ``ModelPort``. Nobody else
            may step the models during ``run``.
        questions: problems; see ``Prompt``.
        scorer: anything with a ``score`` method. KV-Rescue takes a process reward model
            (``PrmScorer``). May be None if a step has one candidate in all: nobody has to judge.
        helper: full-context model (KV-Rescue); None is best-of-N. While one that works elsewhere
            (``WakingPort``) keeps a problem waiting, the others go on.
        config: see ``SearchConfig``; ``n_helper=None`` means ``n`` with a helper and 0 without.
            Early exit uses the detector of ``base``, which must equal ``config.detector``; an
            engine made without one is lent ``config.detector`` for the time of ``run``.
        system_prompt: of the chat template; None for none. Models without a template get it and the
            question as plain text; the default is left out if no model has one.
        template_args: keywords of every chat template, for instance ``{"enable_thinking": False}``.
        on_event: called with every trace event, in order, in the thread of ``run``.
        max_in_flight: problems that hold sequences at once; None takes what the engines' rows allow
            without preemption, and at least 1.
    Attributes:
        prompts: the problems with their keys, in order.
        warnings: what the user should know; also sent as ``Warned`` events.
        solutions: finished so far, in the order of finishing. After an interruption the problems
            that were under way are here as well, with what they had (finish "interrupted").
    Raises:
        ValueError, TypeError: settings that do not fit each other or the engines.
    """

    def __init__(
        self,
        base: ModelPort,
        questions: Sequence[str | Prompt],
        *,
        scorer: Scorer | None = None,
        helper: ModelPort | None = None,
        config: SearchConfig | None = None,
        system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
        template_args: Mapping[str, Any] | None = None,
        on_event: Callable[[TraceEvent], None] | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        config = config or SearchConfig()
        self.prompts = _as_prompts(questions)
        self.warnings: list[str] = []
        self._solved: dict[int, Solution] = {}
        self._on_event = on_event
        self._base = base
        self._config = config
        if max_in_flight is not None:
            require_int(max_in_flight, "max_in_flight", 1)
        _check_model("base", base)
        self._lends = self._check_detector(base, config)
        if helper is None:
            given = config.n_helper
            require(not given, "n_helper", "0 or None without a helper", given)
        else:
            _check_model("helper", helper)
            if helper.eviction.evicts:
                raise ValueError(f"helper: expected a full cache, got {helper.eviction!r}")
        counts = config.candidates(helper=helper is not None)
        if scorer is None and sum(counts) > 1:
            raise ValueError(
                f"scorer: expected one to choose among the {sum(counts)} candidates of a step (a "
                "PrmScorer, or any object with a score method), got None"
            )
        engines = {"base": base} if helper is None else {"base": base, "helper": helper}
        prompting = Prompting.of(
            {role: engine.model for role, engine in engines.items()},
            scorer.prompted_model() if isinstance(scorer, SearchScorer) else None,
            system_prompt,
            template_args or {},
            uses_template=any(prompt.text is None for prompt in self.prompts),
        )
        self.warnings += prompting.warnings

        self._ports = Ports()
        models: dict[Source, Model] = {"base": Model(self._ports.get(base), counts[0])}
        translators: dict[tuple[Source, Source], Translator] = {}
        if helper is not None:
            models["helper"] = Model(self._ports.get(helper), counts[1])
            translators = self._make_translators(base, helper)
        opened = open_scorer(
            scorer,
            ScorerContext(
                self._ports,
                base=models["base"].lease,
                helper=models["helper"].lease if helper is not None else None,
                system_prompt=prompting.system_prompt,
                template_args=prompting.template_args,
            ),
        )
        self.max_in_flight = max_in_flight or _default_in_flight(models, opened)
        self._waiting: deque[int] = deque(range(len(self.prompts)))
        self._unread: deque[Solution] = deque()
        self._started = False
        self._rescue = Rescue(
            models,
            translators,
            opened,
            config,
            prompting,
            emit=self._emit,
            solved=self._on_solved,
        )

    @property
    def solutions(self) -> list[Solution]:
        """What has been solved so far, in the order of ending."""
        return list(self._solved.values())

    def run(self) -> Iterator[Solution]:
        """Solves; may be called once. Everything allocated is released however it ends.

        A problem's failure is its solution's ``error``, whoever raised it. A failure of an engine's
        ``step``, of ``on_event``, or a KeyboardInterrupt ends the search and is raised; problems
        under way then get their last events as well, unless ``on_event`` is what failed.
        """
        if self._started:
            raise RuntimeError("run: a search runs once; make a new one")
        self._started = True
        return self._run()

    def _run(self) -> Iterator[Solution]:
        active = self._rescue.active
        fired = self._base.stats.evictions
        try:
            if self._lends:
                self._base.detector = self._config.detector
            for message in self.warnings:
                self._emit(Warned(message))
            while self._waiting or active or self._unread:
                while self._waiting and len(active) < self.max_in_flight:
                    order = self._waiting.popleft()
                    self._rescue.admit(order, self.prompts[order])
                while self._unread:
                    yield self._unread.popleft()
                if active and not self._ports.advance():
                    keys = [trajectory.key for trajectory in active.values()]
                    raise RuntimeError(
                        f"search: no engine has work, yet problems {keys} are not solved"
                    )
            self._tell_idle_eviction(fired)
        except SearchFailed as failed:
            raise failed.error from failed.error.__cause__
        finally:
            self._close()

    def _close(self) -> None:
        """Ends what is under way and gives everything back, whatever fails on the way."""
        with contextlib.ExitStack() as last_first:
            if self._lends:
                last_first.callback(setattr, self._base, "detector", None)
            last_first.callback(self._ports.close)
            self._rescue.interrupt()

    def _tell_idle_eviction(self, before: int) -> None:
        notice = eviction_notice(self._base.eviction, self._base.stats.evictions - before)
        if notice is not None:
            self.warnings.append(notice)
            self._emit(Warned(notice))

    def _on_solved(self, solution: Solution) -> None:
        # An interruption may come while a solution is handed over: it is then told again.
        if solution.problem not in self._solved:
            self._solved[solution.problem] = solution
            self._unread.append(solution)

    def _emit(self, event: TraceEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def _check_detector(self, base: ModelPort, config: SearchConfig) -> bool:
        """Whether the engine has no detector and is lent the search's. Refuses one that differs."""
        own = base.detector
        if config.detector is not None and own is not None and own != config.detector:
            raise ValueError(
                f"detector: expected the base engine's ({own!r}), got {config.detector!r}: "
                "make the engine with this detector or with none, or set detector=None for no "
                "early exit"
            )
        return own is None and config.detector is not None

    def _make_translators(
        self, base: ModelPort, helper: ModelPort
    ) -> dict[tuple[Source, Source], Translator]:
        """Translators by (from, to). Warns if the models do not share a tokenizer."""
        there = translator(base.model, helper.model)
        back = translator(helper.model, base.model)
        if not there.same:
            self.warnings.append(
                f"base {base.model.name!r} and helper {helper.model.name!r} have different "
                "tokenizers: steps pass between them as text"
            )
        elif helper.model.vocab > base.model.vocab:
            raise ValueError(
                f"helper: expected at most the base model's {base.model.vocab} ids, "
                f"got {helper.model.vocab}"
            )
        return {("base", "helper"): there, ("helper", "base"): back}


def _default_in_flight(models: Mapping[Source, Model], scorer: SearchScorer) -> int:
    """Problems whose sequences all find a row in their engines at once, at least 1."""
    needs = [(model.lease.port, 1 + model.num_candidates) for model in models.values()]
    counts = {source: model.num_candidates for source, model in models.items()}
    scoring = scorer.rows(counts["base"], counts.get("helper", 0))
    if scoring is not None:
        needs.append(scoring)
    rows: dict[int, int] = {}
    for port, count in needs:
        rows[id(port)] = rows.get(id(port), 0) + count
    return max(1, min(port.max_seqs // rows[id(port)] for port, _ in needs))


def solve(
    base: ModelPort,
    questions: Sequence[str | Prompt],
    *,
    scorer: Scorer | None = None,
    helper: ModelPort | None = None,
    config: SearchConfig | None = None,
    system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
    template_args: Mapping[str, Any] | None = None,
    on_event: Callable[[TraceEvent], None] | None = None,
    max_in_flight: int | None = None,
) -> list[Solution]:
    """Solves problems by KV-Rescue (best-of-N if ``helper`` is None); arguments as ``Search``.

    Returns:
        One solution per question, in their order. A problem that failed has finish "error".
    """
    search = Search(
        base,
        questions,
        scorer=scorer,
        helper=helper,
        config=config,
        system_prompt=system_prompt,
        template_args=template_args,
        on_event=on_event,
        max_in_flight=max_in_flight,
    )
    places = {prompt.key: i for i, prompt in enumerate(search.prompts)}
    return sorted(search.run(), key=lambda solution: places[solution.problem])
