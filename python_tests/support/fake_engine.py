"""An engine without a model: it follows a script and holds its callers to the rules.

It implements what ``kvcore.engine.Engine`` promises, over a byte-level vocabulary, so that the laws
of the search can be tested by the thousand. Its timing is random: anything pending advances in a
step only with some probability. Breaking a rule of the API raises ``ValueError``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from kvcore.config import DetectorConfig, EvictionConfig
from kvcore.engine.events import (
    EngineStats,
    FeedOutput,
    Finish,
    GenerateSpec,
    Generation,
    StepEvent,
)

SPECIALS = ("<eos>", "<extra_0>", "<start>", "<end>")
EOS, EXTRA, START, END = range(256, 260)
CHAT_TEMPLATE = "a template"


class FakeTokenizer:
    """Ids are bytes plus ``shift``, then four special tokens.

    With ``chat`` it has a template: <start>role newline content <end> newline, for each message.
    """

    def __init__(self, *, shift: int = 0, chat: bool = False) -> None:
        self.shift = shift
        self.chat_template = CHAT_TEMPLATE if chat else None
        self.eos_token_id = EOS
        self.added_tokens_decoder = {
            256 + i: SimpleNamespace(content=name, special=True) for i, name in enumerate(SPECIALS)
        }

    def get_vocab(self) -> dict[str, int]:
        vocab = {f"byte{b}": (b + self.shift) % 256 for b in range(256)}
        return {**vocab, **{name: 256 + i for i, name in enumerate(SPECIALS)}}

    def __call__(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> SimpleNamespace:
        ids: list[int] = []
        while text:
            special = [s for s in SPECIALS if text.startswith(s) and not split_special_tokens]
            if special:
                ids.append(256 + SPECIALS.index(special[0]))
                text = text[len(special[0]) :]
            else:
                ids += [(b + self.shift) % 256 for b in text[0].encode()]
                text = text[1:]
        return SimpleNamespace(input_ids=ids)

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and self.chat_template is not None
        text = "".join(f"<start>{m['role']}\n{m['content']}<end>\n" for m in messages)
        return text + ("<start>assistant\n" if add_generation_prompt else "")

    def bytes(self, ids: Sequence[int]) -> bytes:
        return bytes((i - self.shift) % 256 for i in ids if i < 256)


@dataclass(frozen=True)
class FakeModel:
    tokenizer: FakeTokenizer
    name: str = "fake"
    vocab: int = 260
    eos_ids: frozenset[int] = frozenset({EOS})
    context_len: int = 4096
    kv_bytes_per_token: int = 10
    has_head: bool = False


@dataclass
class Draft:
    """What a candidate will be. ``error``: the engine fails it instead."""

    tokens: list[int]
    finish: Finish = Finish.STEP
    fired_at: int = 0
    max_entropy: float = float("nan")
    error: str | None = None


Script = Callable[[tuple[int, ...], GenerateSpec], Draft]


def text_draft(text: str, finish: Finish | None = None, **fields: float) -> Draft:
    """A candidate that says ``text``; ``<eos>`` at its end is the eos token."""
    ends = text.endswith("<eos>")
    tokens = list(text.removesuffix("<eos>").encode()) + [EOS] * ends
    return Draft(tokens, finish or (Finish.EOS if ends else Finish.STEP), **fields)


def logprob(context: Sequence[int], token: int) -> float:
    """A made-up log-probability of ``token`` after ``context``."""
    return -((len(context) * 31 + (context[-1] if context else 7) * 17 + token * 13) % 97) / 32


def head_logits(tokens: Sequence[int]) -> list[float]:
    """Made-up logits of a token head after ``tokens``; a good hash of all of them."""
    value = 0
    for token in tokens:
        value = (value * 1000003 + token + 1) % (2**31 - 1)
    return [0.25, (value % 8001 - 4000) / 1000]


@dataclass
class _Feed:
    tokens: list[int]
    output: FeedOutput
    context: int  # tokens before them


@dataclass
class _Seq:
    tokens: list[int]
    parent: int | None = None
    started: bool = True
    spec: GenerateSpec | None = None
    draft: Draft | None = None
    made: list[int] = field(default_factory=list)
    feeds: deque[_Feed] = field(default_factory=deque)
    failed: bool = False

    @property
    def busy(self) -> bool:
        return not self.failed and (not self.started or bool(self.feeds) or self.spec is not None)


class FakeEngine:
    """See the module's text.

    Args:
        script: what candidates become, a pure function of context and spec.
        budget: slots that a sequence keeps; None keeps all.
        pace: probability that something pending advances in a step.
        interrupt_at: the step() at which a KeyboardInterrupt is raised; 0: never.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        tokenizer: FakeTokenizer | None = None,
        context_len: int = 4096,
        max_seqs: int = 64,
        budget: int | None = None,
        has_head: bool = False,
        detector: DetectorConfig | None = None,
        pace: float = 1.0,
        seed: int = 0,
        interrupt_at: int = 0,
        name: str = "fake",
    ) -> None:
        self.model = FakeModel(
            tokenizer or FakeTokenizer(), name, context_len=context_len, has_head=has_head
        )
        self.context_len = context_len
        self.max_seqs = max_seqs
        self.eviction = EvictionConfig()
        self.stats = EngineStats()
        self.detector = detector
        self.steps = 0
        self.fed = 0
        self.generated = 0
        self.most_live = 0
        self._script = script
        self._budget = budget
        self._pace = pace
        self._random = random.Random(seed)
        self._interrupt_at = interrupt_at
        self._seqs: dict[int, _Seq] = {}
        self._next = 0

    @property
    def live(self) -> int:
        return len(self._seqs)

    def add(self, tokens: Sequence[int], generate: GenerateSpec | None = None) -> int:
        assert generate is None, "the search never asks for it"
        self._check_fits(0, tokens)
        return self._register(
            _Seq(list(tokens), feeds=deque([_Feed(list(tokens), FeedOutput.NONE, 0)]))
        )

    def fork(self, seq: int, specs: Sequence[GenerateSpec | None]) -> list[int]:
        parent = self._get(seq)
        if parent.busy or parent.failed:
            raise ValueError(f"seq: {seq} is not idle")
        children = []
        for spec in specs:
            if spec is not None:
                if self.model.has_head:
                    raise ValueError("generate: this model scores")
                if spec.detect and self.detector is None:
                    raise ValueError("detect: no detector")
                if len(parent.tokens) + spec.sampling.max_new_tokens > self.context_len:
                    raise ValueError("max_new_tokens: beyond the context")
            child = _Seq(list(parent.tokens), parent=seq, started=False, spec=spec)
            children.append(self._register(child))
        return children

    def extend(self, seq: int, tokens: Sequence[int], output: FeedOutput = FeedOutput.NONE) -> None:
        target = self._get(seq)
        if target.spec is not None or target.failed:
            raise ValueError(f"seq: {seq} is not idle")
        if (output is FeedOutput.HEAD) != self.model.has_head and output is not FeedOutput.NONE:
            raise ValueError("output: not of this model")
        self._check_no_waiting(seq)
        self._check_fits(len(target.tokens), tokens)
        target.feeds.append(_Feed(list(tokens), output, len(target.tokens)))
        target.tokens += tokens

    def adopt(self, parent: int, child: int) -> None:
        for seq in (parent, child):
            if self._get(seq).busy or self._get(seq).failed:
                raise ValueError(f"seq: {seq} is not idle")
            self._check_no_waiting(seq)
        self._seqs[parent].tokens = self._seqs.pop(child).tokens

    def release(self, seq: int) -> None:
        self._get(seq)
        self._check_no_waiting(seq)
        del self._seqs[seq]

    def tokens(self, seq: int) -> list[int]:
        return list(self._get(seq).tokens)

    def cache_len(self, seq: int) -> int:
        held = len(self._get(seq).tokens) - (not self.model.has_head)
        return held if self._budget is None else min(held, self._budget)

    def kv_bytes(self, seq: int) -> int:
        return 16 * self.model.kv_bytes_per_token * -(-self.cache_len(seq) // 16)

    def text(self, tokens: Sequence[int]) -> bytes:
        return self.model.tokenizer.bytes(tokens)

    @property
    def has_work(self) -> bool:
        return any(s.busy for s in self._seqs.values())

    def step(self) -> list[StepEvent]:
        self.steps += 1
        if self.steps == self._interrupt_at:
            raise KeyboardInterrupt
        events = []
        for seq_id, seq in list(self._seqs.items()):
            if seq.busy and self._random.random() < self._pace:
                seq.started = True
                event = self._feed(seq_id, seq) if seq.feeds else self._generate(seq_id, seq)
                if event is not None:
                    events.append(event)
        self._random.shuffle(events)
        return events

    def _feed(self, seq_id: int, seq: _Seq) -> StepEvent:
        feed = seq.feeds.popleft()
        self.fed += len(feed.tokens)
        values = None
        whole = seq.tokens[: feed.context] + feed.tokens
        if feed.output is FeedOutput.HEAD:
            values = torch.tensor(head_logits(whole))
        elif feed.output is FeedOutput.LOGPROBS:
            positions = range(feed.context, len(whole))
            values = torch.tensor([logprob(whole[:i], whole[i]) for i in positions])
        return StepEvent(seq_id, extended=True, values=values)

    def _generate(self, seq_id: int, seq: _Seq) -> StepEvent | None:
        if seq.spec is None:
            return None
        if seq.draft is None:
            assert self._script is not None
            seq.draft = self._script(tuple(seq.tokens), seq.spec)
        draft, limit = seq.draft, seq.spec.sampling.max_new_tokens
        if draft.error is not None:
            seq.failed = True
            return StepEvent(seq_id, error=draft.error)
        token = None
        if len(seq.made) < len(draft.tokens):
            token = draft.tokens[len(seq.made)]
            seq.tokens.append(token)
            seq.made.append(token)
            self.generated += 1
        full = len(seq.made) >= limit and limit < len(draft.tokens)
        if len(seq.made) < len(draft.tokens) and not full:
            return StepEvent(seq_id, token=token)
        finish = Finish.LENGTH if full else draft.finish
        start = len(seq.tokens) - len(seq.made)
        logprobs = [logprob(seq.tokens[: start + i], t) for i, t in enumerate(seq.made)]
        seq.spec = None
        generation = Generation(
            tokens=seq.made,
            text=self.text(seq.made),
            finish=finish,
            mean_logprob=sum(logprobs) / len(logprobs) if logprobs else float("nan"),
            logprobs=logprobs,
            max_entropy=draft.max_entropy,
            min_gzip_ratio=float("nan"),
            fired_at=0 if full else draft.fired_at,
        )
        return StepEvent(seq_id, token=token, generation=generation)

    def _register(self, seq: _Seq) -> int:
        self._seqs[self._next] = seq
        self._next += 1
        self.most_live = max(self.most_live, len(self._seqs))
        return self._next - 1

    def _get(self, seq: int) -> _Seq:
        if seq not in self._seqs:
            raise ValueError(f"seq: expected a live sequence, got {seq}")
        return self._seqs[seq]

    def _check_no_waiting(self, seq: int) -> None:
        if any(s.parent == seq and not s.started for s in self._seqs.values()):
            raise ValueError(f"seq: {seq} has forks not yet started")

    def _check_fits(self, present: int, tokens: Sequence[int]) -> None:
        if not tokens or present + len(tokens) > self.context_len:
            raise ValueError(
                f"tokens: expected 1 to {self.context_len - present}, got {len(tokens)}"
            )
        if not all(0 <= t < self.model.vocab for t in tokens):
            raise ValueError("tokens: outside the vocabulary")


def random_script(*, abort: float = 0.2, eos: float = 0.05, blank: float = 0.1) -> Script:
    """Candidates drawn from (context, key): short steps, some eos, blank, or aborted if watched."""

    def script(context: tuple[int, ...], spec: GenerateSpec) -> Draft:
        rng = random.Random(hash((context, spec.rng_key)))
        body = [rng.choice(b"abcxyz .\xc3") for _ in range(rng.randint(1, 12))]
        draw = rng.random()
        if spec.detect and rng.random() < abort:
            finish = rng.choice([Finish.ENTROPY, Finish.GZIP, Finish.REPETITION])
            entropy = rng.choice([float("nan"), rng.uniform(0, 9)])
            return Draft(body, finish, fired_at=len(body), max_entropy=entropy)
        if draw < eos:
            return Draft([*body[: rng.randint(0, 3)], EOS], Finish.EOS)
        if draw < eos + blank:
            return Draft([10, 10], Finish.STEP)
        return Draft([*body, 10, 10], Finish.STEP)

    return script


def rule_script(rule: Callable[[str, int], Draft]) -> Script:
    """Candidates by a rule of (text so far, rng key), for the byte vocabulary without shift."""

    def script(context: tuple[int, ...], spec: GenerateSpec) -> Draft:
        return rule(bytes(t for t in context if t < 256).decode("utf-8", "replace"), spec.rng_key)

    return script
