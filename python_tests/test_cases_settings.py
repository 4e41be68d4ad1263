"""Settings in config.json that broke other engines, by the number of their case: P27, P29."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import change_json, continuation
from support.tiny_models import byte_tokenizer, make_module, save_model, save_prm

from kvcore.models import UnsupportedModel, load_model, load_prm

# ---- P27, P29: settings of attention

IMPLEMENTATIONS = [
    {"_attn_implementation": "flash_attention_2"},
    {"attn_implementation": "flash_attention_2"},
    {"attn_implementation": "flash_attention_3"},
    {"_attn_implementation": "sdpa"},
    {"attn_implementation": "flex_attention"},
    {"attn_implementation": "paged|flash_attention_2"},
    {"attn_implementation": "kernels-community/flash-attn"},
    {"_attn_implementation": "some-org/some-kernel:attend"},
    {"attn_implementation": {"": "flash_attention_2", "text_config": "sdpa"}},
    {"attn_implementation": "frobnicate", "output_attentions": True},
    {"_attn_implementation_internal": "flash_attention_2", "use_flash_attn": True},
    {"attention_dropout": 0.1},
]


@pytest.mark.parametrize("settings", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("load", [load_model, load_prm])
def test_p27_another_implementation_of_attention_is_not_looked_for(settings, load, tmp_path):
    folder = save_model(tmp_path / "m") if load is load_model else save_prm(tmp_path / "m")
    want = continuation(load(folder)) if load is load_model else None
    change_json(folder / "config.json", **settings)
    if load is load_model:
        change_json(folder / "generation_config.json", **settings)
        assert continuation(load(folder)) == want
    else:
        assert load(folder).has_head


CHANGES = [
    {"is_causal": False},
    {"use_bidirectional_attention": True},
    {"bidirectional": True},
    {"attention_chunk_size": 128},
    {"attn_logit_softcapping": 50.0},
    {"query_pre_attn_scalar": 64},
    {"clip_qkv": 8.0},
    {"no_rope_layers": [1, 0]},
    {"partial_rotary_factor": 0.5},
    {"is_encoder_decoder": True},
]


@pytest.mark.parametrize("settings", CHANGES, ids=str)
@pytest.mark.parametrize("load", [load_model, load_prm])
def test_p29_settings_that_change_attention_are_refused_by_name(settings, load, tmp_path):
    folder = save_model(tmp_path / "m") if load is load_model else save_prm(tmp_path / "m")
    change_json(folder / "config.json", **settings)
    with pytest.raises(UnsupportedModel, match=rf"^helper: .*{next(iter(settings))}"):
        load(folder, argument="helper")


def test_p29_values_that_change_nothing_are_served(tmp_path):
    folder = save_model(tmp_path / "m", "llama")
    settings = {"is_causal": True, "attention_chunk_size": None, "attn_logit_softcapping": None}
    change_json(folder / "config.json", **settings, is_decoder=True, partial_rotary_factor=1.0)
    assert load_model(folder).context_len == 4096


def test_p29_a_model_in_memory_is_held_to_the_same(tmp_path):
    from kvcore.models import bind_model

    module = make_module()
    module.config.is_causal = False
    with pytest.raises(UnsupportedModel, match="is_causal"):
        bind_model(module, byte_tokenizer())


def test_a_llama_with_a_sliding_window_is_refused(tmp_path):
    folder = save_model(tmp_path / "m", "llama")
    change_json(folder / "config.json", sliding_window=128)
    with pytest.raises(UnsupportedModel, match="sliding_window 128"):
        load_model(folder)
    change_json(folder / "config.json", sliding_window=4096)  # all of the context
    assert load_model(folder).context_len == 4096


# ---- dtype and RoPE


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["auto", None, "torch.bfloat16", "bfloat16"])
def test_auto_is_the_dtype_of_the_checkpoint(key, name, tmp_path):
    folder = save_model(tmp_path / "m", dtype=torch.bfloat16)
    change_json(folder / "config.json", dtype=None)
    change_json(folder / "config.json", **{key: name})
    for asked in (None, "auto"):
        assert load_model(folder, dtype=asked).shape.dtype == torch.bfloat16
    assert load_model(folder, dtype="float32").shape.dtype == torch.float32


@pytest.mark.parametrize("name", ["int4", "float8_e4m3fn", "torch.nonsense", "float64", 16])
def test_an_unknown_dtype_in_the_file_is_one_clear_line(name, tmp_path):
    folder = save_prm(tmp_path / "m")
    change_json(folder / "config.json", dtype=name)
    with pytest.raises(UnsupportedModel, match=r"^scorer: .*dtype: expected one of") as error:
        load_prm(folder)
    assert repr(name) in str(error.value) and "\n" not in str(error.value)


ROPES = [
    {"rope_type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    {"rope_type": "frobnicate", "rope_theta": 1e4},
    {"type": "su", "rope_theta": 1e4},
    {"rope_type": "proportional", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4},
    {"rope_type": "linear", "factor": "4", "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 0, "rope_theta": 1e4},
    {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4},
    {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    {"rope_type": None, "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": "many"},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": -1.0},
    [1.0],
    "linear",
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("load", [load_model, load_prm])
def test_rope_settings_that_are_not_served_are_one_clear_line(rope, key, load, tmp_path):
    folder = save_model(tmp_path / "m") if load is load_model else save_prm(tmp_path / "m")
    changes = {"rope_parameters": None, "rope_scaling": None, "rope_theta": 1e4, key: rope}
    change_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedModel, match=r"^base: .*(rope|rotary)") as error:
        load(folder, argument="base")
    assert "\n" not in str(error.value)


def test_rope_scaling_in_its_old_form_is_the_same(tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    folder = save_model(tmp_path / "m", rope_parameters=rope)
    want = continuation(load_model(folder))
    old = {"type": "linear", "factor": 4.0}
    change_json(folder / "config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling=old)
    assert continuation(load_model(folder)) == want
