"""Law: a key, value or query that is not finite, in any layer and head, is reported for the
sequence that has it, in both cadences and whatever the policy reads; nobody else notices.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.engine_tools import greedy, make_prompts, run, small_config
from support.exact_model import make_exact_model

from kvcore.config import EvictionConfig
from kvcore.engine import Engine, FeedOutput, Finish

SICK = 255  # the token that brings the number
STEADY = {"cadence": "steady", "budget": 12, "protect": 8}
SAWTOOTH = {"cadence": "sawtooth", "budget": 12, "protect": 8, "headroom": 20}
EVICTIONS = {
    "full": EvictionConfig(),
    "random steady": EvictionConfig("random", **STEADY),
    "random sawtooth": EvictionConfig("random", **SAWTOOTH),
    "streamingllm steady": EvictionConfig("streamingllm", **STEADY),
    "rkv steady": EvictionConfig("rkv", **STEADY),
    "rkv sawtooth": EvictionConfig("rkv", **SAWTOOTH),
    "h2o sawtooth": EvictionConfig("h2o", **SAWTOOTH),
}
every_eviction = pytest.mark.parametrize("eviction", EVICTIONS.values(), ids=EVICTIONS)
every_part = pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])


class Ward:
    """A model of which one projection of one layer gives ``number`` for every ``SICK`` token."""

    def __init__(self, part: str, number: float, *, layer: int = -1, place: int = 3) -> None:
        self.model = make_exact_model(seed=3, endless=True)
        trunk = self.model.model.model
        self.sick = torch.zeros(0, dtype=torch.bool)

        def remember(module, inputs):
            self.sick = inputs[0][0] == SICK

        def spoil(module, inputs, output):
            output = output.clone()
            output[0, self.sick, place] = number
            return output

        trunk.embed_tokens.register_forward_pre_hook(remember)
        getattr(trunk.layers[layer].self_attn, part).register_forward_hook(spoil)

    def engine(self, eviction: EvictionConfig) -> Engine:
        return Engine(self.model, small_config(max_batched_tokens=30), eviction=eviction)


def sick_prompt() -> list[int]:
    [prompt] = make_prompts([60], seed=8, high=200)
    prompt[4] = SICK
    return prompt


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@every_part
@every_eviction
def test_a_prompt_with_such_a_number_fails_and_no_other(eviction, part, number):
    engine = Ward(part, number).engine(eviction)
    [healthy] = make_prompts([50], seed=2, high=200)
    bad, good = engine.add(sick_prompt()), engine.add(healthy, greedy(40))
    events = run(engine)
    failed = [event for event in events if event.error is not None]
    assert [event.seq for event in failed] == [bad]
    assert "not finite" in failed[0].error or "NaN" in failed[0].error
    alone = Ward(part, number).engine(eviction)
    same = alone.add(healthy, greedy(40))
    run(alone)
    assert engine.tokens(good) == alone.tokens(same)
    assert engine.cache.store.num_sequences() == 1


@every_part
@pytest.mark.parametrize("place", [0, 17, 31])  # in the first and in other heads
@every_eviction
def test_a_generation_ends_as_nan(eviction, part, place):
    engine = Ward(part, math.inf, place=place).engine(eviction)
    seq = engine.add(sick_prompt(), greedy(40))
    events = run(engine)
    ended = [event.generation for event in events if event.generation is not None]
    failed = [event.error for event in events if event.error is not None]
    assert len(ended) + len(failed) == 1
    assert not ended or (ended[0].finish is Finish.NAN and ended[0].tokens == [])
    assert engine.tokens(seq) == sick_prompt()


@every_part
def test_a_number_that_comes_while_values_are_read_fails_the_reading(part):
    engine = Ward(part, math.nan, layer=0).engine(EvictionConfig())
    root = engine.add(make_prompts([20], seed=2, high=200)[0])
    run(engine)
    children = engine.fork(root, [None, None])
    engine.extend(children[0], [7, SICK, 9, 11], FeedOutput.LOGPROBS)
    engine.extend(children[1], [7, 8, 9, 11], FeedOutput.LOGPROBS)
    events = {event.seq: event for event in run(engine) if event.seq in children}
    assert "position 21" in events[children[0]].error
    assert events[children[1]].values.isfinite().all()


def test_a_fork_of_what_ended_as_nan_ends_so_again_or_goes_on():
    ward = Ward("v_proj", math.inf)
    engine = ward.engine(EvictionConfig())
    seq = engine.add(sick_prompt(), greedy(40))
    run(engine)
    children = engine.fork(seq, [greedy(3), greedy(3)])
    ended = [event.generation.finish for event in run(engine) if event.generation is not None]
    assert ended == [Finish.NAN] * 2
    for each in [*children, seq]:
        engine.release(each)
    assert engine.free_blocks == engine.num_blocks


def test_what_was_taken_back_is_not_held_against_a_sequence():
    ward = Ward("v_proj", math.nan)
    engine = ward.engine(EvictionConfig())
    seq = engine.add(make_prompts([20], seed=2, high=200)[0], greedy(10))
    engine.step()
    whole = engine._executor._runner.forward

    def spoilt(tokens, batch, rows):
        whole(torch.full_like(tokens, SICK), batch, rows)
        raise RuntimeError("struck")

    engine._executor._runner.forward = spoilt
    with pytest.raises(RuntimeError, match="struck"):
        engine.step()
    assert engine.cache.not_finite([engine.store_handle(seq)]) == [0]
    engine._executor._runner.forward = whole
    [result] = [e.generation for e in run(engine) if e.generation is not None]
    assert len(result.tokens) == 10 and result.finish is Finish.LENGTH
