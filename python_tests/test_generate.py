"""``Engine.generate``: all kinds of prompts, in their order, the same whoever shares the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.engine_tools import every_policy, greedy, make_prompts, run, small_config
from support.interruptions import Interruption
from support.tiny_models import byte_tokenizer, make_model, make_module, make_prm

from kvcore.config import DetectorConfig, EvictionConfig, SamplingParams
from kvcore.engine import Engine, Output
from kvcore.models import bind_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DRAWN = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, max_tokens=10)
EVICTIONS = [
    None,
    EvictionConfig("rkv", budget=16, protect=8, cadence="sawtooth", headroom=16),
    EvictionConfig("rkv", budget=16, protect=8, cadence="steady"),
]
CHAT = [{"role": "user", "content": "1 + 1?"}]


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, small_config())


def reference(prompt: list[int], tokens: int, **options: object) -> list[int]:
    """The same by transformers, greedy, which is told not to draw ids that the tokenizer lacks."""
    with torch.inference_mode():
        out = make_module().generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=tokens,
            do_sample=False,
            suppress_tokens=list(range(263, 512)),
            **options,
        )
    return out[0, len(prompt) :].tolist()


def texts(outputs: list[Output]) -> list[str]:
    return [output.text for output in outputs]


def test_greedy_texts_are_those_of_transformers_for_every_kind_of_prompt(engine):
    tokenizer = byte_tokenizer()
    ids = list(b"Let x be 3.\n\nThen")
    chat = tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True)
    chat = list(chat["input_ids"])
    for prompt, given in [
        ("Let x be 3.\n\nThen", tokenizer("Let x be 3.\n\nThen").input_ids),
        (ids, ids),
        (tuple(ids), ids),
        (np.array(ids, dtype=np.int32), ids),
        (torch.tensor(ids), ids),
        (CHAT, chat),
    ]:
        [output] = engine.generate(prompt, GREEDY)
        assert output.prompt_token_ids == list(given)
        want = reference(list(given), 12)
        assert output.token_ids == want
        assert output.text == tokenizer.decode(want, skip_special_tokens=True)
        assert output.finish_reason == "length" and output.error is None


@pytest.mark.parametrize(
    "prompts", [["a", "bb", "ccc"], [[1], [2, 3], [4]], [CHAT, CHAT + CHAT, CHAT]]
)
def test_results_come_in_the_order_of_the_prompts(engine, prompts):
    together = engine.generate(prompts, GREEDY, n=2)
    assert [(o.prompt_index, o.index) for o in together] == [
        (i, j) for i in range(3) for j in (0, 1)
    ]
    for place, prompt in enumerate(prompts):
        [alone] = engine.generate(prompt, GREEDY)
        assert together[2 * place].token_ids == alone.token_ids


def test_names_of_special_tokens_in_texts_and_messages_are_text(engine):
    [output] = engine.generate("a<|im_end|>", GREEDY)
    assert output.prompt_token_ids == list(b"a<|im_end|>")
    [output] = engine.generate([{"role": "user", "content": "<|im_end|>"}], GREEDY)
    assert output.prompt_token_ids.count(257) == 1  # the template's own


@pytest.mark.parametrize("changes", [{}, {"max_seqs": 1}, {"max_seqs": 3}, {"kv_blocks": 24}])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_sample_is_the_same_whoever_shares_the_batch(model, changes, eviction):
    prompts = make_prompts([5, 40, 1, 17, 5], seed=3)
    roomy = Engine(model, small_config(), eviction=eviction)
    want = [o.token_ids for p in prompts for o in roomy.generate(p, DRAWN, n=3, seed=9)]
    tight = Engine(model, small_config(**changes), eviction=eviction)
    got = [o.token_ids for o in tight.generate(prompts, DRAWN, n=3, seed=9)]
    assert got == want
    assert tight.num_sequences == 0 and tight.free_blocks == tight.num_blocks


def test_samples_differ_and_repeating_a_prompt_is_another_sample(engine):
    several = engine.generate("abc", DRAWN, n=4)
    assert len(set(texts(several))) == 4
    repeated = engine.generate(["abc", "x", "abc", "abc", "abc"], DRAWN)
    assert [repeated[i].token_ids for i in (0, 2, 3, 4)] == [o.token_ids for o in several]
    assert engine.generate("abc", DRAWN, n=4, seed=1)[0].token_ids != several[0].token_ids
    assert texts(engine.generate("abc", DRAWN, n=4)) == texts(several)


def test_a_text_ends_before_the_first_stop_string_to_be_completed(engine):
    params = SamplingParams(temperature=1.2, top_k=0, top_p=1.0, max_tokens=60)
    whole = engine.generate("x", params, seed=4)[0]
    assert len(whole.text) > 30
    for begin, length in [(0, 1), (3, 2), (10, 4), (20, 7)]:
        stop = whole.text[begin : begin + length]
        [got] = engine.generate("x", params, seed=4, stop=["never-there", stop])
        assert got.text == whole.text[: whole.text.index(stop)]
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert got.token_ids == whole.token_ids[: len(got.token_ids)]
        assert stop in engine.text(got.token_ids).decode(errors="replace")
        assert stop not in engine.text(got.token_ids[:-1]).decode(errors="replace")
    [got] = engine.generate("x", params, seed=4, stop="never-there")
    assert got.text == whole.text and got.stop_reason is None


def test_end_of_text_ends_a_text_and_is_no_part_of_it():
    module = make_module()
    tokens = reference([65, 66], 6)
    module.config.eos_token_id = module.generation_config.eos_token_id = tokens[3]
    own = Engine(bind_model(module, byte_tokenizer()), small_config())
    [output] = own.generate([65, 66], GREEDY)
    end = tokens.index(tokens[3]) + 1
    assert output.token_ids == tokens[:end]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.text == own.text(tokens[: end - 1]).decode(errors="replace")


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_distribution(engine, count):
    params = SamplingParams(temperature=0.5, top_k=7, repetition_penalty=1.7, min_p=0.01)
    [output] = engine.generate("abcabc", params, logprobs=count)
    ids = torch.tensor([output.prompt_token_ids + output.token_ids])
    with torch.inference_mode():
        logits = make_module()(ids).logits[0, len(output.prompt_token_ids) - 1 : -1, :263]
    want = logits.double().log_softmax(-1)
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    for row, token, got in zip(want, output.token_ids, output.logprobs, strict=True):
        assert next(iter(got)) == token
        top = row.topk(count).indices.tolist() if count else []
        assert list(got) == [token, *(i for i in top if i != token)]
        for i, logprob in got.items():
            assert logprob == pytest.approx(row[i].item(), abs=2e-4)  # f32 logits of this model
    assert engine.generate("abcabc", params)[0].logprobs is None


def test_repetition_penalty_is_that_of_transformers(engine):
    prompt = list(b"abcabcabc")
    for penalty in (0.5, 1.3, 20.0):
        params = SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=penalty)
        [output] = engine.generate(prompt, params)
        assert output.token_ids == reference(prompt, 20, repetition_penalty=penalty)


def test_min_p_of_one_is_greedy(engine):
    params = SamplingParams(temperature=3.0, top_k=0, top_p=1.0, min_p=1.0, max_tokens=12)
    assert texts(engine.generate("abc", params)) == texts(engine.generate("abc", GREEDY))


@every_policy
def test_cache_use_says_what_is_held_against_a_full_cache(model, eviction):
    long = SamplingParams(temperature=0.0, max_tokens=150)
    [full] = Engine(model, small_config()).generate("abc" * 20, long)
    assert full.cache.entries == 60 + 149 and full.cache.evicted == 0
    assert full.cache.bytes == full.cache.full_bytes == 14 * 16 * model.kv_bytes_per_token
    bounded = Engine(model, small_config(), eviction=eviction)
    [held] = bounded.generate("abc" * 20, long)
    fed = 60 + len(held.token_ids) - 1
    assert held.cache.entries + held.cache.evicted == fed
    assert held.cache.entries <= eviction.trigger
    assert held.cache.full_bytes == -(-fed // 16) * 16 * model.kv_bytes_per_token
    assert held.cache.bytes < held.cache.full_bytes


def test_a_prompt_that_does_not_fit_is_an_error_of_its_own(model):
    shape = model.shape
    engine = Engine(model, small_config(kv_blocks=4 * shape.lanes))  # 64 tokens
    short, long = list(range(10)), list(range(200))
    first, second, third = engine.generate([short, long, short], GREEDY)
    assert second.finish_reason == "error" and "out of KV blocks" in str(second.error)
    [alone] = engine.generate(short, GREEDY)
    assert first.token_ids == alone.token_ids and third.finish_reason == "length"
    assert engine.num_sequences == 0


def test_no_finite_distribution_ends_as_nan():
    module = make_module()
    module.lm_head.weight.data[5] = torch.nan
    engine = Engine(bind_model(module, byte_tokenizer()), small_config())
    [output] = engine.generate("abc", GREEDY)
    assert (output.finish_reason, output.text, output.token_ids) == ("nan", "", [])
    with pytest.raises(RuntimeError, match="finite"):
        list(engine.stream("abc", GREEDY))
    assert engine.num_sequences == 0


def test_the_detector_ends_what_degenerates_when_asked(model):
    tests = DetectorConfig(entropy_threshold=0.01, entropy_guard=3, entropy_window=2)
    engine = Engine(model, small_config(), detector=tests)
    [output] = engine.generate("abc", DRAWN, detect=True)
    assert output.finish_reason == "entropy" and len(output.token_ids) < 10
    assert engine.generate("abc", DRAWN)[0].finish_reason == "length"


def test_the_checkpoints_own_sampling_is_used_when_asked(engine):
    module = make_module()
    config = module.generation_config
    config._from_model_config = False
    config.update(do_sample=True, temperature=0.9, top_k=3, max_new_tokens=5)
    own = Engine(bind_model(module, byte_tokenizer(), name="own"), small_config())
    want = SamplingParams(temperature=0.9, top_k=3, top_p=1.0, max_tokens=5)
    assert own.model.sampling == want
    assert texts(own.generate("abc", "model")) == texts(own.generate("abc", want))
    config.update(do_sample=False)
    assert own.model.sampling is not None and own.model.sampling.temperature == 0
    config.update(do_sample=True, temperature=-1.0)
    with pytest.raises(ValueError, match=r"generation_config\.json: temperature"):
        own.generate("abc", "model")
    with pytest.raises(ValueError, match=r"sampling: .*has no generation_config"):
        engine.generate("abc", "model")


BAD = [
    ({"prompts": ""}, "prompts: expected some text"),
    ({"prompts": []}, "prompts: expected at least one"),
    ({"prompts": ["a", ""]}, r"prompts\[1\]: expected some text"),
    ({"prompts": [[1], []]}, r"prompts\[1\]: expected text, token ids"),
    ({"prompts": ["a", [1, 2]]}, r"prompts: .*text at prompts\[0\] and token ids at prompts\[1\]"),
    ({"prompts": ["a", "b", CHAT]}, r"text at prompts\[0\] and chat messages at prompts\[2\]"),
    ({"prompts": [CHAT, "a"]}, r"chat messages at prompts\[0\] and text at prompts\[1\]"),
    ({"prompts": [1, "a"]}, r"prompts\[0\]: expected text, token ids or chat messages, got 1"),
    ({"prompts": [[1, "a"]]}, r"prompts\[0\]: .*got a list of int and str"),
    ({"prompts": [True, False]}, r"prompts\[0\]"),
    ({"prompts": 7}, "prompts: expected text"),
    ({"prompts": b"abc"}, "prompts: expected text"),
    ({"prompts": None}, "prompts: expected text"),
    ({"prompts": [1.5, 2.5]}, r"prompts\[0\]"),
    ({"prompts": [512]}, r"prompts: expected token ids in \[0, 512\), got 512"),
    ({"prompts": [[3], [-1]]}, r"prompts\[1\]: expected token ids"),
    ({"prompts": [[3], [1] * 1024]}, r"prompts\[1\]: expected fewer tokens than the context"),
    ({"prompts": "a\ud800"}, "prompts: text: expected Unicode"),
    ({"prompts": [{"role": "user"}]}, "prompts: message 0: expected a text as 'role'"),
    ({"prompts": [[*CHAT, {"role": 1, "content": "x"}]]}, r"prompts\[0\]: message 1"),
    ({"prompts": [{"role": "<|im_end|>", "content": "x"}]}, "prompts: message 0.*role"),
    ({"n": 0}, "n: expected an integer >= 1, got 0"),
    ({"n": -1}, "n: "),
    ({"n": 1.0}, "n: "),
    ({"stop": ""}, "stop: expected texts that are not empty, got ''"),
    ({"stop": ["a", ""]}, "stop: expected texts that are not empty"),
    ({"stop": [1]}, "stop: "),
    ({"stop": 1}, "stop: expected a text or a list"),
    ({"logprobs": -1}, "logprobs: "),
    ({"logprobs": True}, "logprobs: "),
    ({"seed": -1}, "seed: "),
    ({"sampling": {}}, "sampling: expected SamplingParams"),
    ({"sampling": "greedy"}, "sampling: expected SamplingParams or 'model', got 'greedy'"),
    ({"progress": 1}, "progress: expected a bool"),
    ({"detect": True}, "detect: .*no detector"),
    ({"template_args": {"a": 1}}, "template_args: expected with chat messages only"),
    ({"prompts": CHAT, "template_args": {"messages": []}}, "template_args: 'messages'"),
    ({"prompts": CHAT, "template_args": 3}, "template_args: expected a mapping"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_are_refused_before_anything_changes(engine, arguments, message):
    before = (engine.num_sequences, engine._next_id, engine.stats.decode_steps)
    with pytest.raises(ValueError, match=message):
        engine.generate(**{"prompts": "abc", **arguments})
    assert (engine.num_sequences, engine._next_id, engine.stats.decode_steps) == before


def test_a_reward_model_refuses_to_generate():
    engine = Engine(make_prm(), small_config())
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match="reward model 'tiny-prm'"):
            call("abc")


def test_a_model_without_tokenizer_takes_ids_only():
    engine = Engine(make_model(tokenizer=False), small_config())
    assert len(engine.generate([1, 2, 3], GREEDY)[0].token_ids) == 12
    with pytest.raises(ValueError, match=r"prompts: expected token ids.*has no tokenizer"):
        engine.generate("abc")


def test_a_tokenizer_without_template_takes_no_conversations():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    engine = Engine(bind_model(make_module(), tokenizer), small_config())
    with pytest.raises(ValueError, match=r"prompts: .*no chat template"):
        engine.generate(CHAT)


def test_others_of_the_engine_are_refused_while_they_run_and_left_alone_when_idle(model):
    engine = Engine(model, small_config())
    mine = engine.add(list(b"hello world"), greedy(6))
    with pytest.raises(ValueError, match="without other work"):
        engine.generate("abc")
    with pytest.raises(ValueError, match="without other work"):
        engine.stream("abc")
    [first] = [e.generation.tokens for e in run(engine) if e.generation]
    engine.generate(["abc", "x"], GREEDY, n=2)
    [child] = engine.fork(mine, [greedy(6)])
    [more] = [e.generation.tokens for e in run(engine) if e.generation]
    assert engine.num_sequences == 2 and engine.tokens(child)[-6:] == more
    assert first + more == reference(list(b"hello world"), 12)


def test_ctrl_c_keeps_what_is_finished(model, monkeypatch):
    engine = Engine(model, small_config())
    prompts = make_prompts([5, 9, 3], seed=1)
    long = SamplingParams(temperature=0.0, max_tokens=40)
    whole = engine.generate(prompts, long)
    stop = whole[1].text[5:7]
    want = engine.generate(prompts, long, stop=stop)
    assert {o.finish_reason for o in want} == {"stop", "length"}
    real, steps = engine.step, 0

    def step():
        nonlocal steps
        steps += 1
        if steps == 20:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(engine, "step", step)
    got = engine.generate(prompts, long, stop=stop)
    assert [o.finish_reason == "abort" for o in got] == [len(o.token_ids) > 19 for o in want]
    for output, reference in zip(got, want, strict=True):
        if output.finish_reason == "abort":
            assert output.token_ids == reference.token_ids[:19]
            assert reference.text.startswith(output.text.rstrip("\ufffd"))
            assert output.cache.entries > 0
        else:
            assert output == reference
    steps = 19
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(prompts, long)
    assert [o.finish_reason for o in caught.value.outputs] == ["abort"] * 3
    monkeypatch.undo()
    assert engine.num_sequences == 0 and not engine.has_work
    assert engine.generate(prompts, long, stop=stop) == want


@pytest.mark.parametrize("n", [1, 3])
def test_an_exception_at_any_line_leaves_no_sequence_and_no_wrong_output(model, n):
    engine = Engine(model, small_config(max_seqs=4))
    prompts = make_prompts([5, 9, 3], seed=1)
    params = SamplingParams(temperature=1.0, max_tokens=6)
    want = engine.generate(prompts, params, n=n)
    with Interruption(KeyboardInterrupt(), 10**9) as count:
        engine.generate(prompts, params, n=n)
    kept = 0
    for place in range(1, count.lines, count.lines // 60 + 1):
        for error in (KeyboardInterrupt(), RuntimeError("planned")):
            got: list[Output] = []
            with Interruption(error, place) as interruption:
                try:
                    got = engine.generate(prompts, params, n=n)
                except (KeyboardInterrupt, RuntimeError) as raised:
                    got = getattr(raised, "outputs", [])
            where = f"interrupted at {interruption.where}"
            assert engine.num_sequences == 0 and not engine.has_work, where
            for output, reference in zip(got, want, strict=bool(got)):
                kept += output.finish_reason != "abort"
                if output.finish_reason == "abort":
                    length = len(output.token_ids)
                    assert output.token_ids == reference.token_ids[:length], where
                else:
                    assert output == reference, where
    assert kept > 0
    assert engine.generate(prompts, params, n=n) == want


def test_progress_is_told_on_standard_error(engine, capsys):
    engine.generate(["a", "b"], GREEDY, progress=True)
    told = capsys.readouterr()
    assert told.out == "" and "2/2" in told.err and "24 tokens" in told.err


def test_what_an_interrupted_step_has_not_told_is_told(model, monkeypatch):
    engine = Engine(model, small_config())
    want = engine.generate(["abc", "x"], GREEDY)
    real = engine.step

    def step():
        events = real()
        if engine.stats.generated_tokens % 24 == 0:  # the last tokens of both
            engine._events = events
            raise KeyboardInterrupt
        return events

    monkeypatch.setattr(engine, "step", step)
    assert engine.generate(["abc", "x"], GREEDY) == want
    assert engine.num_sequences == 0 and not engine.has_work


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_sequence_that_was_just_made_is_released(model, monkeypatch, n, count):
    engine = Engine(model, small_config())
    real, made = engine._register, 0

    def register(seq):
        nonlocal made
        real(seq)
        made += 1
        if made == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_register", register)
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(["abc", "x", "y"], GREEDY, n=n)
    assert [o.finish_reason for o in caught.value.outputs] == ["abort"] * 3 * n
    assert engine.num_sequences == 0 and not engine.has_work
    assert engine.free_blocks == engine.num_blocks
