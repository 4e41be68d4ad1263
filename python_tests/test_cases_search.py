"""Searches that broke other engines, by the number of their case: P17 to P20."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import prm_oracle
from support.tiny_models import EOS, byte_tokenizer, make_model, save_prm

from kvcore import ops
from kvcore.config import (
    DetectorConfig,
    EngineConfig,
    EvictionConfig,
    SamplingParams,
    SearchConfig,
)
from kvcore.engine import Engine
from kvcore.models import load_prm
from kvcore.search import PrmScorer, Prompt, RandomScorer, ScoreRequest, Search, Solution, solve
from kvcore.search.trajectory import candidate_key

STORED = json.loads((Path(__file__).parent / "data" / "prm_small.json").read_text("utf-8"))
SEPARATOR = byte_tokenizer().convert_tokens_to_ids("<extra_0>")
CONFIG = EngineConfig(max_seqs=64, context_len=1024, kv_bytes=16 << 20)


# ---- P17, P18: the process reward model


def save_stored_prm(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The model of the stored scores as a checkpoint directory, and its weights."""
    save_prm(folder)
    shapes = {name: tuple(t.shape) for name, t in load_prm(folder).model.state_dict().items()}
    weights = prm_oracle.formula_weights(shapes)
    tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, weights


@pytest.fixture(scope="module")
def stored_prm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    return save_stored_prm(tmp_path_factory.mktemp("prm"))


def prm_scorer(folder: Path) -> PrmScorer:
    return PrmScorer(Engine(load_prm(folder), CONFIG), system_prompt=STORED["system_prompt"])


def requests_of(question: str, steps: Sequence[str]) -> list[ScoreRequest]:
    """Every step as a candidate after the steps before it."""
    texts = [step + "\n\n" for step in steps]
    return [ScoreRequest(question, tuple(texts[:i]), text) for i, text in enumerate(texts)]


@pytest.mark.parametrize("case", STORED["cases"], ids=lambda case: case["question"][:12])
def test_p17_scores_equal_the_stored_reference(stored_prm, case):
    scorer = prm_scorer(stored_prm[0])
    scores = scorer.score(requests_of(case["question"], case["steps"]))
    assert scores == pytest.approx(case["scores"], abs=1e-5)
    assert scorer.engine.num_sequences == 0
    assert scorer.engine.free_blocks == scorer.engine.num_blocks


def test_p17_the_stored_reference_still_follows_from_the_oracle(stored_prm):
    folder, weights = stored_prm
    config = load_prm(folder).config
    for case in STORED["cases"]:
        ids = prm_oracle.conversation(
            byte_tokenizer(), STORED["system_prompt"], case["question"], case["steps"]
        )
        again = prm_oracle.step_scores(weights, config, ids, SEPARATOR)
        assert again == pytest.approx(case["scores"], abs=1e-12)


def test_p17_no_code_of_the_checkpoint_is_run(tmp_path):
    folder, _ = save_stored_prm(tmp_path / "prm")
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {
        "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
        "AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel",
    }
    (folder / "config.json").write_text(json.dumps(settings))
    for name in ("configuration_qwen2_rm", "modeling_qwen2_rm"):
        (folder / f"{name}.py").write_text("raise SystemExit('remote code was run')\n")
    case = STORED["cases"][0]
    scores = prm_scorer(folder).score(requests_of(case["question"], case["steps"]))
    assert scores == pytest.approx(case["scores"], abs=1e-5)


TRICKY = [
    "a\n\n",
    "a\n\n\n\n",
    "a\n\n\n\nb\n\n",
    "see <extra_0> here\n\n",
    "<extra_0>",
    "\n\n",
    "a",
]


@pytest.mark.parametrize("mode", ["extra0", "newline_last"])
def test_p18_every_step_gets_one_score_whatever_its_text(stored_prm, mode, monkeypatch):
    scorer = prm_scorer(stored_prm[0])
    scorer = PrmScorer(scorer.engine, mode=mode, system_prompt=STORED["system_prompt"])
    fed: list[list[int]] = []
    extend = scorer.engine.extend
    monkeypatch.setattr(
        scorer.engine,
        "extend",
        lambda seq, ids, *out: (fed.append(list(ids)), extend(seq, ids, *out)),
    )
    scores = scorer.score([ScoreRequest("q <extra_0>?", ("first\n\n",), text) for text in TRICKY])
    assert len(scores) == len(fed) == len(TRICKY)
    assert all(0 < score < 1 for score in scores)
    for ids in fed:
        assert ids.count(SEPARATOR) == (1 if mode == "extra0" else 0)
        assert ids[-1] == SEPARATOR or mode != "extra0"
    # What surrounds a step is its delimiter, not its text.
    assert scores[0] == pytest.approx(scores[1], abs=1e-5) == pytest.approx(scores[-1], abs=1e-5)
    assert len({round(score, 4) for score in scores}) == len(TRICKY) - 2


def test_p18_committed_steps_add_one_separator_each(stored_prm, monkeypatch):
    scorer = prm_scorer(stored_prm[0])
    roots: list[list[int]] = []
    add = scorer.engine.add
    monkeypatch.setattr(
        scorer.engine, "add", lambda ids, *rest: (roots.append(list(ids)), add(ids, *rest))[1]
    )
    scorer.score([ScoreRequest("q <extra_0>?", tuple(TRICKY), "last\n\n")])
    assert [root.count(SEPARATOR) for root in roots] == [len(TRICKY)]


# ---- P19: the corners of Algorithm 1

Script = dict[tuple[str, int, int], tuple[list[int], float]]  # (source, step, index): ids, entropy


def run_script(
    monkeypatch: pytest.MonkeyPatch, script: Script, scores: dict[str, float], **settings: object
) -> Solution:
    """One search of real engines whose draws are the script's; scores by the step's first word."""
    detector = DetectorConfig(entropy_window=2, entropy_guard=4)
    sampling = SamplingParams(max_new_tokens=12)
    config = SearchConfig(n=2, sampling=sampling, detector=detector, **settings)
    keys = {
        candidate_key(config.seed, 0, step, source, index): entry
        for (source, step, index), entry in script.items()
    }

    def scripted(logits, specs, counters, vocab, seen):
        rows = [keys[spec.rng_key] for spec in specs]
        drawn = [ids[count] for (ids, _), count in zip(rows, counters, strict=True)]
        entropy = torch.tensor([entropy for _, entropy in rows])
        return ops.Samples(torch.tensor(drawn), entropy, torch.full((len(rows),), -1.0))

    class Scorer:
        def score(self, requests):
            return [scores[request.text.split()[0] if request.text else ""] for request in requests]

    monkeypatch.setattr("kvcore.engine.generation.sample", scripted)
    eviction = EvictionConfig.released(16, headroom=16)
    base = Engine(make_model(seed=1), CONFIG, eviction=eviction, detector=detector)
    helper = Engine(make_model(seed=2), CONFIG) if config.n_helper != 0 else None
    [solution] = solve(base, ["q"], scorer=Scorer(), helper=helper, config=config)
    for engine in (base, helper):
        if engine is not None:
            assert engine.num_sequences == 0 and engine.free_blocks == engine.num_blocks
    return solution


def step(text: str, entropy: float = 1.0) -> tuple[list[int], float]:
    return list(text.encode()), entropy


def test_p19_a_helpers_eos_inside_a_step_commits_and_stops(monkeypatch):
    script = {
        ("base", 0, 0): step("worse\n\n"),
        ("base", 0, 1): step("worse\n\n"),
        ("helper", 0, 0): ([*b"best", EOS], 1.0),
        ("helper", 0, 1): step("worse\n\n"),
    }
    solution = run_script(monkeypatch, script, {"worse": 0.1, "best": 0.9})
    assert solution.finish == "eos" and solution.error is None
    [only] = solution.steps
    assert (only.source, only.index, only.text, only.flag) == ("helper", 0, "best", "")
    assert only.tokens == (*b"best", EOS) == solution.token_ids


def test_p19_a_capped_step_is_committed_as_it_is_and_flagged(monkeypatch):
    script = {
        ("base", 0, 0): step("best without end"),
        ("base", 0, 1): step("worse\n\n"),
        ("base", 1, 0): ([*b"goes", EOS], 1.0),
        ("base", 1, 1): step("worse\n\n"),
    }
    scores = {"worse": 0.1, "best": 0.9, "goes": 0.8}
    solution = run_script(monkeypatch, script, scores, n_helper=0)
    assert [s.text for s in solution.steps] == ["best without", "goes"]
    assert [s.flag for s in solution.steps] == ["capped", ""]
    assert len(solution.steps[0].tokens) == 12 and solution.finish == "eos"


def test_p19_the_helper_keeps_the_pool_filled_when_all_base_candidates_are_aborted(monkeypatch):
    script = {
        ("base", 0, 0): step("lost in noise", entropy=9.0),
        ("base", 0, 1): step("lost in noise", entropy=8.0),
        ("helper", 0, 0): step("worse\n\n", entropy=9.0),  # the helper is not watched
        ("helper", 0, 1): step("best\n\n"),
        ("base", 1, 0): ([*b"goes", EOS], 1.0),
        ("base", 1, 1): step("worse\n\n"),
        ("helper", 1, 0): step("worse\n\n"),
        ("helper", 1, 1): step("worse\n\n"),
    }
    scores = {"worse": 0.1, "best": 0.9, "goes": 0.8}
    solution = run_script(monkeypatch, script, scores)
    chosen = [(s.source, s.index, s.text, s.flag) for s in solution.steps]
    assert chosen == [("helper", 1, "best\n\n", ""), ("base", 0, "goes", "")]
    assert solution.aborted.entropy == 2 and solution.finish == "eos"


def test_p19_without_helper_and_survivors_the_longest_sound_prefix_is_committed(monkeypatch):
    script = {
        ("base", 0, 0): step("lost in noise", entropy=9.0),
        ("base", 0, 1): step("sane a while", entropy=8.0),
        ("base", 1, 0): ([*b"goes", EOS], 1.0),
        ("base", 1, 1): step("worse\n\n"),
    }
    solution = run_script(monkeypatch, script, {"worse": 0.1, "goes": 0.8}, n_helper=0)
    first, second = solution.steps
    # Both fire at token 4; the one of lower entropy keeps the 3 tokens before.
    assert (first.index, first.text, first.flag, first.score) == (1, "san", "aborted_prefix", None)
    assert second.text == "goes" and solution.finish == "eos"
    assert solution.aborted.entropy == 2 and solution.error is None


# ---- P20: searches by the thousand


def test_p20_two_thousand_searches_in_a_scarce_pool_give_all_blocks_back():
    """Candidates are aborted at random by the detector, searches by an interruption."""
    tiny = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    detector = DetectorConfig(entropy_threshold=5.3, entropy_window=1, entropy_guard=4, gzip=False)
    base = Engine(
        make_model(seed=1, **tiny),
        EngineConfig(max_seqs=288, context_len=64, kv_blocks=300),
        eviction=EvictionConfig.released(16, headroom=18),
        detector=detector,
    )
    chance = random.Random(20)
    prompts = [Prompt("q", text="x" * chance.randint(1, 24), key=i) for i in range(2000)]
    finished, aborted, interrupted = 0, 0, 0
    for first in range(0, 2000, 500):
        config = SearchConfig(
            n=8,
            sampling=SamplingParams(max_new_tokens=8),
            max_steps=2,
            detector=detector,
            seed=first,
        )
        search = Search(
            base, prompts[first : first + 500], scorer=RandomScorer(first), config=config
        )
        running = search.run()
        for count, solution in enumerate(running, 1):
            assert solution.error is None and solution.steps
            aborted += solution.aborted.total
            if first == 1000 and count == 300:  # one search is interrupted
                running.close()
        finished += sum(s.finish != "interrupted" for s in search.solutions)
        interrupted += sum(s.finish == "interrupted" for s in search.solutions)
        assert base.num_sequences == 0
        assert base.free_blocks == base.num_blocks
        base.cache.store.check_integrity()
    assert finished >= 1800 and interrupted > 10
    assert aborted > 1000
    assert base.stats.kv_bytes_peak == base.num_blocks * base.model.shape.block_bytes
    assert base.stats.preemptions > 50 and base.stats.evictions > 1000
