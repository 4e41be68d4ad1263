"""Every wrong input is one clear line, every right one reaches its setting. No model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli_tools import (
    FakeSearch,
    install_fake,
    make_model_dir,
    run,
)

from kvcore.cli import solve as solve_module
from kvcore.cli.errors import FLAGS, in_flags
from kvcore.cli.settings import Job
from kvcore.config import (
    DetectorConfig,
    EngineConfig,
    EvictionConfig,
    SamplingParams,
    SearchConfig,
)
from kvcore.policies import available, policies
from kvcore.policies.registry import own_settings, readers

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeSearch]:
    return install_fake(monkeypatch)


# ---- what is refused before anything runs --------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--budget", "0"], "--budget: expected an integer >= 1, got 0"),
        (["--budget", "-3"], "--budget: expected an integer >= 1, got -3"),
        (["--budget", "many"], "--budget"),
        (["--evict", "rkv"], "--budget: expected an integer with policy 'rkv', got None"),
        (["--evict", "full", "--budget", "64"], "--budget: expected None with policy 'full'"),
        (["--evict", "full", "--protect", "4"], "--protect: expected only with a policy"),
        (["--mix", "0.5"], "--mix: expected only with a policy"),
        (
            ["--evict", "h2o", "--budget", "8", "--mix", "0.5"],
            "--mix: expected nothing with policy 'h2o'",
        ),
        (["--budget", "64", "--headroom", "64"], "--headroom: expected None with cadence 'steady'"),
        (["--budget", "64", "--cadence", "slow"], "--cadence: expected 'sawtooth' or 'steady'"),
        (["--budget", "64", "--kernel", "4"], "--kernel: expected an odd integer, got 4"),
        (["--headroom", "64"], "--headroom: expected only with a policy that evicts"),
        (["--evict", "nosuch", "--budget", "64"], "--evict: expected one of full, rkv, "),
        (["--budget", "64", "--window", "129"], "--window: expected at most protect (128)"),
        (["--evict", "streamingllm", "--budget", "3"], "--budget: expected an integer >= 4, got 3"),
        (
            ["--budget", "64", "--cadence", "sawtooth", "--headroom", "8"],
            "--headroom: expected more than protect (8)",
        ),
        (["--budget", "64", "--protect", "0"], "--protect: expected an integer >= 1"),
        (["--budget", "64", "--window", "0"], "--window: expected an integer >= 1"),
        (["--budget", "64", "--mix", "1.5"], "--mix: expected a number in [0, 1], got 1.5"),
        (["--budget", "64", "--mix", "nan"], "--mix: expected a number in [0, 1], got nan"),
        (["-n", "0"], "-n: expected an integer >= 1, got 0"),
        (["-n", "two"], "'-n'"),
        (["--n-helper", "2"], "--n-helper: expected 0 without --helper, got 2"),
        (["--n-helper", "-1"], "--n-helper: expected an integer >= 0, got -1"),
        (["--temperature", "-1"], "--temperature: expected 0 or a number in ["),
        (["--temperature", "inf"], "--temperature: expected 0 or a number in ["),
        (["--top-p", "0"], "--top-p: expected a number in (0, 1]"),
        (["--top-k", "-1"], "--top-k: expected an integer >= 0"),
        (["--max-step-tokens", "0"], "--max-step-tokens: expected an integer >= 1"),
        (["--max-steps", "0"], "--max-steps: expected an integer >= 1"),
        (["--max-tokens", "1"], "--max-tokens: expected an integer >= 2"),
        (["--seed", "-1"], "--seed: expected an integer >= 0, got -1"),
        (["--entropy-threshold", "0"], "--entropy-threshold: expected a number > 0"),
        (["--gzip-threshold", "1"], "--gzip-threshold: expected a number in (0, 1)"),
        (["--dtype", "int8"], "--dtype: expected one of bfloat16, float32"),
        (["--threads", "0"], "--threads: expected an integer >= 1"),
        (["--kv-gb", "0"], "--kv-gb: expected a number > 0"),
        (["--kv-gb", "nan"], "--kv-gb: expected a number > 0"),
        (["--max-seqs", "0"], "--max-seqs: expected an integer >= 1"),
        (["--scorer", "best"], "--scorer: expected loglik, random, prm:DIR or a model directory"),
        (["--scorer", "prm:/no/such"], "--scorer: expected a model directory, got '/no/such'"),
        (["--scorer", "prm:"], "--scorer: expected a model directory"),
        (["--prm-read", "extra0"], "--prm-read: expected only with a process reward model, got"),
        (["--prm-read", "first"], "--prm-read: expected one of extra0, newline_last, got 'first'"),
        (["--separator", ""], "--separator: expected texts or bytes that are not empty"),
        (["--separator", "\\q"], "--separator: expected \\n, \\r, \\t, \\xNN or \\\\ after a"),
        (["--separator", "\\"], "--separator: expected \\n, \\r, \\t, \\xNN or \\\\ after a"),
        (["--n-total", "0"], "--n-total: expected an integer >= 1, got 0"),
        (["--n-total", "4", "-n", "2"], "-n: expected nothing beside --n-total, got 2"),
        (["--n-total", "4", "--n-helper", "2"], "--n-helper: expected nothing beside n_total"),
        (["--helper", "/no/such"], "--helper: expected a model directory, got '/no/such'"),
        (["--question", ""], "--question: expected some text, got ''"),
        (["--question", " \n"], "--question: expected some text"),
        (["--questions", "/no/such.jsonl"], "--questions: expected either --question or"),
        (["--trace", "/no/such/folder/t.jsonl"], "--trace: expected an existing folder"),
        (["--json", "/"], "--json: expected a file, got the directory '/'"),
        (["--frobnicate"], "--frobnicate"),
        (["surplus"], "surplus"),
    ],
)
def test_wrong_input_is_one_clear_message_and_exit_code_2(
    fake: type[FakeSearch], model_dir: Path, args: list[str], message: str
) -> None:
    result = run("solve", "--base", model_dir, "--question", "q?", *args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--base"),
        (["--base", "/no/such"], "--base: expected a model directory, got '/no/such' (nothing th"),
        (["--base", __file__], "(a file)"),
        (["--base", str(Path(__file__).parent)], "(no config.json)"),
    ],
)
def test_base_must_be_a_model_directory(args: list[str], message: str) -> None:
    result = run("solve", *args, "--question", "q?")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_question_is_needed(model_dir: Path) -> None:
    result = run("solve", "--base", model_dir)
    assert result.exit_code == 2
    assert "--question: expected a question (or --questions FILE), got none" in result.stderr


def test_bad_line_of_a_question_file_is_named(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "a"}\n{"question": ""}\n')
    result = run("solve", "--base", model_dir, "--questions", file)
    assert result.exit_code == 2
    assert f"{file}, line 2: expected a non-empty string" in result.stderr


def test_unknown_command_and_no_command_are_usage_errors() -> None:
    assert run("demonstrate").exit_code == 2
    assert "No such command" in run("demonstrate").output
    assert run().exit_code == 2
    assert "Usage" in run().output


def test_every_flag_that_messages_name_exists() -> None:
    helps = [run(command, "--help") for command in ("solve", "demo")]
    assert all(done.exit_code == 0 for done in helps)
    for flag in set(FLAGS.values()):
        assert any(flag in done.stdout for done in helps)


def test_documented_flags_are_those_that_exist() -> None:
    flag = re.compile(r"--[a-z][a-z-]*")
    documented = set(flag.findall((DOCS / "cli.md").read_text()))
    helps = [run(command, "--help").stdout for command in ("solve", "demo")]
    existing = set(flag.findall("".join(helps)))
    assert documented - {"--version"} == existing - {"--n", "--help"}


def test_help_and_documentation_name_every_policy() -> None:
    text = re.sub(r"[│\s]+", " ", run("solve", "--help").stdout)
    [listed] = re.findall(r"Policy: (.*?);", text)
    assert set(re.split(", | or ", listed)) == set(available())
    rows = (DOCS / "cli.md").read_text().partition("| policy |")[2].partition("\n\n")[0]
    table = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", rows, re.MULTILINE))
    registered = {name: policy.summary for name, policy in policies().items()}
    assert table == registered | {"full": "everything"}


def test_documentation_names_the_readers_and_the_default_of_every_setting_of_a_policy() -> None:
    text = (DOCS / "cli.md").read_text()
    for policy in policies().values():
        for name, field in own_settings(policy).items():
            if name == "seed":  # the command's own
                continue
            flag = "--" + name.replace("_", "-")
            [row] = re.findall(rf"^\| `{flag}\b.*\|$", text, re.MULTILINE)
            who = ", ".join(f"`{reader}`" for reader in readers(name))
            assert f"| {who}: " in row, row
            assert isinstance(field.default, bool) or f"({field.default})" in row, row


def test_messages_keep_words_that_are_no_setting() -> None:
    assert in_flags("top_p: expected 1") == "--top-p: expected 1"
    assert in_flags("questions[3]: expected 1") == "--question: expected 1"
    assert in_flags("file.jsonl, line 2: bad") == "file.jsonl, line 2: bad"
    assert in_flags("no setting here") == "no setting here"


# ---- flags become settings -----------------------------------------------------------------------


@pytest.fixture
def job_of(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Callable[..., Job]:
    def job_of(*args: str) -> Job:
        jobs: list[Job] = []
        monkeypatch.setattr(solve_module, "run_job", jobs.append)
        result = run("solve", "--base", model_dir, *args)
        assert result.exit_code == 0, result.output
        return jobs[0]

    return job_of


def test_defaults_are_those_of_the_library(job_of: Callable[..., Job]) -> None:
    job = job_of("--question", "q?")
    assert job.eviction == EvictionConfig()
    assert job.search == replace(SearchConfig(), detector=None)
    assert job.engine == replace(EngineConfig(), context_len=SearchConfig().max_tokens)
    assert (job.helper, job.system_prompt, job.dtype, job.threads) == (None, None, None, None)
    assert job.questions == ("q?",)


def test_every_flag_reaches_its_setting(job_of: Callable[..., Job], model_dir: Path) -> None:
    flags = (
        "--question a --question b --n-helper 3 -n 2 --evict rkv --budget 32 --protect 7 "
        "--cadence sawtooth --headroom 40 --window 6 --mix 0.2 --kernel 5 --threshold 0.4 "
        "--pool-first --scope global --protect-prompt --max-step-tokens 99 --max-steps 7 "
        "--max-tokens 500 --temperature 0.5 --top-p 0.9 --top-k 11 --seed 13 "
        "--entropy-threshold 5 --gzip-threshold 0.2 --repetition --dtype float32 --threads 1 "
        "--kv-gb 0.5 --max-seqs 9 --system-prompt think"
    )
    helper = ["--helper", str(model_dir), "--scorer", f"prm:{model_dir}"]
    job = job_of(*flags.split(), *helper)
    assert job.questions == ("a", "b")
    assert job.eviction == EvictionConfig(
        "rkv",
        32,
        cadence="sawtooth",
        protect=7,
        headroom=40,
        window=6,
        mix=0.2,
        kernel=5,
        threshold=0.4,
        pool_first=True,
        scope="global",
        protect_prompt=True,
    )
    assert job.search == SearchConfig(
        n=2,
        n_helper=3,
        sampling=SamplingParams(0.5, 0.9, 11, 99),
        max_steps=7,
        max_tokens=500,
        detector=DetectorConfig(entropy_threshold=5, gzip_threshold=0.2, repetition=True),
        seed=13,
    )
    assert job.engine == EngineConfig(max_seqs=9, context_len=500, kv_bytes=2**29)
    assert (job.dtype, job.threads, job.system_prompt) == ("float32", 1, "think")
    assert (job.helper, job.scorer.path, job.scorer.kind) == (model_dir, model_dir, "prm")


def test_search_flags_reach_their_settings(job_of: Callable[..., Job], model_dir: Path) -> None:
    asked = ["--question", "q?", "--helper", str(model_dir)]
    flags = ["--n-total", "5", "--separator", r"\n", "--separator", r"##\xe2\\", "--separator", "é"]
    prm = ["--scorer", str(model_dir), "--prm-read", "newline_last"]
    job = job_of(*asked, *flags, *prm)
    assert job.search.separators == (b"\n", b"##\xe2\\", "é".encode())
    assert job.search.candidates(helper=True) == (3, 2)
    assert job.scorer is not None and (job.scorer.kind, job.scorer.read) == ("prm", "newline_last")
    told = json.loads(json.dumps(job.as_json()))
    assert told["search"]["separators"] == ["\n", "##\\xe2\\", "é"]
    assert (told["prm_read"], told["search"]["n_total"]) == ("newline_last", 5)


def test_a_scorer_is_asked_for_where_there_is_a_choice(
    fake: type[FakeSearch], model_dir: Path
) -> None:
    base = ["solve", "--base", model_dir, "--question", "q?"]
    for args in ([], ["-n", "2"], ["--helper", model_dir, "-n", "1"], ["--n-total", "2"]):
        result = run(*base, *args, scorer=None)
        assert (result.exit_code, result.stdout) == (2, "")
        for choice in ("--scorer: expected", "prm:DIR", "loglik", "random", "got none"):
            assert choice in " ".join(result.stderr.split())
    for args in (["-n", "1"], ["--helper", model_dir, "--n-total", "1"]):
        assert run(*base, *args, scorer=None).exit_code == 0


def test_budget_alone_means_rkv_and_no_detector_means_none(job_of: Callable[..., Job]) -> None:
    job = job_of("--question", "q?", "--budget", "64", "--no-detector")
    assert (job.eviction.policy, job.eviction.budget) == ("rkv", 64)
    assert job.search.detector is None


def test_a_policy_that_draws_takes_the_seed_of_the_run(job_of: Callable[..., Job]) -> None:
    job = job_of("--question", "q?", "--evict", "random", "--budget", "64", "--seed", "13")
    assert job.eviction == EvictionConfig("random", 64, seed=13)


def test_the_sawtooth_alone_is_the_released_setting(job_of: Callable[..., Job]) -> None:
    job = job_of("--question", "q?", "--budget", "64", "--cadence", "sawtooth")
    assert job.eviction == EvictionConfig.released(64)


def test_best_of_n_has_a_detector_only_if_asked(
    job_of: Callable[..., Job], model_dir: Path
) -> None:
    asked = ["--question", "q?"]
    assert job_of(*asked).search.detector is None
    assert job_of(*asked, "--detector").search.detector == DetectorConfig()
    assert job_of(*asked, "--helper", str(model_dir)).search.detector == DetectorConfig()
    helped = job_of(*asked, "--helper", str(model_dir), "--no-detector")
    assert helped.search.detector is None


def test_questions_come_from_a_file_in_order(job_of: Callable[..., Job], tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "a"}\n\n{"problem": "b", "answer": 3}\n')
    assert job_of("--questions", str(file)).questions == ("a", "b")
