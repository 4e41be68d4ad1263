"""The arrows of the design: which directory may include or import which.

csrc:    base <- ops <- {cpu, cuda};  base, ops <- store;  base <- detect;  all <- bindings
kvcore:  checks <- policies <- config, files <- native <- ops <- cache <- evictor <- models
         <- engine <- search <- eval <- {demo, view} <- {doctor, cli};  train beside eval sees up
         to models, and demo sees it

``policies`` are the settings and the policies themselves, which load without torch and name what
they score in annotations only. ``evictor`` is what works on a cache: policies/evictor.py and
policies/selection.py.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CSRC_SEES = {
    "base": set(),
    "ops": {"base"},
    "cpu": {"base", "ops"},
    "cuda": {"base", "ops"},
    "store": {"base", "ops"},
    "detect": {"base"},
    "bindings": {"base", "ops", "cpu", "cuda", "store", "detect"},
}

CHAIN = [
    *("checks", "policies", "config", "files", "native", "ops", "cache", "evictor", "models"),
    *("engine", "search"),
]
EVICTOR = ("evictor", "selection", "Evictor", "evict")  # of kvcore.policies
NO_TORCH = ("checks", "policies", "config")  # rooms that settings come from
KVCORE_SEES = {name: set(CHAIN[:i]) for i, name in enumerate(CHAIN)}
KVCORE_SEES["train"] = set(CHAIN[: CHAIN.index("engine")])
KVCORE_SEES["eval"] = set(CHAIN)
KVCORE_SEES["view"] = {*CHAIN, "eval"}
KVCORE_SEES["demo"] = {*CHAIN, "eval", "train"}
for _front in ("doctor", "cli"):
    KVCORE_SEES[_front] = {*CHAIN, "train", "eval", "demo", "view", "doctor"}
KVCORE_SEES["native"] |= {"_C"}


def bad_includes(path: str, text: str) -> list[str]:
    """Includes of one file of csrc (``path`` relative to csrc) that point up or sideways."""
    here = path.split("/")[0]
    if here not in CSRC_SEES:
        return [f"csrc/{path}: directory '{here}' has no place in the design"]
    allowed = CSRC_SEES[here] | {here}
    includes = re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE)
    targets = {name: name.split("/")[0] for name in includes}
    return [
        f"csrc/{path}: {here} must not include {name}"
        for name, target in targets.items()
        if target not in allowed
    ]


def room_of(parts: list[str]) -> str:
    """The room of a module, or of what is imported, by the components below ``kvcore``."""
    in_evictor = parts[0] == "policies" and len(parts) > 1 and parts[1] in EVICTOR
    return "evictor" if in_evictor else parts[0]


def run_nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes but those that only a type checker sees."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        found.append(node)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            left += node.orelse
        else:
            left += ast.iter_child_nodes(node)
    return found


def imported_modules(path: str, nodes: Iterable[ast.AST]) -> set[str]:
    """Full names that a module imports, wherever in it the import stands."""
    package = ["kvcore", *path.split("/")[:-1]]
    found: set[str] = set()
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        found |= set(names)
    return found


def bad_imports(path: str, text: str) -> list[str]:
    """Imports of one module (``path`` relative to kvcore) that point up or sideways."""
    here = room_of(path.removesuffix(".py").split("/"))
    if path in ("__init__.py", "__main__.py", "policies/__init__.py"):
        return []  # a front door may show anything
    if here not in KVCORE_SEES:
        return [f"kvcore/{path}: '{here}' has no place in the design"]
    tree = ast.parse(text)
    names = imported_modules(path, run_nodes(tree) if here == "policies" else ast.walk(tree))
    rooms = {
        room_of(name.split(".")[1:])
        for name in names
        if name.startswith("kvcore.") and not name.startswith("kvcore.__")
    }
    allowed = KVCORE_SEES[here] | {here}
    bad = [f"kvcore/{path}: {here} must not import kvcore.{r}" for r in sorted(rooms - allowed)]
    if here in NO_TORCH:
        heavy = {name.split(".")[0] for name in names} & {"torch", "numpy", "transformers"}
        bad += [f"kvcore/{path}: {here} must not import {name}" for name in sorted(heavy)]
    return bad


def test_csrc_includes_follow_the_arrows() -> None:
    csrc = ROOT / "csrc"
    files = [f for f in sorted(csrc.rglob("*")) if f.suffix in {".h", ".cc", ".inc", ".cu", ".cuh"}]
    assert files
    bad = [x for f in files for x in bad_includes(str(f.relative_to(csrc)), f.read_text())]
    assert bad == []


def test_kvcore_imports_follow_the_arrows() -> None:
    package = ROOT / "kvcore"
    files = sorted(package.rglob("*.py"))
    assert files
    bad = [x for f in files for x in bad_imports(str(f.relative_to(package)), f.read_text())]
    assert bad == []


def test_core_knows_neither_torch_nor_python() -> None:
    outside = re.compile(
        r"^\s*#\s*include\s*[<\"](torch|ATen|c10|pybind11|Python\.h)", re.MULTILINE
    )
    bad = []
    for f in sorted((ROOT / "csrc").rglob("*")):
        if f.suffix not in {".h", ".cc", ".inc", ".cu", ".cuh"}:
            continue
        headers = outside.findall(f.read_text())
        if f.parent.name == "bindings":
            headers = [h for h in headers if h in {"torch", "ATen", "c10"}]
        bad += [f"{f.relative_to(ROOT)}: {h}" for h in headers]
    assert bad == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("base/check.h", '#include "ops/attend.h"\n'),
        ("ops/attend.h", '#include "base/check.h"\n  #  include "cpu/isa.h"\n'),
        ("cpu/attend.cc", '#include "cuda/attend.h"'),
        ("cpu/kernels/attend.cc", '#include "store/kv_store.h"'),
        ("store/kv_store.cc", '#include "cpu/isa.h"'),
        ("detect/repetition.cc", '#include "ops/attend.h"'),
        ("store/kv_store.cc", '#include "bindings/bindings.h"'),
        ("attic/x.h", ""),
    ],
)
def test_checker_finds_a_bad_include(path: str, text: str) -> None:
    assert len(bad_includes(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("config.py", "from kvcore import ops"),
        ("ops.py", "from kvcore.cache import KVCache"),
        ("ops.py", "from kvcore import _C"),
        ("policies/rkv.py", "def f():\n    from kvcore.engine.engine import Engine\n"),
        ("policies/rkv.py", "def f():\n    from kvcore import ops\n"),
        ("policies/rkv.py", "def f():\n    import torch\n"),
        ("policies/rkv.py", "from kvcore.policies import Evictor"),
        ("policies/registry.py", "from kvcore.policies.selection import lowest"),
        ("policies/settings.py", "from kvcore.config import require"),
        ("policies/evictor.py", "from kvcore.models import load_model"),
        ("checks.py", "from kvcore.config import EngineConfig"),
        ("cache.py", "from kvcore.policies.evictor import Evictor"),
        ("engine/engine.py", "import kvcore.search.driver as d"),
        ("engine/engine.py", "from ..search import driver"),
        ("engine/runner.py", "from .. import search"),
        ("train/grpo.py", "from kvcore.engine import Engine"),
        ("search/driver.py", "from kvcore.cli import main"),
        ("eval/runner.py", "from kvcore.demo import task"),
        ("eval/runs.py", "from kvcore.train import loop"),
        ("train/loop.py", "from kvcore.eval import Run"),
        ("attic.py", ""),
    ],
)
def test_checker_finds_a_bad_import(path: str, text: str) -> None:
    assert len(bad_imports(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("native.py", "from kvcore import _C, __version__"),
        (
            "search/driver.py",
            "from kvcore.engine import Engine\nfrom .trajectory import Trajectory",
        ),
        ("search/scorers/prm.py", "from ..trajectory import Trajectory\nfrom ...engine import x"),
        ("train/grpo.py", "from kvcore.models import load_model"),
        ("train/grpo.py", "from kvcore.policies import Evictor"),
        ("policies/rkv.py", "if TYPE_CHECKING:\n    import torch\n    from kvcore import cache"),
        ("policies/evictor.py", "import torch\nfrom kvcore.config import EvictionConfig"),
        ("config.py", "from kvcore.policies.settings import EvictionConfig"),
        ("cli.py", "from kvcore import demo, doctor, eval"),
        ("__init__.py", "from kvcore.search import solve"),
    ],
)
def test_checker_lets_good_imports_pass(path: str, text: str) -> None:
    assert bad_imports(path, text) == []
