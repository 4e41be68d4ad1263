"""``kvcore demo`` and the names ``demo:*``: what they print, write and refuse."""

import json
import shutil

import pytest
from support.cli_tools import run

from kvcore.demo import rows, weights
from kvcore.models import embedded
from kvcore.policies import available

NAMES = ", ".join(name for name in available() if name != "full")


def test_a_small_demo_prints_its_table_and_writes_json_and_trace(tmp_path):
    result, trace = tmp_path / "demo.json", tmp_path / "trace.jsonl"
    done = run("demo", "--problems", "3", "-n", "2", "--json", str(result), "--trace", str(trace))
    assert done.exit_code == 0, done.output
    for method in rows.METHODS:
        assert rows.title(method, 2) in done.output
    assert str(trace) in done.output
    told = json.loads(result.read_text())
    assert [row["method"] for row in told["rows"]] == list(rows.METHODS)
    keys = {"method", "accuracy", "base_tokens", "helper_tokens", "steps", "aborted", "kv_bytes"}
    assert all(keys | {"seconds"} <= row.keys() for row in told["rows"])
    assert {"recovered", "recovered_half"} <= told.keys()
    counts = {row["method"]: (row["n"], row["n_helper"]) for row in told["rows"]}
    assert (counts["rescue"], counts["rescue_half"], counts["full"]) == ((2, 2), (1, 1), (2, 0))
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(event["event"] == "problem_end" for event in events) == 3


def test_the_same_seed_gives_the_same_table(tmp_path):
    tables = []
    for i in range(2):
        path = tmp_path / f"{i}.json"
        args = ("--problems", "2", "-n", "2", "--seed", "5", "--trace", str(tmp_path / "t"))
        assert run("demo", *args, "--json", str(path)).exit_code == 0
        tables.append(json.loads(path.read_text())["rows"])
    for row in (row for table in tables for row in table):
        del row["seconds"]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("n", "both"), [(1, (1, 1)), (2, (1, 1)), (3, (2, 1)), (4, (2, 2)), (5, (3, 2)), (8, (4, 4))]
)
def test_half_of_the_candidates_are_each_models_and_the_odd_one_is_the_bases(n, both):
    assert rows.candidates("rescue_half", n) == both
    assert rows.candidates("rescue", n) == (n, n)
    assert rows.title("rescue_half", n) == "KV-Rescue {}+{}".format(*both)
    assert rows.title("evicted", n) == "base, evicted"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--problems", "0"], "--problems: expected an integer >= 1, got 0"),
        (["--problems", "-4"], "--problems: expected an integer >= 1, got -4"),
        (["--budget", "0"], "--budget: expected an integer >= 1, got 0"),
        (["-n", "0"], "-n: expected an integer >= 1, got 0"),
        (["--seed", "-1"], "--seed"),
        (["--threads", "0"], "--threads: expected an integer >= 1, got 0"),
        (["--policy", "lru"], f"--policy: expected one of {NAMES}, got 'lru'"),
        (["--policy", "full"], f"--policy: expected one of {NAMES}, got 'full'"),
        (
            ["--policy", "streamingllm", "--budget", "3"],
            "--budget: expected an integer >= 4, got 3",
        ),
        (["--json", "/nowhere/x.json"], "--json: expected an existing folder"),
        (["--trace", "/nowhere/x.jsonl"], "--trace: expected an existing folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message):
    done = run("demo", *args)
    assert done.exit_code == 2
    assert message in done.output and done.output.count("\n") == 1


def test_damaged_weights_end_the_demo_with_the_file_and_the_way_out(tmp_path, monkeypatch):
    copy = shutil.copytree(weights.ROOT, tmp_path / "weights")
    (copy / "prm" / "model.safetensors").write_bytes(b"junk")
    for module in (weights, embedded):
        monkeypatch.setattr(module, "ROOT", copy)
    done = run("demo", "--problems", "1")
    assert done.exit_code == 1
    assert "prm/model.safetensors" in done.output and "reinstall" in done.output
    done = run("solve", "--base", "demo:base", "--scorer", "demo:prm", "--question", "x")
    assert done.exit_code == 1 and "prm/model.safetensors" in done.output


def test_solve_takes_the_embedded_models_by_name(tmp_path):
    problem = rows.Settings(budget=32, n=4, policy="rkv", problems=1, seed=0).draw()[0]
    path = tmp_path / "out.json"
    args = ("--base", "demo:base", "--helper", "demo:helper", "--scorer", "demo:prm")
    done = run("solve", *args, "-n", "2", "--question", problem.question, "--json", str(path))
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text())["answer"] == problem.answer


@pytest.mark.parametrize("flag", ["--base", "--helper", "--scorer"])
def test_an_unknown_embedded_name_is_refused_by_flag(flag):
    args = {"--base": "demo:base", "--helper": "demo:helper", "--scorer": "demo:prm"}
    args[flag] = "demo:judge"
    done = run("solve", *[x for pair in args.items() for x in pair], "--question", "x")
    assert done.exit_code == 2
    assert f"{flag}: " in done.output and "demo:base, demo:helper, demo:prm" in done.output
