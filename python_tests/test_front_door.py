"""``import kvcore`` is light and complete, and says what everything is."""

from __future__ import annotations

import enum
import importlib
import inspect
import logging
import subprocess
import sys
import typing

import pytest
from support.cli_tools import run
from support.tiny_models import make_model

import kvcore
from kvcore import Engine, EngineConfig, EvictionConfig

EXPECTED = {
    *("Engine", "Output", "load_model", "load_prm", "solve", "best_of_n", "Search"),
    *("EngineConfig", "EvictionConfig", "SamplingParams", "DetectorConfig", "SearchConfig"),
    *("LoglikScorer", "PrmScorer", "RandomScorer", "pyramid_budgets"),
}


def in_new_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_needs_no_torch_until_a_name_is_used():
    in_new_process(
        "import sys, kvcore\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'typer'}\n"
        "dir(kvcore), kvcore.__version__, kvcore.__all__\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
        "kvcore.SamplingParams(), kvcore.EvictionConfig(budget=8), kvcore.pyramid_budgets(8, 2)\n"
        "assert 'torch' not in sys.modules\n"
        "kvcore.Engine\n"
        "assert 'torch' in sys.modules\n"
    )


def test_every_name_is_offered_and_found():
    assert set(kvcore.__all__) >= EXPECTED
    assert list(kvcore.__all__) == sorted(kvcore.__all__)
    namespace: dict[str, object] = {}
    exec("from kvcore import *", namespace)
    for name in kvcore.__all__:
        assert namespace[name] is getattr(kvcore, name)
        assert name in dir(kvcore)
    with pytest.raises(AttributeError, match="'kvcore' has no attribute 'nope'"):
        kvcore.nope  # noqa: B018


def test_names_are_those_of_their_modules():
    for module, names in kvcore._HOMES.items():
        for name in names:
            assert getattr(importlib.import_module(module), name) is getattr(kvcore, name)
    assert {n for names in kvcore._HOMES.values() for n in names} == set(kvcore.__all__)


def public_members(kind: type) -> list[tuple[str, object]]:
    members = [(name, inspect.getattr_static(kind, name)) for name in dir(kind)]
    return [
        (name, member)
        for name, member in members
        if not name.startswith("_") and getattr(member, "__module__", "kvcore").startswith("kvcore")
    ]


def own_doc(member: object) -> str:
    return inspect.cleandoc(getattr(member, "__doc__", None) or "")


@pytest.mark.parametrize("name", kvcore.__all__)
def test_every_public_name_says_what_it_is_takes_and_raises(name):
    thing = getattr(kvcore, name)
    doc = own_doc(thing)
    generated = inspect.isclass(thing) and doc.startswith(f"{name}(")  # by dataclass
    assert doc and not generated
    if not inspect.isclass(thing):
        assert "Raises" in doc or "raises" in doc or "arguments as" in doc
        return
    bad = []
    for member_name, member in public_members(thing):
        if isinstance(member, enum.Enum) or not (
            callable(member) or isinstance(member, (property, classmethod, staticmethod))
        ):
            continue
        if not inspect.getdoc(getattr(thing, member_name)):
            bad.append(member_name)
    fields = getattr(thing, "__dataclass_fields__", {})
    if "Attributes:" in doc:
        bad += [field for field in fields if field not in doc and not field.startswith("_")]
    assert not bad, f"{name}: no word on {bad}"


def test_type_checkers_see_the_names():
    assert typing.get_type_hints(Engine.generate)["return"] == list[kvcore.Output]


def test_the_same_ten_lines_run_with_and_without_eviction():
    for eviction in (EvictionConfig(budget=32), None):
        engine = Engine.from_pretrained(
            "demo:base", eviction=eviction, config=EngineConfig(max_seqs=4)
        )
        chat = [{"role": "user", "content": "a is 3. what is a?"}]
        [output] = engine.generate(chat, kvcore.SamplingParams(max_tokens=20))
        assert output.token_ids and output.cache.bytes <= output.cache.full_bytes
        assert "".join(engine.stream(chat, kvcore.SamplingParams(max_tokens=20))) == output.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eviction": 128}, "eviction: expected EvictionConfig or None, got 128"),
        ({"eviction": "rkv"}, "eviction: expected EvictionConfig or None"),
        ({"config": {}}, "config: expected EngineConfig or None"),
        ({"detector": True}, "detector: expected DetectorConfig or None"),
        ({"device": "cuda"}, "device: expected 'cpu'"),
        ({"dtype": "int8"}, "dtype: expected one of"),
    ],
)
def test_from_pretrained_refuses_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained("demo:base", **arguments)


def test_the_package_logs_nothing_unless_asked(capsys, caplog):
    [handler] = [h for h in logging.getLogger("kvcore").handlers if type(h).__module__ == "logging"]
    assert isinstance(handler, logging.NullHandler)
    out = in_new_process(
        "import io, contextlib, kvcore\n"
        "told = io.StringIO()\n"
        "with contextlib.redirect_stderr(told):\n"
        "    import transformers; transformers.utils.logging.disable_progress_bar()\n"
        "    kvcore.Engine.from_pretrained('demo:helper')\n"
        "print(repr(told.getvalue()))\n"
    )
    assert out.strip() == "''"
    with caplog.at_level(logging.INFO, logger="kvcore"):
        Engine(make_model(), EngineConfig(max_seqs=1), eviction=EvictionConfig(budget=9))
    assert any("budget=9" in record.getMessage() for record in caplog.records)


def test_preemption_is_logged(caplog):
    model = make_model()
    engine = Engine(model, EngineConfig(max_seqs=8, context_len=256, kv_blocks=40))
    with caplog.at_level(logging.INFO, logger="kvcore"):
        engine.generate([[i] * 60 for i in range(1, 5)], kvcore.SamplingParams(max_tokens=60))
    assert engine.stats.preemptions > 0
    assert any("preempted" in record.getMessage() for record in caplog.records)


# ---- the command line ----------------------------------------------------------------------------

MODEL = ("--model", "demo:base")


def test_python_m_kvcore_is_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "kvcore", "--version"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == f"kvcore {kvcore.__version__}\n"


def test_generate_shows_the_text_and_one_line_about_it():
    args = (*MODEL, "--chat", "--max-tokens", "40", "--seed", "3", "--dtype", "float32")
    bounds = ("--evict", "rkv", "--budget", "8", "--protect", "8")
    done = run("generate", *args, *bounds, "--prompt", "a is 3. what is a?")
    assert done.exit_code == 0, done.output
    engine = Engine.from_pretrained(
        "demo:base", eviction=EvictionConfig("rkv", 8, protect=8), dtype="float32",
        config=EngineConfig(max_seqs=2),
    )  # fmt: skip
    chat = [{"role": "user", "content": "a is 3. what is a?"}]
    [want] = engine.generate(chat, kvcore.SamplingParams(max_tokens=40), seed=3)
    assert done.stdout == want.text + "\n"
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{len(want.token_ids)} tokens in ") and "tokens/s" in line
    assert f"end: {want.finish_reason}; KV " in line and "held, a full cache " in line
    piped = run("generate", *args, "--prompt-file", "-")
    assert piped.exit_code == 2  # nothing on standard input


def test_several_continuations_are_shown_in_order():
    args = ("-n", "2", "--max-tokens", "5", "--prompt", "a is 3.", "--stop", "never")
    done = run("generate", *MODEL, *args)
    assert done.exit_code == 0, done.output
    assert done.stdout.index("--- 1 of 2\n") < done.stdout.index("--- 2 of 2\n")


def test_a_prompt_may_come_from_a_file(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("a is 3.")
    plain = run("generate", *MODEL, "--prompt", "a is 3.", "--max-tokens", "8")
    filed = run("generate", *MODEL, "--prompt-file", str(file), "--max-tokens", "8")
    assert plain.stdout == filed.stdout and filed.exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--prompt: expected either --prompt or --prompt-file, got neither"),
        (("--prompt", "a", "--prompt-file", "b"), "got both"),
        (("--prompt", ""), "--prompt: expected some text, got none"),
        (("--prompt-file", "/no/such"), "--prompt-file: cannot read '/no/such'"),
        (("--prompt", "a", "-n", "0"), "-n: expected an integer >= 1, got 0"),
        (("--prompt", "a", "--stop", ""), "--stop: expected a text that is not empty"),
        (("--prompt", "a", "--max-tokens", "0"), "--max-tokens: expected an integer >= 1, got 0"),
        (("--prompt", "a", "--min-p", "2"), "--min-p: expected 0 or a number"),
        (("--prompt", "a", "--repetition-penalty", "0"), "--repetition-penalty: expected a number"),
        (("--prompt", "a", "--top-k", "-1"), "--top-k: expected an integer >= 0"),
        (("--prompt", "a", "--seed", "-1"), "--seed: expected an integer >= 0"),
        (("--prompt", "a", "--budget", "0"), "--budget: expected an integer >= 1"),
        (("--prompt", "a", "--kv-gb", "0"), "--kv-gb: expected a number > 0"),
        (("--prompt", "a", "--threads", "0"), "--threads: expected an integer >= 1"),
        (
            ("--prompt", "a", "--own-sampling", "--top-p", "0.5"),
            "--top-p: expected nothing besides",
        ),
        (("--prompt", "a", "--template-arg", "x"), "--template-arg: expected NAME=VALUE"),
        (("--prompt", "a", "--dtype", "int8"), "--dtype: expected one of"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message):
    done = run("generate", *MODEL, *args)
    assert done.exit_code == 2
    assert message in done.output and done.output.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "demo:prm"), "--model: expected one that generates, got the rew"),
        (
            (*MODEL, "--own-sampling"),
            "--own-sampling: expected SamplingParams: model 'base' has",
        ),
    ],
)
def test_what_a_model_cannot_do_is_a_failure(args, message):
    done = run("generate", *args, "--prompt", "a")
    assert done.exit_code == 1 and message in done.output


def test_log_level_shows_what_is_logged():
    done = run("--log-level", "info", "generate", *MODEL, "--prompt", "a", "--max-tokens", "1")
    assert "INFO kvcore.models.loader: model: loading" in done.stderr
    assert "INFO" not in run("generate", *MODEL, "--prompt", "a", "--max-tokens", "1").stderr
    done = run("--log-level", "loud", "doctor")
    assert done.exit_code == 2 and "expected one of debug, info, warning, error" in done.output


def test_shells_can_complete():
    assert "--install-completion" in run("--help").stdout


def test_generate_imports_torch_only_when_it_runs():
    in_new_process(
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from kvcore.cli.app import app\n"
        "for args in (['generate', '--help'], ['generate', '--model', 'demo:base']):\n"
        "    CliRunner().invoke(app, args)\n"
        "assert 'torch' not in sys.modules\n"
    )
