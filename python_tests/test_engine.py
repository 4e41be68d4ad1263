"""Laws of the engine: what it decodes is what the model says, whoever shares the batch."""

from __future__ import annotations

import pytest
import torch
from support.engine_tools import (
    generate,
    greedy,
    hf_greedy,
    make_prompts,
    run,
    sampled,
    small_config,
)
from support.tiny_models import ARCHITECTURES, make_model, make_module, make_prm

from kvcore.config import EvictionConfig
from kvcore.engine import Engine, FeedOutput, Finish
from kvcore.policies import available

LENGTHS = (1, 5, 17, 50, 131)
POLICIES = {
    "full": EvictionConfig(),
    **{name: EvictionConfig.released(512, name) for name in available() if name != "full"},
}


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def reference(request):
    """(engine model, prompts, transformers' greedy continuations of 40 tokens)."""
    module = make_module(request.param)
    module.generation_config.eos_token_id = None
    module.generation_config.pad_token_id = 0
    prompts = make_prompts(LENGTHS)
    expected = [hf_greedy(module, p, 40) for p in prompts]
    model = make_model(request.param, tokenizer=False)
    object.__setattr__(model, "eos_ids", frozenset())
    return model, prompts, expected


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_greedy_equals_transformers_alone_and_in_a_ragged_batch(reference, policy):
    model, prompts, expected = reference
    engine = Engine(model, small_config(), eviction=POLICIES[policy])
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert generate(engine, [prompt], greedy(40)) == [tokens]
    assert generate(engine, prompts, greedy(40)) == expected
    assert engine.free_blocks == engine.num_blocks


def test_chunked_prefill_changes_nothing(reference):
    model, prompts, expected = reference
    engine = Engine(model, small_config(max_batched_tokens=7))
    assert generate(engine, prompts, greedy(40)) == expected


def test_a_fork_continues_like_the_sequence_itself(reference):
    model, prompts, expected = reference
    engine = Engine(model, small_config())
    roots = [engine.add(p) for p in prompts]
    children = [engine.fork(root, [greedy(40)] * 2) for root in roots]
    results = {e.seq: e.generation.tokens for e in run(engine) if e.generation is not None}
    for pair, tokens in zip(children, expected, strict=True):
        assert [results[c] for c in pair] == [tokens, tokens]


def test_forking_and_adopting_every_few_tokens_changes_nothing(reference):
    model, prompts, expected = reference
    engine = Engine(model, small_config())
    root = engine.add(prompts[2])
    for _ in range(5):
        run(engine)
        keep, other = engine.fork(root, [greedy(8), sampled(3)])
        run(engine)
        engine.adopt(root, keep)
        engine.release(other)
    assert engine.tokens(root) == prompts[2] + expected[2]
    engine.release(root)
    assert engine.free_blocks == engine.num_blocks


def test_extend_equals_having_had_the_tokens_in_the_prompt(reference):
    model, prompts, expected = reference
    engine = Engine(model, small_config())
    root = engine.add(prompts[3][:20])
    engine.extend(root, prompts[3][20:33])
    engine.extend(root, prompts[3][33:])
    [child] = engine.fork(root, [greedy(40)])
    results = {e.seq: e.generation for e in run(engine) if e.generation is not None}
    assert results[child].tokens == expected[3]


@pytest.mark.parametrize("chunk", [2048, 5])
def test_extend_returns_the_models_log_probabilities(reference, chunk):
    model, prompts, _ = reference
    engine = Engine(model, small_config(max_batched_tokens=chunk))
    root = engine.add(prompts[2])
    [child] = engine.fork(root, [None])
    engine.extend(child, prompts[3], FeedOutput.LOGPROBS)
    [values] = [e.values for e in run(engine) if e.values is not None]
    module = make_module(model.config.model_type)
    ids = torch.tensor([prompts[2] + prompts[3]])
    with torch.inference_mode():
        logp = module(ids).logits[0].log_softmax(-1)
    start = len(prompts[2])
    expected = logp[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1)
    torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5)


def test_sampling_does_not_depend_on_who_shares_the_batch():
    model = make_model(tokenizer=False)
    prompts = make_prompts(LENGTHS, seed=3)
    together = Engine(model, small_config())
    ids = [together.add(p, sampled(30, key=i)) for i, p in enumerate(prompts)]
    results = {e.seq: e.generation.tokens for e in run(together) if e.generation is not None}
    for i, prompt in enumerate(prompts):
        alone = Engine(model, small_config())
        assert generate(alone, [prompt], sampled(30, key=i)) == [results[ids[i]]]


def test_generation_statistics_are_those_of_its_tokens():
    model = make_model(tokenizer=False)
    engine = Engine(model, small_config())
    [prompt] = make_prompts([20])
    engine.add(prompt, sampled(12, key=9))
    [result] = [e.generation for e in run(engine) if e.generation is not None]
    ids = torch.tensor([prompt + result.tokens])
    with torch.inference_mode():
        logp = make_module()(ids).logits[0].log_softmax(-1)
    expected = logp[19:-1].gather(1, ids[0, 20:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=2e-5, rtol=1e-5)
    assert result.mean_logprob == pytest.approx(expected.mean().item(), abs=2e-5)
    assert result.finish is Finish.LENGTH


def test_eos_and_context_end_a_generation():
    model = make_model(tokenizer=False)
    [prompt] = make_prompts([10])
    plain = Engine(model, small_config())
    [tokens] = generate(plain, [prompt], greedy(30))
    stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    object.__setattr__(model, "eos_ids", frozenset({stop}))
    engine = Engine(model, small_config())
    engine.add(prompt, greedy(30))
    [result] = [e.generation for e in run(engine) if e.generation is not None]
    assert result.finish is Finish.EOS and result.tokens == tokens[: tokens.index(stop) + 1]
    engine = Engine(model, small_config(context_len=12))
    engine.add(prompt, greedy(30))
    [result] = [e.generation for e in run(engine) if e.generation is not None]
    assert result.finish is Finish.LENGTH and len(result.tokens) == 2


def test_a_token_head_is_read_at_the_last_token_and_forks_share_the_prefix():
    prm = make_prm()
    engine = Engine(prm, small_config())
    prefix, step_a, step_b = make_prompts([40, 7, 19], seed=5)
    root = engine.add(prefix)
    run(engine)
    before = engine.stats.prompt_tokens
    children = engine.fork(root, [None, None])
    for child, step in zip(children, (step_a, step_b), strict=True):
        engine.extend(child, step, FeedOutput.HEAD)
    values = {e.seq: e.values for e in run(engine) if e.values is not None}
    assert engine.stats.prompt_tokens - before == len(step_a) + len(step_b)
    fresh = Engine(make_prm(), small_config())
    for child, step in zip(children, (step_a, step_b), strict=True):
        again = fresh.add(prefix + step[:-1])
        fresh.extend(again, step[-1:], FeedOutput.HEAD)
        [expected] = [e.values for e in run(fresh) if e.values is not None]
        torch.testing.assert_close(values[child], expected, atol=1e-5, rtol=1e-5)
        fresh.release(again)


def test_bad_calls_name_the_argument_and_change_nothing():
    model = make_model(tokenizer=False)
    engine = Engine(model, small_config(context_len=64))
    root = engine.add([1, 2, 3])
    run(engine)
    cases = [
        (lambda: engine.add([]), "tokens: expected at least one"),
        (lambda: engine.add([512]), r"tokens: expected ids in \[0, 512\)"),
        (lambda: engine.add([1] * 65), "tokens: expected at most 64"),
        (lambda: engine.extend(root, [1] * 62), "tokens: expected at most 61"),
        (lambda: engine.extend(root, [1], FeedOutput.HEAD), "output"),
        (lambda: engine.extend(99, [1]), "seq: expected a live sequence, got 99"),
        (lambda: engine.fork(99, [None]), "seq"),
        (lambda: engine.adopt(root, root), "child"),
        (lambda: engine.add([1], sampled(4, detect=True)), "detect"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert engine.tokens(root) == [1, 2, 3] and engine.num_sequences == 1
    [child] = engine.fork(root, [greedy(4)])
    for call in (
        lambda: engine.extend(root, [1]),
        lambda: engine.release(root),
        lambda: engine.adopt(root, child),
        lambda: engine.extend(child, [1]),
        lambda: engine.fork(child, [None]),
    ):
        with pytest.raises(ValueError, match="seq"):
            call()
    run(engine)
    engine.adopt(root, child)
    with pytest.raises(ValueError, match="context"):
        full = engine.add([1] * 64)
        engine.fork(full, [greedy(1)])
