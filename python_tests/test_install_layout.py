"""What ``pip install .`` leaves behind."""

import ast
import gzip
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvcore
from kvcore import doctor, native
from kvcore.native import _C

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(kvcore.__file__).resolve().parent
EXTENSION = Path(_C.__file__)


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )


def test_tests_see_the_installed_package() -> None:
    in_place = list((ROOT / "kvcore").glob("_C*.so"))
    assert (PACKAGE.parent != ROOT) or in_place


def test_one_extension_typed_and_small() -> None:
    assert list(PACKAGE.glob("_C*.so")) == [EXTENSION]
    assert EXTENSION.stat().st_size < 5_000_000
    assert (PACKAGE / "py.typed").is_file() and (PACKAGE / "_C.pyi").is_file()


def test_versions_agree() -> None:
    assert _C.version() == kvcore.__version__ == importlib.metadata.version("kvcore")


def test_metadata_names_licence_command_and_wide_ranges() -> None:
    meta = importlib.metadata.metadata("kvcore")
    assert meta["License-Expression"] == "Apache-2.0"
    commands = importlib.metadata.entry_points(group="console_scripts", name="kvcore")
    assert {command.value for command in commands} == {"kvcore.cli:main"}
    required = [r for r in meta.get_all("Requires-Dist") or [] if "extra ==" not in r]
    assert not [r for r in required if "==" in r]  # pins belong into constraints.txt
    names = {re.split(r"[^\w-]", r)[0] for r in required}
    assert {"torch", "transformers", "safetensors", "numpy", "rich", "typer"} <= names


@pytest.mark.skipif(shutil.which("ldd") is None, reason="needs ldd")
def test_extension_links_no_framework() -> None:
    linked = subprocess.run(["ldd", EXTENSION], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"torch|c10|python|cuda|gomp|omp\.so", linked), linked


def test_a_stale_extension_is_reported_with_the_cure() -> None:
    done = run_python("import kvcore; kvcore.__version__ = '99.0'; import kvcore.native")
    assert done.returncode != 0
    assert "kvcore is version 99.0" in done.stderr and "reinstall" in done.stderr


def test_a_source_tree_without_extension_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(
        PACKAGE,
        tmp_path / "kvcore",
        ignore=shutil.ignore_patterns("*.so", "*.bin", "*.safetensors"),
    )
    done = run_python("import kvcore.native", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "pip install ." in done.stderr and str(tmp_path) in done.stderr


def test_native_exports_what_it_names() -> None:
    assert all(hasattr(native, name) for name in native.__all__)


# ---- the stub tells the truth


def stub_parameters() -> dict[str, list[str]]:
    """Qualified name -> parameter names without self, for everything in _C.pyi."""
    found: dict[str, list[str]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = []
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                if node.name.startswith("__") and node.name != "__init__":
                    continue
                every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                arguments = [a.arg for a in every]
                is_property = any(isinstance(d, ast.Name) for d in node.decorator_list)
                found[prefix + node.name] = [] if is_property else arguments
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[prefix + node.target.id] = []

    visit(ast.parse((PACKAGE / "_C.pyi").read_text()).body, "")
    return {k: [a for a in v if a != "self"] for k, v in found.items()}


def extension_parameters() -> dict[str, list[str]]:
    """The same from the extension: pybind11 writes the signature into the docstring."""
    found: dict[str, list[str]] = {}

    def add(name: str, member: object) -> None:
        doc = getattr(member, "__doc__", None) or ""
        signature = re.match(r"\w+\((.*)\) ->", doc.split("\n")[0])
        text = signature.group(1) if signature else ""
        names = re.findall(r"(?:^|, )(\w+)(?=: )", text)
        found[name] = [n for n in names if n != "self"]

    for name, member in vars(_C).items():
        if name.startswith("_"):
            continue
        add(name, None if isinstance(member, type) else member)
        if isinstance(member, type) and not issubclass(member, Exception):
            for method, value in vars(member).items():
                if not method.startswith("_") or method == "__init__":
                    add(f"{name}.{method}", value)
    return found


def test_stub_and_extension_name_the_same_things() -> None:
    assert set(stub_parameters()) == set(extension_parameters())


def test_stub_and_extension_name_the_same_parameters() -> None:
    stub, real = stub_parameters(), extension_parameters()
    differing = {k: (stub[k], real[k]) for k in stub.keys() & real.keys() if stub[k] != real[k]}
    assert differing == {}


# ---- doctor


def test_doctor_reports_what_is_there() -> None:
    data = doctor.report()
    assert data["versions"]["torch"] == importlib.metadata.version("torch")
    extension = data["extension"]
    assert extension["error"] is None and data["models"]["error"] is None
    assert extension["isa"] in extension["isa_supported"]
    assert extension["threads"] == _C.num_threads()
    assert extension["cuda_kernels"] is _C.cuda_built() is False
    assert data["cuda"]["torch_sees_device"] == torch.cuda.is_available()
    assert 0 < data["memory"]["available"] <= data["memory"]["total"]
    assert data["models"]["supported"] == ["qwen2", "qwen3", "llama"]
    assert set(data["models"]["packed_linears"]) == {"float32", "bfloat16"}
    both = ["attention", "mlp"]
    assert data["models"]["fused"]["float32"] == dict.fromkeys(data["models"]["supported"], both)


def test_doctor_renders_one_fact_a_line() -> None:
    text = doctor.render()
    assert "ships no CUDA kernels" in text and kvcore.__version__ in text
    words = ("sliding-window", "qwen2", "instruction set", "threads", "GiB", "packed linears")
    for word in words:
        assert word in text


# What a broken part is made of: a statement that runs before the command line does.
BREAKS = {
    "extension of another version": "import kvcore; kvcore.__version__ = '99.0'",
    "no torch": "import sys; sys.modules['torch'] = None",
    "no transformers": "import sys; sys.modules['transformers'] = None",
    "another zlib": "import kvcore._C as c; c.gzip_size = lambda data: 12086",
    "a library that is not installed": (
        "import importlib.metadata as m; v = m.version\n"
        "def version(name):\n"
        "    if name == 'numpy': raise m.PackageNotFoundError(name)\n"
        "    return v(name)\n"
        "m.version = version"
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_doctor_fails_and_prints_all_the_same_when_a_part_is_unusable(what: str) -> None:
    done = run_python(
        f"{BREAKS[what]}\nimport sys; sys.argv = ['kvcore', 'doctor']\n"
        "from kvcore.cli import main; main()"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "UNUSABLE" in done.stdout
    for word in ("kvcore", "python", "CUDA", "memory", "GiB"):
        assert word in done.stdout, done.stdout
    assert "Traceback" not in done.stderr


def test_doctor_reports_a_bad_environment_variable() -> None:
    done = run_python(
        "import sys; sys.argv = ['kvcore', 'doctor']\nfrom kvcore.cli import main; main()",
        KVCORE_ISA="v5",
    )
    assert done.returncode == 1
    assert "UNUSABLE: KVCORE_ISA: expected" in done.stdout and "GiB" in done.stdout


# ---- zlib


def test_p32_a_compressor_of_other_sizes_is_refused_at_import() -> None:
    native.check_gzip_size(_C.gzip_size(native.golden_text()))
    with pytest.raises(ImportError, match=r"zlib: expected the classic.*KVCORE_ZLIB_ROOT=DIR"):
        native.check_gzip_size(native.GOLDEN_GZIP_BYTES + 143)  # zlib-ng 2.3.3
    done = run_python(
        "import kvcore._C as c; c.gzip_size = lambda data: 12086\nimport kvcore.engine"
    )
    assert "ImportError: zlib: expected the classic zlib" in done.stderr


def test_golden_text_tells_levels_of_effort_apart() -> None:
    sizes = {level: len(gzip.compress(native.golden_text(), level)) for level in (1, 3, 9)}
    assert len(set(sizes.values())) == 3
