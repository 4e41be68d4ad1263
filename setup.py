"""Builds the extension kvcore._C with CMake and ninja; everything else is in pyproject.toml.

Environment: CXX = the compiler (GCC >= 12 or Clang >= 15), KVCORE_CUDA = auto | on | off,
KVCORE_ZLIB_ROOT = where to look for zlib first, MAX_JOBS = compilers at once (default: usable
cores).
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent


def find_tool(name: str) -> str:
    """The tool on the PATH (an isolated build puts its own first), else beside the Python."""
    tool = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if tool is None:
        raise RuntimeError(f"{name} was not found; 'pip install {name}' provides it")
    return tool


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def configure_with(command: list[str]) -> None:
    """Runs CMake; if it refuses, what it says is the last thing that the user reads."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        _, refused, message = done.stderr.partition("CMake Error")
        raise CompileError(f"kvcore cannot be built here.\n{refused}{message or done.stderr}")


class TemporaryBuild(build):
    """Builds outside the tree: ./build is for the C++ tests, and leftovers never reach a wheel."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="kvcore-build-")
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        build_dir = Path(self.build_temp).resolve() / "cmake"
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            find_tool("cmake"),
            "--fresh",  # a cache could name the tools of an isolated build that is gone
            f"-S{ROOT}",
            f"-B{build_dir}",
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DKVCORE_BUILD_PYTHON=ON",
            f"-DKVCORE_VERSION={self.distribution.get_version()}",
            f"-DKVCORE_CUDA={os.environ.get('KVCORE_CUDA', 'auto')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            "-DPYBIND11_FINDPYTHON=ON",
        ]
        if "KVCORE_ZLIB_ROOT" in os.environ:
            configure.append(f"-DZLIB_ROOT={os.environ['KVCORE_ZLIB_ROOT']}")
        jobs = os.environ.get("MAX_JOBS") or str(usable_cores())
        configure_with(configure)
        subprocess.run([find_tool("cmake"), "--build", str(build_dir), "-j", jobs], check=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        (built,) = (build_dir / "csrc" / "bindings").glob("_C*.so")
        shutil.copy2(built, target)


setup(
    ext_modules=[Extension("kvcore._C", sources=[])],
    cmdclass={"build": TemporaryBuild, "build_ext": CMakeBuild},
)
