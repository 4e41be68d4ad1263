"""Settings refuse what cannot work, when they are made, by the name of the field."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys

import pytest

from kvcore.config import (
    DetectorConfig,
    EngineConfig,
    EvictionConfig,
    SamplingParams,
    SearchConfig,
)

CLASSES = (SamplingParams, EvictionConfig, DetectorConfig, EngineConfig, SearchConfig)
NAN, INF = math.nan, math.inf

BAD = [
    (SamplingParams, "temperature", (-0.1, NAN, INF, "1", True, None, 1e39, 1e-46, 10**400)),
    (SamplingParams, "top_p", (0, -1, 1.01, NAN, "1", None, 1e-46)),
    (SamplingParams, "top_k", (-1, 2.0, True, None, 2**31)),
    (SamplingParams, "max_new_tokens", (0, -1, 2.5, None, 2**31)),
    (SamplingParams, "max_tokens", (0, -1, 2.5, None, 2**31)),
    (SamplingParams, "min_p", (-0.1, 1.1, NAN, INF, "1", True, None, 1e-46)),
    (SamplingParams, "repetition_penalty", (0, -1, NAN, INF, "1", True, None, 1e39, 1e-46)),
    (EvictionConfig, "policy", ("", None, 3)),
    (EvictionConfig, "budget", (None, 0, -4, 2.0, "64", True, 2**31)),
    (EvictionConfig, "protect", (0, -1, 8.0, None, 2**31)),
    (EvictionConfig, "protect_prompt", (0, 1, "yes", None)),
    (EvictionConfig, "headroom", (0, 8, 7, 16.0, None, 2**31)),
    (EvictionConfig, "window", (0, -1, 8.0, None)),
    (EvictionConfig, "mix", (-0.01, 1.5, NAN, None)),
    (EvictionConfig, "kernel", (0, 2, 6, -7, 7.0, None, 2**31 + 1)),
    (EvictionConfig, "threshold", (-1.5, 1.5, NAN, None)),
    (EvictionConfig, "seed", (-1, 2**63, 0.5, None)),
    (EvictionConfig, "pool_first", (0, 1, "yes", None)),
    (EvictionConfig, "scope", ("", "layer", None, 1)),
    (EvictionConfig, "cadence", ("", "slow", None, 1)),
    (EvictionConfig, "head_budgets", ("", "even", None, 1)),
    (DetectorConfig, "entropy", (1, None)),
    (DetectorConfig, "entropy_threshold", (0, -1, NAN, None, 1e39, 1e-46)),
    (DetectorConfig, "entropy_window", (0, 1.5, None, 2**31, 2**20 + 1)),
    (DetectorConfig, "entropy_guard", (0, None, 2**31)),
    (DetectorConfig, "gzip_threshold", (0, 1, 1.5, NAN, None)),
    (DetectorConfig, "gzip_window", (31, 32769, 800.0, None)),
    (DetectorConfig, "repetition_max_pattern_size", (0, None)),
    (DetectorConfig, "repetition_min_count", (1, None)),
    (DetectorConfig, "repetition_min_tokens", (0, None)),
    (EngineConfig, "max_seqs", (0, -1, 2.0, None, 2**31)),
    (EngineConfig, "context_len", (0, -1, 2.0, 2**31)),
    (EngineConfig, "kv_blocks", (0, 2**31, 2.0)),
    (EngineConfig, "kv_bytes", (0, -1, 1e9, None, 2**63)),
    (EngineConfig, "max_batched_tokens", (0, None, 2**31)),
    (SearchConfig, "n", (0, -1, 8.0, None, 2**31)),
    (SearchConfig, "n_helper", (-1, 1.0, 2**31)),
    (SearchConfig, "n_total", (0, -1, 2.0, 2**31)),
    (SearchConfig, "sampling", (None, {})),
    (SearchConfig, "max_steps", (0, None, 2**31)),
    (SearchConfig, "max_tokens", (1, None, 2**31)),
    (SearchConfig, "seed", (-1, 2**63, None)),
]
EDGES = [
    (SamplingParams, {"temperature": 0}),
    (SamplingParams, {"temperature": 3.4e38, "top_k": 2**31 - 1}),
    (SamplingParams, {"temperature": 1.5e-45, "top_p": 1.5e-45}),
    (SamplingParams, {"temperature": 0.0, "top_p": 1, "top_k": 0, "max_new_tokens": 1}),
    (EvictionConfig, {"budget": 1, "protect": 1, "headroom": 2, "window": 1, "kernel": 1}),
    (EvictionConfig, {"budget": 8, "window": 8}),
    (EvictionConfig, {"budget": 4, "window": 32}),
    (EvictionConfig, {"mix": 0, "threshold": -1, "pool_first": True, "scope": "global"}),
    (EvictionConfig, {"cadence": "steady", "protect": 128}),
    (EvictionConfig, {"layer_budgets": (64, 64), "head_budgets": "adaptive"}),
    (EvictionConfig, {"mix": 1, "threshold": 1}),
    (EvictionConfig, {"seed": 2**63 - 1}),
    (DetectorConfig, {"gzip_window": 32}),
    (DetectorConfig, {"gzip_window": 32768, "repetition_min_count": 2}),
    (EngineConfig, {"context_len": None, "kv_blocks": None}),
    (EngineConfig, {"max_seqs": 1, "context_len": 1, "kv_blocks": 1, "max_batched_tokens": 1}),
    (SearchConfig, {"n": 1, "n_helper": 0, "max_steps": 1, "max_tokens": 2, "detector": None}),
    (SearchConfig, {"n_helper": None}),
]


def make(kind: type, **changes: object) -> object:
    """Eviction settings get a policy that evicts and reads them, unless the test says otherwise."""
    if kind is EvictionConfig:
        policy = "random" if "seed" in changes else "rkv"
        how = {"cadence": "sawtooth"} if {"headroom", "head_budgets"} & changes.keys() else {}
        changes = {"policy": policy, "budget": 64, **how, **changes}
    return kind(**changes)


@pytest.mark.parametrize(
    ("kind", "field", "values"), BAD, ids=[f"{c.__name__}.{f}" for c, f, _ in BAD]
)
def test_every_field_refuses_what_is_out_of_range(kind, field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{field}: expected .+") as error:
            make(kind, **{field: value})
        assert repr(value) in str(error.value)


def test_every_numeric_field_is_covered_above():
    covered = {(kind, name) for kind, name, _ in BAD}
    for kind in CLASSES:
        for field in dataclasses.fields(kind):
            number = field.type.startswith(("int", "float", "str"))
            assert not number or (kind, field.name) in covered, f"{kind.__name__}.{field.name}"


@pytest.mark.parametrize(("kind", "changes"), EDGES)
def test_the_ends_of_each_range_are_taken(kind, changes):
    settings = make(kind, **changes)
    assert all(getattr(settings, name) == value for name, value in changes.items())


def test_headroom_is_measured_against_protect():
    assert make(EvictionConfig, protect=20, headroom=21).trigger == 64 + 21
    with pytest.raises(ValueError, match=r"^headroom: expected more than protect \(20\), got 20"):
        make(EvictionConfig, protect=20, headroom=20)


def test_a_budget_that_would_be_ignored_is_refused():
    with pytest.raises(ValueError, match=r"^budget: expected None with policy 'full', got 64"):
        EvictionConfig("full", budget=64)


@pytest.mark.parametrize("kind", CLASSES)
def test_settings_are_frozen_compare_by_value_and_can_be_replaced(kind):
    one, two = make(kind), make(kind)
    assert one == two and hash(one) == hash(two)
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, name, 1)
    assert dataclasses.replace(one) == one
    with pytest.raises(TypeError):
        kind(no_such_field=1)


def test_replacing_a_field_checks_again():
    with pytest.raises(ValueError, match=r"^kernel:"):
        dataclasses.replace(make(EvictionConfig), kernel=8)


def test_defaults_are_the_papers():
    sampling, search, detector = SamplingParams(), SearchConfig(), DetectorConfig()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.8, 0.95, 20)
    assert (search.n, search.max_steps, search.max_tokens) == (8, 1024, 4096)
    assert search.sampling.max_new_tokens == 512
    assert (detector.entropy_threshold, detector.gzip_threshold) == (7.0, 0.18)
    assert (detector.entropy_window, detector.entropy_guard, detector.gzip_window) == (12, 24, 800)
    rkv = EvictionConfig("rkv", budget=512)
    assert (rkv.cadence, rkv.protect, rkv.headroom) == ("steady", 128, None)
    assert (rkv.mix, rkv.window, rkv.kernel, rkv.threshold) == (0.1, 8, 7, 0.5)
    released = EvictionConfig.released(512)
    assert (released.policy, released.cadence) == ("rkv", "sawtooth")
    assert (released.protect, released.headroom) == (8, 128)
    assert released.settings == rkv.settings


def test_detector_is_active_while_a_test_is_on():
    assert DetectorConfig().active
    assert not DetectorConfig(entropy=False, gzip=False).active
    assert DetectorConfig(entropy=False, gzip=False, repetition=True).active


def test_settings_load_without_torch():
    program = "import sys, kvcore.config; assert 'torch' not in sys.modules"
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{program}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_max_tokens_is_another_name_of_max_new_tokens() -> None:
    for params in (
        SamplingParams(max_tokens=7),
        SamplingParams(max_new_tokens=7),
        SamplingParams(max_tokens=7, max_new_tokens=7),
        SamplingParams(0.8, 0.95, 20, 7),
        dataclasses.replace(SamplingParams(), max_tokens=7),
        dataclasses.replace(SamplingParams(), max_new_tokens=7),
        dataclasses.replace(SamplingParams(max_new_tokens=9), max_tokens=7),
        pickle.loads(pickle.dumps(SamplingParams(max_tokens=7))),
        copy.deepcopy(SamplingParams(max_tokens=7)),
    ):
        assert params == SamplingParams(max_tokens=7) and hash(params) is not None
        assert params.max_tokens == params.max_new_tokens == 7
        assert json.loads(json.dumps(dataclasses.asdict(params)))["max_new_tokens"] == 7
        again = dataclasses.replace(params, temperature=0.0)
        assert again.max_tokens == 7 and again.temperature == 0
    with pytest.raises(ValueError, match=r"max_tokens: expected the same as max_new_tokens \(8\)"):
        SamplingParams(max_tokens=7, max_new_tokens=8)
    assert repr(SamplingParams(max_tokens=7)) == (
        "SamplingParams(temperature=0.8, top_p=0.95, top_k=20, max_new_tokens=7, min_p=0.0, "
        "repetition_penalty=1.0)"
    )
