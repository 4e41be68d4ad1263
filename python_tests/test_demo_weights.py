"""The embedded models: whole or refused by name, and good at what they are for."""

import json
import shutil

import pytest
from transformers import Qwen2ForCausalLM

from kvcore.demo import weights
from kvcore.demo.train.metrics import calibration_problems, load_language_model, step_accuracy
from kvcore.demo.weights import DamagedWeights, model_directory, write_manifest

NAMES = ("base", "helper", "prm")
MEGABYTE = 1_000_000


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(weights.ROOT, tmp_path / "weights")


def test_the_models_are_in_the_package_and_small():
    files = [path for path in weights.ROOT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 25 * MEGABYTE
    for name in NAMES:
        assert (model_directory(name) / "model.safetensors").is_file()
    assert "python -m kvcore.demo.train" in (weights.ROOT / "README.md").read_text()


def test_base_and_helper_have_the_sizes_that_the_card_says():
    count = {
        name: sum(
            p.numel() for p in Qwen2ForCausalLM.from_pretrained(model_directory(name)).parameters()
        )
        for name in ("base", "helper")
    }
    assert 2e6 < count["base"] < 6e6
    assert 4 < count["base"] / count["helper"] < 10


def test_the_base_model_computes_and_the_helper_only_looks_up():
    chosen = calibration_problems(30)
    accuracy = {
        name: step_accuracy(load_language_model(model_directory(name)), chosen)
        for name in ("base", "helper")
    }
    assert accuracy["base"]["solution"] >= 0.85
    assert accuracy["helper"]["look-up"] >= 0.98
    assert accuracy["helper"]["product"] < 0.6 < 0.95 < accuracy["base"]["product"]


@pytest.mark.parametrize("name", NAMES)
def test_one_changed_byte_is_found_and_named(copy, name):
    path = copy / name / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedWeights, match=rf"{name}/model\.safetensors.*damaged.*reinstall"):
        model_directory(name, copy)
    for other in set(NAMES) - {name}:
        model_directory(other, copy)


def test_a_cut_file_is_found(copy):
    path = copy / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedWeights, match="damaged"):
        model_directory("base", copy)


def test_a_missing_file_is_named_with_the_way_out(copy):
    (copy / "helper" / "tokenizer.json").unlink()
    with pytest.raises(DamagedWeights, match=r"helper/tokenizer\.json.*missing.*pip install"):
        model_directory("helper", copy)


@pytest.mark.parametrize("content", [None, "{"])
def test_a_missing_or_damaged_manifest_is_named(copy, content):
    path = copy / weights.MANIFEST
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DamagedWeights, match=r"manifest\.json"):
        model_directory("base", copy)


def test_a_manifest_lists_every_file(copy):
    before = json.loads((copy / weights.MANIFEST).read_text())
    write_manifest(copy, NAMES)
    assert json.loads((copy / weights.MANIFEST).read_text()) == before
