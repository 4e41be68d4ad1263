"""Policies of this package and of others are found, named, and given their flags; what fails harms
nobody else.
"""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import pkgutil
import re
import sys
from pathlib import Path

import pytest
from support.cli_tools import make_model_dir, run
from typer.testing import CliRunner

import kvcore.policies
from kvcore import doctor
from kvcore.config import EvictionConfig
from kvcore.policies import Policy, available, failures, make_policy, policies, registry

GOOD = """
from dataclasses import dataclass
from kvcore.policies import Policy, PolicySettings, setting, spare_newest

@dataclass(frozen=True)
class LruSettings(PolicySettings):
    patience: int = setting(3, "steps that an entry may idle", low=1)
    window: int = setting(2, "queries that count")
    eager: bool = setting(False, "evict early")
    temperature: float = setting(0.5, "how much chance")

class Lru(Policy):
    name = "lru"
    summary = "what was used last"
    settings_type = LruSettings

    def score(self, cache, seqs):
        position = cache.positions(seqs)
        return spare_newest(position.float(), position, self.protect)

class Bare(Policy):
    name = "bare"

    def score(self, cache, seqs):
        raise NotImplementedError
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a distribution on the path: its name, its entry points, and its module's text."""
    monkeypatch.syspath_prepend(tmp_path)

    modules = []

    def install(dist: str, points: dict[str, str], text: str) -> None:
        module = dist.replace("-", "_")
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        lines = [f"{name} = {module}:{value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[kvcore.policies]", *lines, ""]))
        importlib.invalidate_caches()

    yield install
    registry._load.cache_clear()
    for module in modules:
        sys.modules.pop(module, None)


BUILT_IN = available()


def test_every_module_of_the_package_that_is_not_common_defines_one_policy():
    for module in pkgutil.iter_modules(kvcore.policies.__path__):
        if module.name in registry._COMMON:
            continue
        loaded = importlib.import_module(f"kvcore.policies.{module.name}")
        own = [v for v in vars(loaded).values() if registry._is_policy(v)]
        own = [policy for policy in own if policy.__module__ == loaded.__name__]
        assert [policy.name for policy in own] == [module.name]


@pytest.mark.parametrize("policy", policies().values(), ids=policies())
def test_a_policy_says_what_it_keeps_and_how_each_setting_reads(policy):
    assert policy.summary and "\n" not in policy.summary and policy.__doc__
    assert dataclasses.is_dataclass(policy.settings_type)
    for name, field in registry.own_settings(policy).items():
        assert field.metadata["help"], name
        with pytest.raises(ValueError, match=f"^{name}: expected .*got 'x'"):
            EvictionConfig(policy.name, 64, **{name: "x"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.settings_type().anything = 1


def test_settings_belong_to_those_who_read_them():
    readers = {"mix": {"rkv"}, "window": {"rkv", "snapkv"}, "seed": {"random"}}
    for name, who in readers.items():
        assert set(registry.readers(name)) == who
        for policy in set(BUILT_IN) - {"full"}:
            if policy in who:
                assert getattr(EvictionConfig(policy, 64, **{name: 1}), name) == 1
                continue
            with pytest.raises(ValueError, match=f"^{name}: .*'{policy}', which reads.*got 1"):
                EvictionConfig(policy, 64, **{name: 1})
            with pytest.raises(AttributeError, match=name):
                getattr(EvictionConfig(policy, 64), name)
        with pytest.raises(ValueError, match=f"^{name}: expected only with a policy that evicts"):
            EvictionConfig(**{name: 1})


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_setting_that_nobody_reads_is_an_error_of_both_kinds(error):
    for policy in ((), ("rkv", 8), ("knorm", 8)):
        with pytest.raises(error, match=r"^mixx: no setting of eviction"):
            EvictionConfig(*policy, mixx=1)


EXAMPLES = [
    EvictionConfig(),
    EvictionConfig(budget=64),
    EvictionConfig("rkv", budget=64, mix=0.9, window=3, pool_first=True),
    EvictionConfig("knorm", budget=8, layer_budgets=(4, 12), protect=3),
    EvictionConfig("random", budget=8, seed=5, scope="global", protect_prompt=True),
    EvictionConfig.released(8, "snapkv", head_budgets="adaptive"),
    EvictionConfig.released(8, headroom=20),
]


@pytest.mark.parametrize("config", EXAMPLES, ids=repr)
def test_settings_survive_records_text_and_copies(config):
    assert eval(repr(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert EvictionConfig.from_dict(config.as_dict()) == config
    assert EvictionConfig.from_dict(dataclasses.asdict(config)) == config
    assert dataclasses.replace(config) == config and hash(dataclasses.replace(config)) == hash(
        config
    )
    others = [other for other in EXAMPLES if other is not config]
    assert config not in others
    fields = ("budget", "protect", "cadence", "headroom", "policy")
    assert all(config.as_dict()[name] == getattr(config, name) for name in fields)


def test_fields_of_the_policy_are_replaced_like_the_others():
    config = EvictionConfig("rkv", budget=64, mix=0.9)
    changed = dataclasses.replace(config, window=3, budget=32)
    assert changed == EvictionConfig("rkv", budget=32, mix=0.9, window=3)
    assert dataclasses.replace(EvictionConfig(), policy="knorm", budget=8).policy == "knorm"
    with pytest.raises(ValueError, match=r"^settings: expected a .*'knorm', got RKVSettings"):
        dataclasses.replace(config, policy="knorm")


@pytest.mark.parametrize(
    "change",
    [
        {"protect": 128},
        {"protect": 4},
        {"cadence": "steady"},
        {"headroom": 9},
        {"protect_prompt": True},
        {"scope": "global"},
        {"head_budgets": "adaptive"},
        {"layer_budgets": (1, 2)},
        {"mix": 0.1},
    ],
    ids=str,
)
def test_without_eviction_no_setting_means_anything(change):
    [name] = change
    for policy in ((), ("full",)):
        with pytest.raises(ValueError, match=rf"^{name}: expected only with a policy that evicts"):
            EvictionConfig(*policy, **change)


# ---- other distributions


def test_a_policy_of_another_distribution_is_one_of_all(install):
    install("lru-policy", {"lru": "Lru", "bare": "Bare"}, GOOD)
    assert available() == (*BUILT_IN, "bare", "lru") and failures() == ()
    config = EvictionConfig("lru", budget=8, patience=5)
    assert config.patience == 5 and isinstance(make_policy(config), Policy)
    assert EvictionConfig("bare", budget=8).settings == kvcore.policies.PolicySettings()
    with pytest.raises(ValueError, match=r"^patience: expected an integer >= 1, got 0"):
        EvictionConfig("lru", budget=8, patience=0)
    with pytest.raises(ValueError, match=r"^patience: expected nothing with policy 'rkv'"):
        EvictionConfig("rkv", budget=8, patience=5)
    assert doctor.report()["policies"]["available"]["lru"] == "what was used last"


def test_a_policy_of_another_distribution_has_flags(install, tmp_path, monkeypatch):
    from kvcore.cli import app as commands
    from kvcore.cli import solve as solve_module

    install("lru-policy", {"lru": "Lru"}, GOOD)
    jobs: list = []
    monkeypatch.setattr(solve_module, "run_job", jobs.append)
    fresh = importlib.reload(commands)
    try:
        base = ("solve", "--base", str(make_model_dir(tmp_path)), "--question", "q?")
        flags = ("--evict", "lru", "--budget", "8", "--patience", "4", "--eager", "--window", "5")
        flags += ("--temperature", "0.1", "--evict-temperature", "0.7")
        done = CliRunner().invoke(fresh.app, [*base, *flags])
        assert done.exit_code == 0, done.output
        assert jobs[0].eviction == EvictionConfig(
            "lru", 8, patience=4, eager=True, window=5, temperature=0.7
        )
        assert jobs[0].search.sampling.temperature == 0.1
        help = " ".join(CliRunner().invoke(fresh.app, ["solve", "--help"]).stdout.split())
        assert "lru: steps that an entry may idle (default 3)." in help
        assert (
            "rkv, snapkv, lru: recent queries that vote, at most --protect (default 8; lru 2)"
            in help
        )
        done = CliRunner().invoke(fresh.app, [*base, "--budget", "8", "--patience", "4"])
        assert done.exit_code == 2
        assert "--patience: expected nothing with policy 'rkv'" in done.stderr
    finally:
        registry._load.cache_clear()
        monkeypatch.undo()
        importlib.reload(commands)


PATIENCE = 'patience: int = setting(3, "steps that an entry may idle", low=1)'
FAILING = {
    "not there": ({"lost": "Gone"}, "", "has no attribute 'Gone'"),
    "import error": ({"lost": "X"}, "import no_such_module_anywhere", "no_such_module_anywhere"),
    "leaves": ({"lost": "X"}, "raise SystemExit('bye')", "SystemExit: bye"),
    "no policy": ({"lost": "X"}, "X = 3", "expected a subclass of kvcore.policies.Policy"),
    "no score": (
        {"lost": "X"},
        "from kvcore.policies import Policy\nclass X(Policy):\n    name = 'lost'",
        "with a score",
    ),
    "another name": ({"lost": "Lru"}, GOOD, "name: expected 'lost', .*got 'lru'"),
    "full": ({"full": "Lru"}, GOOD, "name: expected another"),
    "name of a common setting": (
        {"lru": "Lru"},
        GOOD.replace("patience", "headroom"),
        "'headroom': expected another name",
    ),
    "type of another's setting": (
        {"lru": "Lru"},
        GOOD.replace("window: int = setting(2", "window: float = setting(2.0"),
        "'window': expected one of type int, as 'rkv' has it",
    ),
    "settings that change": (
        {"lru": "Lru"},
        GOOD.replace("settings_type = LruSettings", "settings_type = dict"),
        "settings_type: expected a frozen dataclass",
    ),
    "a setting without a default": (
        {"lru": "Lru"},
        GOOD.replace("(PolicySettings)", "").replace(PATIENCE, "patience: int"),
        "'patience': expected a default",
    ),
}


@pytest.mark.parametrize("what", FAILING)
def test_a_policy_that_cannot_be_used_is_named_and_the_others_work(install, what, tmp_path):
    points, text, why = FAILING[what]
    install("bad-policies", points, text)
    install("lru-two", {"fine": "Lru"}, GOOD.replace('"lru"', '"fine"'))
    [name] = points
    assert available() == (*BUILT_IN, "fine")
    assert EvictionConfig("rkv", 8).policy == "rkv" and EvictionConfig("fine", 8).patience == 3
    [failure] = failures()
    assert (failure.name, failure.source) == (name, f"bad_policies:{points[name]} of bad-policies")
    assert re.search(why, failure.error), failure.error
    if name != "full":
        with pytest.raises(ValueError, match=rf"^policy: expected one of .*got '{name}'.*{why}"):
            EvictionConfig(name, budget=8)
    done = run("doctor")
    assert done.exit_code == 0 and "fine" in done.stdout
    assert f"policy {name} (bad_policies:{points[name]} of bad-policies)" in done.stdout


def test_a_name_that_is_taken_is_an_error_that_names_both(install):
    text = GOOD.replace('"lru"', '"rkv"')
    install("impostor", {"rkv": "Lru"}, text)
    [failure] = failures()
    assert failure.source == "impostor:Lru of impostor"
    assert "kvcore.policies.rkv:RKV of kvcore" in failure.error
    assert type(make_policy(EvictionConfig("rkv", 8))).__module__ == "kvcore.policies.rkv"
    assert "impostor:Lru" in doctor.render() and "kvcore.policies.rkv:RKV" in doctor.render()


def test_two_strangers_of_one_name_are_both_refused(install):
    install("first-lru", {"lru": "Lru"}, GOOD)
    install("second-lru", {"lru": "Lru"}, GOOD)
    assert available() == BUILT_IN
    assert {f.source for f in failures()} == {
        "first_lru:Lru of first-lru",
        "second_lru:Lru of second-lru",
    }
    with pytest.raises(ValueError, match="first_lru:Lru of first-lru") as error:
        EvictionConfig("lru", budget=8)
    assert "second_lru:Lru of second-lru" in str(error.value)
