# `make quickstart` and `make test` do all the set-up, in .venv.
# make TORCH='torch==2.13.0' chooses the torch that is installed, JOBS how many test processes run at a time.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
JOBS   ?= 2
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/cpu/*.cpp csrc/cpu/*.h csrc/cuda/* csrc/cuda/sm90/*)

.PHONY: fuzz fuzz-problems install quickstart test test-all test-triton test-flashinfer lint format cuda-compile sanitize table bench clean

$(STAMP): pyproject.toml setup.py $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet 'setuptools>=77' wheel ninja numpy
	$(PY) -m pip install --quiet '$(TORCH)'
	$(PY) -m pip install --quiet --no-build-isolation -e '.[test,lint]'
	touch $(STAMP)

install: $(STAMP)

quickstart: install
	$(PY) examples/quickstart.py

test: install
	$(PY) -m pytest -q -n $(JOBS) -m "not slow"

# What is slow besides: long property tests, fuzzing, the examples, CUDA compilation, sanitizers, Triton's interpreter
# and its ahead-of-time targets, several releases of FlashInfer.
test-all: install
	$(PY) -m pytest -q -n $(JOBS) -m slow --ignore-glob='*/test_triton_*.py'
	$(MAKE) cuda-compile
	$(MAKE) sanitize
	$(MAKE) test-triton
	$(MAKE) test-flashinfer

test-triton: install
	$(PY) -m pip install --quiet 'triton>=3.6'
	TRITON_INTERPRET=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal tests/test_triton_*.py

test-flashinfer: install
	PYTHON=$(PY) bash scripts/flashinfer_releases.sh

# Random problems on the kernels of this CPU against the oracle; scripts/gpu_fuzz.sh does it on a GPU.
FUZZ_PROBLEMS ?= 2000

fuzz: fuzz-problems

fuzz-problems: install
	PYTHONPATH=. $(PY) tests/fuzz_problems.py --backend cpu --count $(FUZZ_PROBLEMS)
	PYTHONPATH=. MOEQ_CPU_ISA=portable $(PY) tests/fuzz_problems.py --backend cpu --count $(FUZZ_PROBLEMS)

lint: install
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Proves on a machine without a GPU that the CUDA sources compile.
cuda-compile: install
	$(PY) -m pip install --quiet 'triton>=3.6'
	JOBS=$(JOBS) PYTHON=$(PY) bash scripts/cuda_compile.sh

# The C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: install
	PYTHON=$(PY) bash scripts/sanitize.sh

table: install
	$(PY) scripts/support_table.py --write

bench: install
	$(PY) benchmarks/bench_dispatch.py
	$(PY) benchmarks/bench_cpu.py

clean:
	rm -rf $(VENV) build *.egg-info torch_moe_ops/*.so
