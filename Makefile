# make test   lint, C++ tests, Python tests; sets up what is missing on the way
# make demo   KV-Rescue on the embedded models        make bench  benchmarks
#
# Every pip install takes constraints.txt: the versions the tests run with.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -q -c constraints.txt
INSTALLED := $(VENV)/.installed

export MAX_JOBS := $(JOBS)
export PYTHONDONTWRITEBYTECODE := 1
# The isolated build of the package takes the same versions (the second name is that of pip >= 25.3).
export PIP_CONSTRAINT := $(abspath constraints.txt)
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)

CPP_FILES := $(shell find cmake csrc cpp_tests bench -name '*.h' -o -name '*.cc' -o -name '*.inc' \
                    -o -name '*.cu' -o -name '*.cuh')
PACKAGE_FILES := pyproject.toml setup.py MANIFEST.in CMakeLists.txt LICENSE constraints.txt \
                 $(wildcard README.md) \
                 $(shell find cmake csrc kvcore -type f ! -name '*.pyc' ! -name '*.so')

.PHONY: test lint format test-cpp test-asan test-py venv deps compiler wheel bench demo clean

test: lint test-cpp test-asan test-py

# ---- set-up

venv: $(INSTALLED)

# torch first, so that nothing else chooses its version.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch

$(INSTALLED): $(BIN)/python $(PACKAGE_FILES) | deps
	$(INSTALL) '.[gguf,test,dev]'
	@touch $@ $(RUNNABLE)

# The package alone, without the tools of the tests.
RUNNABLE := $(VENV)/.runnable
$(RUNNABLE): $(BIN)/python $(PACKAGE_FILES) | compiler
	$(INSTALL) .
	@touch $@

compiler:
	@if printf '#include <zlib.h>\n' | $(CXX) -std=c++20 -fsyntax-only -x c++ - 2>/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq g++ zlib1g-dev; \
	else \
	  echo "kvcore needs a C++20 compiler and zlib with its header."; \
	  echo "On Debian or Ubuntu: apt-get install g++ zlib1g-dev"; exit 1; \
	fi

DEBIAN := g++ cmake ninja-build libgtest-dev libbenchmark-dev zlib1g-dev
HEADERS := '\#include <gtest/gtest.h>\n\#include <benchmark/benchmark.h>\n\#include <zlib.h>\n'
deps:
	@if printf $(HEADERS) | $(CXX) -std=c++20 -fsyntax-only -x c++ - 2>/dev/null \
	    && command -v cmake >/dev/null && command -v ninja >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(DEBIAN); \
	else \
	  echo "The C++ tests need a C++20 compiler, cmake, ninja, and GoogleTest, Google Benchmark"; \
	  echo "and zlib with their headers. On Debian or Ubuntu: apt-get install $(DEBIAN)"; exit 1; \
	fi

# ---- checks

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

test-cpp: deps
	cmake -S . -B build -G Ninja -DKVCORE_BUILD_TESTS=ON
	cmake --build build -j $(JOBS)
	ctest --test-dir build --output-on-failure -j $(JOBS)

# All tests at every level of this machine, under AddressSanitizer and UndefinedBehaviorSanitizer.
test-asan: deps
	cmake -S . -B build-asan -G Ninja -DKVCORE_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DKVCORE_SANITIZE=address,undefined
	cmake --build build-asan -j $(JOBS)
	ls build-asan/cpp_tests/*_test | xargs -P $(JOBS) -I TEST sh -c 'TEST --gtest_brief=1 || exit 255'

# From python_tests, so that `import kvcore` finds the installed package and not the source tree. Tests
# side by side with one thread each: the models are too small for more.
test-py: $(INSTALLED)
	cd python_tests && OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:cacheprovider \
	  -n $(JOBS) --dist worksteal .

# ---- uses

wheel: $(INSTALLED)
	$(PIP) wheel -q -c constraints.txt --no-deps -w dist .

# MODEL: directory of the model that decodes; random weights in the shape of Qwen2.5-0.5B without.
bench: deps $(INSTALLED)
	cmake -S . -B build-bench -G Ninja -DKVCORE_BUILD_BENCH=ON
	cmake --build build-bench -j $(JOBS)
	for bench in build-bench/bench/*_bench; do $$bench || exit 1; done
	$(BIN)/python bench/decode.py
	@echo "These need models or data and print their usage with --help: bench/gsm8k_rescue.py,"
	@echo "bench/evictors.py, bench/real_keys.py, bench/degenerate_report.py"

# Flags of the demo: make demo ARGS="--budget 64 --problems 200"
demo: $(RUNNABLE)
	$(BIN)/kvcore demo $(ARGS)

clean:
	rm -rf build build-asan build-bench dist kvcore.egg-info
