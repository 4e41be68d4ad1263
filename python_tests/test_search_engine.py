"""Search on real engines over tiny random models: scores, caches and tokens are the models' own."""

import dataclasses

import pytest
import torch
from support.tiny_models import byte_tokenizer, make_model, make_module, make_prm

from kvcore.config import (
    DetectorConfig,
    EngineConfig,
    EvictionConfig,
    SamplingParams,
    SearchConfig,
)
from kvcore.engine import Engine
from kvcore.search import LoglikScorer, PrmScorer, RandomScorer, ScoreRequest, Search, solve
from kvcore.search.prompt import DEFAULT_SYSTEM_PROMPT, Prompt, prompt_ids
from kvcore.search.scorers.prm import conversation_head, step_ids

DETECTOR = DetectorConfig(entropy_threshold=9.0)
RKV = EvictionConfig.released(32, headroom=16)
CONFIG = SearchConfig(
    n=2,
    n_helper=2,
    sampling=SamplingParams(max_new_tokens=20),
    max_steps=4,
    max_tokens=400,
    detector=DETECTOR,
    seed=11,
)
QUESTIONS = ["What is 1 + 1?", "Name a prime.", "Why?"]


def engines(blocks=None, rows=64):
    config = EngineConfig(max_seqs=rows, kv_blocks=blocks, context_len=1024, kv_bytes=1 << 24)
    base = Engine(make_model(seed=1), config, eviction=RKV, detector=DETECTOR)
    helper = Engine(make_model(seed=2), config)
    return base, helper


def assert_clean(*used):
    for engine in used:
        assert engine.num_sequences == 0
        assert engine.free_blocks == engine.num_blocks


def steps_of(solutions):
    return [[(s.source, s.index, s.tokens, s.flag) for s in x.steps] for x in solutions]


def forward(module, ids):
    with torch.no_grad():
        return module(input_ids=torch.tensor([ids])).logits[0]


def test_loglik_scores_are_those_of_a_forward_from_scratch():
    base, helper = engines()
    module = make_module(seed=2)
    events = []
    [solution] = solve(
        base,
        QUESTIONS[:1],
        scorer=LoglikScorer(),
        helper=helper,
        config=CONFIG,
        on_event=events.append,
    )
    tokenizer = byte_tokenizer()
    context = prompt_ids(tokenizer, Prompt(QUESTIONS[0]), DEFAULT_SYSTEM_PROMPT)
    checked = {"base": 0, "helper": 0}
    for number, step in enumerate(solution.steps):
        for event in events:
            if event.event == "candidate" and event.step == number and event.score is not None:
                logits = forward(module, context + list(event.tokens))[len(context) - 1 : -1]
                logits = logits[:, : len(tokenizer)]
                found = torch.log_softmax(logits, -1)
                mean = found.gather(1, torch.tensor(event.tokens)[:, None]).mean().item()
                # fp32 against fp32, in another order of summation.
                assert event.score == pytest.approx(mean, abs=2e-4)
                checked[event.source] += 1
        context += step.tokens
    assert min(checked.values()) >= 4
    assert solution.evictions > 0
    assert solution.kv_bytes.peak < solution.kv_bytes.full
    assert_clean(base, helper)


def test_prm_scores_are_those_of_a_forward_from_scratch():
    loaded = make_prm(seed=3)
    engine = Engine(loaded, EngineConfig(kv_bytes=1 << 24, context_len=1024))
    requests = [
        ScoreRequest("q?", ("One.\n\n", "Two.\n\n"), text) for text in ("Three.\n\n", "3", "\n\n")
    ]
    scores = PrmScorer(engine).score(requests)
    single = [PrmScorer(engine).score([request])[0] for request in requests]
    assert scores == pytest.approx(single, abs=1e-5)
    head = conversation_head(loaded.tokenizer, "q?", DEFAULT_SYSTEM_PROMPT)
    separator = loaded.tokenizer.get_vocab()["<extra_0>"]
    for request, score in zip(requests, scores, strict=True):
        ids = list(head)
        for text in (*request.prefix, request.text):
            ids += step_ids(loaded.tokenizer, text, separator)
        seq = engine.add(ids[:-1])
        engine.extend(seq, ids[-1:], _output_head())
        values = None
        while engine.has_work:
            for event in engine.step():
                values = event.values if event.values is not None else values
        engine.release(seq)
        assert score == pytest.approx(torch.softmax(values, -1)[1].item(), abs=1e-5)
    assert_clean(engine)


def _output_head():
    from kvcore.engine import FeedOutput

    return FeedOutput.HEAD


@pytest.mark.parametrize("kind", ["loglik", "prm"])
def test_company_and_scarce_memory_change_nothing(kind):
    def run(in_flight, blocks):
        base, helper = engines(blocks)
        prm = Engine(make_prm(seed=3), EngineConfig(kv_bytes=1 << 24, context_len=1024))
        scorer = {"loglik": LoglikScorer(), "prm": PrmScorer(prm)}[kind]
        found = solve(
            base, QUESTIONS, scorer=scorer, helper=helper, config=CONFIG, max_in_flight=in_flight
        )
        assert_clean(base, helper, prm)
        assert [s.error for s in found] == [None] * len(QUESTIONS)
        return found, base.stats.preemptions + helper.stats.preemptions

    alone, _ = run(1, None)
    together, _ = run(3, None)
    scarce, preemptions = run(3, 110)
    assert steps_of(alone) == steps_of(together) == steps_of(scarce)
    assert preemptions > 0


def test_full_cache_greedy_search_of_one_is_plain_greedy_decoding():
    config = dataclasses.replace(
        CONFIG,
        n=1,
        n_helper=None,
        sampling=SamplingParams(temperature=0.0, max_new_tokens=16),
        max_steps=4,
        detector=None,
    )
    base = Engine(make_model(seed=1), EngineConfig(kv_bytes=1 << 24, context_len=1024))
    [solution] = solve(base, ["Count."], scorer=RandomScorer(), config=config)
    tokenizer, module = byte_tokenizer(), make_module(seed=1)
    ids = prompt_ids(tokenizer, Prompt("Count."), DEFAULT_SYSTEM_PROMPT)
    for token in solution.token_ids:
        assert token == forward(module, ids)[-1, : len(tokenizer)].argmax().item()
        ids.append(token)
    assert len(solution.token_ids) >= 4


def test_both_models_hold_the_trajectory_after_every_commit():
    base, helper = engines()
    held = []

    def look(event):
        if event.event == "step" and event.step < CONFIG.max_steps - 1 and event.finish != "eos":
            trajectory = search._rescue.active[event.problem]
            sides = trajectory.sides
            held.append([s.lease.port.tokens(s.root) for s in sides.values()])
            assert held[-1][0] == held[-1][1]
            assert held[-1][0][-len(event.tokens) :] == list(event.tokens)
            assert base.cache_len(sides["base"].root) < RKV.trigger + 1

    search = Search(
        base, QUESTIONS, scorer=LoglikScorer(), helper=helper, config=CONFIG, on_event=look
    )
    list(search.run())
    assert len(held) > 5


def test_an_interruption_leaves_the_engines_clean():
    base, helper = engines()
    search = Search(base, QUESTIONS, scorer=LoglikScorer(), helper=helper, config=CONFIG)
    step, calls = base.step, iter(range(1000))

    def interrupting():
        if next(calls) == 40:
            raise KeyboardInterrupt
        return step()

    base.step = interrupting
    with pytest.raises(KeyboardInterrupt):
        list(search.run())
    assert_clean(base, helper)
    assert [s.finish for s in search.solutions] == ["interrupted"] * 3


def endless(seed):
    model = make_model(seed=seed)
    object.__setattr__(model, "eos_ids", frozenset())
    return model


def prm_of(context_len):
    return Engine(make_prm(), EngineConfig(max_seqs=32, context_len=context_len, kv_bytes=1 << 24))


def test_a_full_context_that_is_not_max_tokens_is_named():
    config = dataclasses.replace(CONFIG, max_steps=50, max_tokens=290, detector=None)
    size = EngineConfig(max_seqs=16, context_len=1024, kv_bytes=1 << 24)
    short = EngineConfig(max_seqs=16, context_len=230, kv_bytes=1 << 24)
    warnings = {}
    for who, base_size, helper_size, scorer_len in (
        ("scorer", size, size, 230),
        ("helper", size, short, 1024),
        ("base", short, size, 1024),
        ("max_tokens", size, size, 2048),
    ):
        base, helper = Engine(endless(1), base_size), Engine(endless(2), helper_size)
        prm, events = prm_of(scorer_len), []
        [solution] = solve(
            base,
            QUESTIONS[:1],
            scorer=PrmScorer(prm),
            helper=helper,
            config=config,
            on_event=events.append,
        )
        assert solution.finish == "max_tokens", solution.error
        assert_clean(base, helper, prm)
        told = [event.message for event in events if event.event == "warning"]
        warnings[who] = [message for message in told if "has no room" in message]
    assert "scorer 'prm'" in warnings["scorer"][0]
    assert "helper model (230 tokens)" in warnings["helper"][0]
    assert "base model (230 tokens)" in warnings["base"][0]
    assert warnings["max_tokens"] == []


def test_the_helper_may_have_more_tokens_than_max_tokens():
    """``max_tokens`` counts those of the base model."""
    config = dataclasses.replace(CONFIG, max_tokens=260, detector=None)
    base, helper = (Engine(make_model(seed=s), EngineConfig(max_seqs=16)) for s in (1, 2))
    search = Search(base, QUESTIONS[:1], scorer=RandomScorer(), helper=helper, config=config)
    assert search._rescue.limits.of("base") == 260
    assert search._rescue.limits.of("helper") == helper.context_len == 4096
