"""The build says early what it cannot be built with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CMAKE = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))

pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not installed")


def run_cmake(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CMAKE), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def words(text: str) -> str:
    """CMake breaks lines where it likes."""
    return " ".join(text.split())


def check_compiler(name: str, version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "check.cmake"
    script.write_text(
        f'set(CMAKE_CXX_COMPILER_ID "{name}")\nset(CMAKE_CXX_COMPILER_VERSION "{version}")\n'
        f'set(CMAKE_CXX_COMPILER "/usr/bin/c++")\n'
        f'include("{ROOT}/cmake/CheckCompiler.cmake")\nkvcore_check_compiler()\n'
    )
    return run_cmake("-P", script)


@pytest.mark.parametrize(
    ("name", "version"),
    [("GNU", "12.0.0"), ("GNU", "14.2.0"), ("Clang", "15.0.6"), ("AppleClang", "15.0.0.15000309")],
)
def test_compilers_that_work_are_taken(name: str, version: str, tmp_path: Path) -> None:
    done = check_compiler(name, version, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "version", "shown"),
    [
        ("GNU", "11.4.0", "GCC 11.4.0"),
        ("GNU", "9.4.0", "GCC 9.4.0"),
        ("Clang", "14.0.6", "Clang 14.0.6"),
        ("AppleClang", "14.0.3", "AppleClang 14.0.3"),
        ("MSVC", "19.38", "MSVC 19.38"),
        ("", "", "an unknown compiler"),
    ],
)
def test_p31_other_compilers_are_refused_by_name(
    name: str, version: str, shown: str, tmp_path: Path
) -> None:
    done = check_compiler(name, version, tmp_path)
    assert done.returncode != 0
    message = words(done.stderr)
    assert f"got {shown}" in message
    for part in ("GCC >= 12", "Clang >= 15", "apt-get install g++-12", "CXX=g++-12"):
        assert part in message


def fake_gcc11(folder: Path) -> Path:
    """A compiler that calls itself GCC 11 and notes what it is asked to compile."""
    real = shutil.which(os.environ.get("CXX", "c++"))
    assert real is not None
    compiler = folder / "g++-11"
    flags = "-U__GNUC__ -D__GNUC__=11 -U__clang__ -U__clang_major__"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nexec {real} {flags} "$@"\n')
    compiler.chmod(0o755)
    return compiler


def test_p31_gcc_11_is_refused_before_anything_compiles(tmp_path: Path) -> None:
    compiler = fake_gcc11(tmp_path)
    done = run_cmake("-S", ROOT, "-B", tmp_path / "build", CXX=str(compiler))
    assert done.returncode != 0
    assert "C++ compiler: expected GCC >= 12" in words(done.stderr)
    assert "got GCC 11." in words(done.stderr)
    assert "csrc" not in (tmp_path / "calls").read_text()


def test_readme_names_the_compilers_that_the_build_takes() -> None:
    check = (ROOT / "cmake" / "CheckCompiler.cmake").read_text()
    oldest = dict(re.findall(r"KVCORE_OLDEST_(\w+) (\d+)", check))
    readme = words((ROOT / "README.md").read_text())
    assert f"GCC {oldest['GNU']}" in readme and f"Clang {oldest['Clang']}" in readme


def zlib_root(folder: Path, lines: str) -> Path:
    (folder / "include").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "include" / "zlib.h").write_text(lines)
    (folder / "lib" / "libz.a").write_bytes(b"!<arch>\n")
    return folder


@pytest.mark.parametrize(
    "lines",
    [
        '#define ZLIBNG_VERSION "2.1.6"\n#define ZLIB_VERSION "1.3.1.zlib-ng"\n',
        '#define ZLIB_VERSION "1.2.11.zlib-ng"\n',
        '#  define ZLIBNG_VERSION "2.2.0"\n',
    ],
)
def test_p32_zlib_ng_is_refused_at_configure(lines: str, tmp_path: Path) -> None:
    root = zlib_root(tmp_path / "ng", lines)
    done = run_cmake("-S", ROOT, "-B", tmp_path / "build", f"-DZLIB_ROOT={root}")
    assert done.returncode != 0
    message = words(done.stderr)
    assert "zlib: expected the classic zlib, got zlib-ng" in message
    assert f"{root}/include/zlib.h" in message.replace(" ", "") or str(root) in message
    for part in ("KVCORE_ZLIB_ROOT=DIR", "-DZLIB_ROOT=DIR"):
        assert part in message


def test_classic_zlib_is_taken(tmp_path: Path) -> None:
    root = zlib_root(tmp_path / "classic", '#define ZLIB_VERSION "1.3.1"\n')
    done = run_cmake("-S", ROOT, "-B", tmp_path / "build", f"-DZLIB_ROOT={root}")
    assert done.returncode == 0, done.stderr
    assert f"zlib: {root}/lib/libz.a" in done.stdout
