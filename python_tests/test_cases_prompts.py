"""Prompts that broke other engines, by the number of their case: P23, P25, P30."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.cli_tools import run as kvcore
from support.tiny_models import CHAT_TEMPLATE, byte_tokenizer, make_module, save_model, save_prm
from support.tokenizer_zoo import ZOO

from kvcore import ops
from kvcore.config import EngineConfig, SamplingParams, SearchConfig
from kvcore.engine import Engine
from kvcore.models import bind_model, load_prm
from kvcore.models.token_bytes import token_byte_list
from kvcore.search import (
    DEFAULT_SYSTEM_PROMPT,
    LoglikScorer,
    PrmScorer,
    Prompt,
    RandomScorer,
    ScoreRequest,
    Search,
    best_of_n,
    solve,
)
from kvcore.search.trajectory import candidate_key

CONFIG = EngineConfig(max_seqs=16, context_len=512, kv_bytes=16 << 20)
SHORT = SearchConfig(
    n=1, max_steps=1, detector=None, sampling=SamplingParams(max_new_tokens=2, temperature=0.0)
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
    + CHAT_TEMPLATE
)
SILENT = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}{% endfor %}"
)
THINKING = CHAT_TEMPLATE + "{% if not enable_thinking %}<no thinking {{ level }}>{% endif %}"


class Recorder(Engine):
    """An engine that remembers the texts it was fed, special tokens left out."""

    def __init__(self, tokenizer, *, name="tiny", seed=0, config=CONFIG):
        self.prompts: list[str] = []
        self.fed: list[str] = []
        super().__init__(bind_model(make_module(seed=seed), tokenizer, name=name), config)
        self.pieces = token_byte_list(tokenizer)

    def add(self, tokens, generate=None):
        self.prompts.append(self.say(tokens))
        return super().add(tokens, generate)

    def extend(self, seq, tokens, output=None):
        self.fed.append(self.say(tokens))
        return super().extend(seq, tokens, *([] if output is None else [output]))

    def say(self, tokens):
        return b"".join(self.pieces[t] for t in tokens).decode("utf-8", "replace")


def record(engine):
    """Remembers what texts an engine is given as prompts from now on."""
    fed, add, pieces = [], engine.add, token_byte_list(engine.model.tokenizer)

    def remember(ids):
        fed.append(b"".join(pieces[i] for i in ids))
        return add(ids)

    engine.add = remember
    return fed


def engine(template=CHAT_TEMPLATE, kind="byte level", **options):
    tokenizer = ZOO[kind]()
    tokenizer.chat_template = template
    return Recorder(tokenizer, **options)


# ---- P23: templates that fail


@pytest.mark.parametrize("role", ["base", "helper"])
def test_p23_a_template_without_system_role_is_one_error_before_anything_runs(role):
    engines = {"base": engine(name="one"), "helper": engine(name="two")}
    engines[role] = engine(NO_SYSTEM, name="odd")

    def search(system):
        return Search(
            engines["base"],
            ["q"],
            helper=engines["helper"],
            scorer=RandomScorer(),
            config=SHORT,
            system_prompt=system,
        )

    for system in (DEFAULT_SYSTEM_PROMPT, "Be brief."):
        with pytest.raises(ValueError, match=r"^system_prompt: .*--system-prompt") as error:
            search(system)
        message = str(error.value)
        assert role in message and "'odd'" in message and "no system, please" in message
        assert "chat template" in message and "\n" not in message
    for system in ("", None):
        [solution] = search(system).run()
        assert solution.error is None
    assert all(e.num_sequences == 0 for e in engines.values())


BROKEN = {
    "syntax": ("{% for m in messages %}{{ m['content'] }", "TemplateSyntaxError"),
    "undefined": ("{{ messages[0].nothing.more }}", "UndefinedError"),
    "raises": ("{{ raise_exception('never') }}", "never"),
    "named": ({"tool_use": CHAT_TEMPLATE, "rag": CHAT_TEMPLATE}, "default"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("role", ["base", "helper"])
def test_p23_a_template_that_cannot_be_used_is_one_error_before_anything_runs(case, role):
    template, reason = BROKEN[case]
    engines = {"base": engine(), "helper": engine()}
    engines[role] = engine(template, name="odd")
    with pytest.raises(ValueError, match=rf"^{role}: the chat template of 'odd'") as error:
        Search(
            engines["base"], ["q"], helper=engines["helper"], scorer=RandomScorer(), config=SHORT
        )
    assert reason in str(error.value) and "--system-prompt" in str(error.value)
    assert "\n" not in str(error.value)
    assert engines["base"].prompts == []
    # Prompts of one's own need no template.
    prompts = [Prompt("q", text="exactly")]
    [solution] = solve(engines[role], prompts, scorer=RandomScorer(), config=SHORT)
    assert solution.error is None and engines[role].prompts == ["exactly"]


def test_p23_named_templates_with_a_default_are_served():
    named = {"default": CHAT_TEMPLATE, "tool_use": "{{ 1 }}"}
    base = engine(named)
    [solution] = solve(base, ["q"], scorer=RandomScorer(), config=SHORT)
    assert solution.error is None and "user\nq" in base.prompts[0]


def test_p23_a_scorers_template_fails_before_anything_runs(tmp_path):
    model = load_prm(save_prm(tmp_path / "prm"))
    model.tokenizer.chat_template = BROKEN["syntax"][0]
    base = engine()
    with pytest.raises(ValueError, match=r"^scorer: the chat template"):
        Search(base, ["q"], scorer=PrmScorer(Engine(model, CONFIG)), config=SHORT)
    model.tokenizer.chat_template = NO_SYSTEM
    with pytest.raises(ValueError, match=r"^system_prompt: .*scorer model"):
        Search(base, ["q"], scorer=PrmScorer(Engine(model, CONFIG)), config=SHORT)
    judge = engine(NO_SYSTEM, name="judge")
    with pytest.raises(ValueError, match=r"^system_prompt: .*scorer model 'judge'"):
        Search(base, ["q"], scorer=LoglikScorer(judge), config=SHORT)


@pytest.mark.parametrize("args", [[], ["--helper"]])
def test_p23_on_the_command_line(args, tmp_path):
    good, odd = save_model(tmp_path / "good"), save_model(tmp_path / "odd")
    (odd / "chat_template.jinja").write_text(NO_SYSTEM)
    models = ["--base", str(good), "--helper", str(odd)] if args else ["--base", str(odd)]
    options = ["--question", "q", "--max-steps", "1", "--max-step-tokens", "2", "-n", "1"]
    result = kvcore("solve", *models, *options, "--scorer", "random")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --system-prompt: ") and result.stderr.count("\n") == 1
    assert "'odd'" in result.stderr and "chat template" in result.stderr
    result = kvcore("solve", *models, *options, "--scorer", "random", "--system-prompt", "")
    assert result.exit_code == 0


# ---- P30: with and without a template


def test_p30_a_model_without_a_template_is_given_the_same_text_and_it_is_said():
    base, helper = engine(None, name="bare"), engine(name="chatty")
    search = Search(
        base,
        ["Why?"],
        helper=helper,
        scorer=RandomScorer(),
        config=SHORT,
        system_prompt="Be brief.",
    )
    [warning] = search.warnings
    assert "no chat template" in warning and "'bare'" in warning and "'chatty'" not in warning
    list(search.run())
    assert base.prompts == ["Be brief.\n\nWhy?"]
    assert helper.prompts == ["system\nBe brief.\nuser\nWhy?\nassistant\n"]


@pytest.mark.parametrize("system", ["Be brief.", DEFAULT_SYSTEM_PROMPT, None])
@pytest.mark.parametrize("bare", ["base", "helper", "both", "none"])
def test_p30_every_model_gets_the_same_system_prompt_or_none(bare, system):
    templates = {r: None if bare in (r, "both") else CHAT_TEMPLATE for r in ("base", "helper")}
    base, helper = engine(templates["base"]), engine(templates["helper"])
    judge = engine(templates["helper"])
    search = Search(
        base,
        ["Why?"],
        helper=helper,
        scorer=LoglikScorer(judge),
        config=SHORT,
        system_prompt=system,
    )
    list(search.run())
    given = system if bare != "both" or system != DEFAULT_SYSTEM_PROMPT else None
    for one in (base, helper, judge):
        [prompt] = one.prompts
        assert "Why?" in prompt and (given is None or given in prompt)
        assert given is not None or "system" not in prompt
        assert DEFAULT_SYSTEM_PROMPT not in prompt or given == DEFAULT_SYSTEM_PROMPT
    said = len([w for w in search.warnings if "no chat template" in w])
    assert said == (bare != "none" and (given is not None or bare != "both"))


def test_p30_a_scorer_without_a_template_is_given_the_same_text(tmp_path):
    model = load_prm(save_prm(tmp_path / "prm"))
    model.tokenizer.chat_template = None
    scorer = PrmScorer(Engine(model, CONFIG))
    fed = record(scorer.engine)
    base = engine(None)
    solve(base, ["Why?"], scorer=scorer, config=SHORT, system_prompt="Be brief.")
    assert fed == [b"Be brief.\n\nWhy?"] and base.prompts == ["Be brief.\n\nWhy?"]
    assert len(scorer.score([ScoreRequest("Why?", (), "so")])) == 1
    assert fed[1:] == [b"Why?"]


def test_p30_a_template_that_leaves_the_system_prompt_out_is_said():
    base, helper = engine(SILENT, name="silent"), engine()
    search = Search(base, ["q"], scorer=RandomScorer(), config=SHORT, system_prompt="Be brief.")
    assert ["leaves the system prompt out" in w for w in search.warnings] == [True]
    search = Search(base, ["q"], helper=helper, scorer=RandomScorer(), config=SHORT)
    assert ["'silent'" in w for w in search.warnings] == [True]
    assert Search(base, ["q"], scorer=RandomScorer(), config=SHORT).warnings == []


def test_p30_on_the_command_line(tmp_path):
    bare, chatty = save_model(tmp_path / "bare"), save_model(tmp_path / "chatty")
    (bare / "chat_template.jinja").unlink()
    trace = tmp_path / "trace.jsonl"
    result = kvcore(
        *("solve", "--base", str(bare), "--helper", str(chatty), "--question", "Why?"),
        *("--system-prompt", "Be brief.", "--max-steps", "1", "--max-step-tokens", "2"),
        *("-n", "1", "--trace", str(trace)),
    )
    assert result.exit_code == 0 and (result.output).count("no chat template") == 1
    start = [json.loads(line) for line in trace.read_text().splitlines()]
    [begun] = [event for event in start if event.get("event") == "problem_start"]
    assert begun["prompt_tokens"] == len("Be brief.\n\nWhy?") - 2  # ".\n\n" is one token


# ---- P25: from a byte-level base to a SentencePiece helper


@pytest.mark.parametrize(
    "kind", ["llama legacy", "metaspace first", "metaspace always", "byte level, prefix", "unigram"]
)
@pytest.mark.parametrize("judge", ["helper", "own"])
def test_p25_helper_and_judge_hold_the_text_that_the_base_wrote(kind, judge, monkeypatch):
    written = [b"x = 12", b"34.\n\n", b"so \xf0\x9f\xa7", b"\x91 </s>"]  # most cut by the limit
    config = SearchConfig(
        n=1,
        n_helper=0,
        max_steps=len(written),
        detector=None,
        sampling=SamplingParams(max_new_tokens=6),
    )
    script = {
        candidate_key(config.seed, 0, step, "base", 0): text for step, text in enumerate(written)
    }

    def scripted(logits, specs, counters, vocab, seen):
        drawn = [script[s.rng_key][c] for s, c in zip(specs, counters, strict=True)]
        return ops.Samples(torch.tensor(drawn), torch.ones(len(specs)), -torch.ones(len(specs)))

    monkeypatch.setattr("kvcore.engine.generation.sample", scripted)
    base, helper = Recorder(byte_tokenizer()), engine(kind=kind, seed=1)
    own = engine(kind=kind, seed=2)
    scorer = LoglikScorer(own) if judge == "own" else LoglikScorer()
    held = []

    def look(event):
        if event.event == "step" and event.step + 1 < len(written):
            root = search._rescue.active[0].sides["helper"].root
            held.append(b"".join(helper.pieces[t] for t in helper.tokens(root)))

    search = Search(base, ["q"], helper=helper, scorer=scorer, config=config, on_event=look)
    [solution] = search.run()
    assert solution.error is None and solution.finish == "max_steps"
    prompt = helper.prompts[0].encode()
    assert held == [prompt + b"".join(written[:count]) for count in (1, 2, 3)]
    judged = own.fed if judge == "own" else helper.fed
    assert {"x = 12", "34.\n\n", " </s>"} <= {text.lstrip("\ufffd") for text in judged}
    assert not any(text.startswith(" ") for text in judged)


# ---- template args


def test_template_args_reach_every_template(tmp_path):
    base, helper, judge = engine(THINKING), engine(THINKING), engine(THINKING)
    args = {"enable_thinking": False, "level": 3}
    solve(
        *(base, ["q"]),
        helper=helper,
        scorer=LoglikScorer(judge),
        config=SHORT,
        template_args=args,
    )
    for one in (base, helper, judge):
        assert one.prompts[0].endswith("<no thinking 3>")
    best_of_n(
        base, ["q"], scorer=RandomScorer(), config=SHORT, template_args={"enable_thinking": 1}
    )
    assert "no thinking" not in base.prompts[1]
    prm = load_prm(save_prm(tmp_path / "prm"))
    prm.tokenizer.chat_template = "{{ level }}" + CHAT_TEMPLATE
    scorer = PrmScorer(Engine(prm, CONFIG))
    fed = record(scorer.engine)
    solve(base, ["q"], scorer=scorer, config=SHORT, template_args=args)
    assert fed[0].startswith(b"3system")


@pytest.mark.parametrize(
    "name",
    ["messages", "tokenize", "chat_template", "tools", "a b", "", 3],
)
def test_names_that_are_not_the_users_are_refused(name):
    base = engine()
    with pytest.raises(ValueError, match=r"^template_args: "):
        Search(base, ["q"], scorer=RandomScorer(), config=SHORT, template_args={name: 1})


def test_a_keyword_that_no_template_reads_is_said():
    search = Search(
        engine(THINKING),
        ["q"],
        scorer=RandomScorer(),
        config=SHORT,
        template_args={"enable_thinkng": False},
    )
    assert ["'enable_thinkng'" in w for w in search.warnings] == [True]


def save_thinking(folder: Path) -> Path:
    save_model(folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    return folder


def test_template_args_on_the_command_line(tmp_path):
    folder = save_thinking(tmp_path / "m")
    trace = tmp_path / "trace.jsonl"
    options = ["--max-steps", "1", "--max-step-tokens", "2", "-n", "1", "--scorer", "random"]

    def prompt_tokens(*args):
        result = kvcore(
            *("solve", "--base", str(folder), "--question", "q", "--trace", str(trace)),
            *(*options, *args),
        )
        assert result.exit_code == 0, result.stderr
        events = [json.loads(line) for line in trace.read_text().splitlines()]
        [begun] = [e for e in events if e.get("event") == "problem_start"]
        return begun["prompt_tokens"]

    thinking = prompt_tokens("--template-arg", "enable_thinking=true")
    short = prompt_tokens("--template-arg", "enable_thinking=false", "--template-arg", "level=ab c")
    assert short - thinking == len("<no thinking ab c>")


@pytest.mark.parametrize(
    "args",
    [["enable_thinking"], ["=1"], ["a b=1"], ["messages=[]"], ["x=1", "x=2"], ["tokenize=true"]],
)
def test_bad_template_args_are_usage_errors(args, tmp_path):
    folder = save_thinking(tmp_path / "m")
    flags = [word for arg in args for word in ("--template-arg", arg)]
    result = kvcore("solve", "--base", str(folder), "--question", "q", *flags)
    assert result.exit_code == 2 and "--template-arg: " in result.stderr


def test_template_args_are_json_or_text():
    from kvcore.cli.settings import parse_template_args

    texts = ["a=false", "b=3", 'c="x"', "d=high", "e=[1, 2]", "f=", "g=a=b", "h=null"]
    assert parse_template_args(texts) == {
        **{"a": False, "b": 3, "c": "x", "d": "high", "e": [1, 2], "f": "", "g": "a=b"},
        "h": None,
    }
