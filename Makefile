# `make quickstart` and `make test` do all the set-up, in .venv.
# make TORCH='torch==2.13.0' chooses the torch that is installed, TRITON what is installed where torch brings none,
# CONSTRAINTS the releases of what the tests need, JOBS how many test processes run at a time.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.9.0
CONSTRAINTS ?= tests/constraints.txt
JOBS   ?= 2
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
WITH_TRITON := $(PY) -c 'import triton' 2>/dev/null || $(PY) -m pip install --quiet '$(TRITON)'

SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/cpu/*.cpp csrc/cpu/*.h csrc/generated/* csrc/cuda/* csrc/cuda/expert_parallel/* csrc/cuda/sm90/*/*)

CXX_SOURCES := find csrc tests/cpp -name '*.c[pu]*' -o -name '*.h'

.PHONY: help fuzz fuzz-loader fuzz-problems install quickstart test test-all test-triton test-flashinfer test-vllm lint format docs cuda-compile sanitize table bench clean

help:
	@echo 'make TARGET [PYTHON=python3] [TORCH=torch==2.13.0] [JOBS=2]'
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 20

$(STAMP): pyproject.toml setup.py $(CONSTRAINTS) $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet 'setuptools>=77' wheel ninja numpy
	$(PY) -m pip install --quiet '$(TORCH)'
	$(PY) -m pip install --quiet --no-build-isolation --constraint $(CONSTRAINTS) -e '.[test,lint]'
	touch $(STAMP)

install: $(STAMP) ## the virtual environment, the package in it with what tests and linters need

quickstart: install ## a checkpoint, end to end, through a compiled layer
	$(PY) examples/quickstart.py

test: install ## the tests, but for what is slow
	$(PY) -m pytest -q -n $(JOBS) -m "not slow"

# What is slow besides: long property tests, fuzzing, the examples, CUDA compilation, sanitizers, Triton's interpreter
# and its ahead-of-time targets, several releases of FlashInfer.
test-all: install ## everything that is slow
	$(PY) -m pytest -q -n $(JOBS) -m slow --ignore=tests/backends/triton
	$(MAKE) cuda-compile
	$(MAKE) sanitize
	$(MAKE) test-triton
	$(MAKE) test-flashinfer
	$(MAKE) docs

test-triton: install ## the Triton kernels in the interpreter and ahead of time
	$(WITH_TRITON)
	TRITON_INTERPRET=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal tests/backends/triton

test-flashinfer: install ## releases of FlashInfer against their simulators; FLASHINFER='0.7.4 0.8.0' says which
	PYTHON=$(PY) bash scripts/flashinfer_releases.sh $(FLASHINFER)

# Not in test-all: vLLM is 4 GB of packages.
test-vllm: install ## the plug-in inside vLLM on this CPU, in a virtual environment of its own
	PYTHON=$(PYTHON) bash scripts/test_vllm.sh

# Random problems on the kernels of this CPU against the oracle; scripts/gpu_fuzz.sh does it on a GPU.
FUZZ_PROBLEMS ?= 2000

FUZZ_FILES    ?= 1000000

fuzz: fuzz-problems fuzz-loader ## random problems, headers and configs

fuzz-problems: install
	PYTHONPATH=. $(PY) tests/programs/fuzz_problems.py --backend cpu --special --count $(FUZZ_PROBLEMS)
	PYTHONPATH=. MOEQ_CPU_ISA=portable $(PY) tests/programs/fuzz_problems.py --backend cpu --special --count $(FUZZ_PROBLEMS)
	PYTHONPATH=. $(PY) tests/programs/fuzz_cpu.py --count $(FUZZ_PROBLEMS)
	PYTHONPATH=. $(PY) tests/programs/fuzz_gradients.py --on cpu --count $(FUZZ_PROBLEMS)

# Mutated headers, configs and saved weights: 10 to 40 minutes for a million on one core.
fuzz-loader: install
	PYTHONPATH=. nice -n 19 $(PY) tests/programs/fuzz_loader.py --count $(FUZZ_FILES)

lint: install ## formatter, linter and types, without changing anything
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(CXX_SOURCES) | xargs $(VENV)/bin/clang-format --dry-run --Werror
	$(VENV)/bin/codespell
	$(VENV)/bin/mypy

format: install ## what the formatter and the linter can mend
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(CXX_SOURCES) | xargs $(VENV)/bin/clang-format -i

docs: install ## the site, into site/; a warning is an error
	$(PY) -m pip install --quiet --requirement docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

# Proves on a machine without a GPU that the CUDA sources compile.
cuda-compile: install ## that the CUDA sources compile, without a GPU
	$(WITH_TRITON)
	JOBS=$(JOBS) PYTHON=$(PY) bash scripts/cuda_compile.sh

# The C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: install ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	PYTHON=$(PY) JOBS=$(JOBS) bash scripts/sanitize.sh

table: install ## renew the support table of the README
	$(PY) scripts/support_table.py --write

bench: install ## time dispatch and the CPU kernels
	$(PY) benchmarks/bench_dispatch.py
	$(PY) benchmarks/bench_cpu.py

clean: ## remove all that was built
	rm -rf $(VENV) build *.egg-info torch_moe_ops/*.so
