#!/usr/bin/env bash
# A source distribution and, from it, a manylinux wheel (abi3: one for all Pythons) in dist/; what they hold is checked.
#
# usage: scripts/build_wheels.sh
#   PYTHON     interpreter with torch, setuptools >= 77, wheel, build, auditwheel  (default: python3)
#   MOEQ_CUDA  1: with the CUDA kernels (needs nvcc), 0: without                   (default: 0)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export MOEQ_CUDA=${MOEQ_CUDA:-0}

rm -rf dist build
"$python" -m build --no-isolation --sdist --outdir dist .
sdist=$(ls dist/*.tar.gz)
for needed in csrc/cpu/isa_avx512bf16.cpp csrc/cpu/isa.h csrc/cuda/sm90/decode/decode.cu torch_moe_ops/py.typed; do
  # Not grep -q: it would end tar's output early, which pipefail takes for a failure.
  tar -tzf "$sdist" | grep "/$needed\$" >/dev/null || { echo "build_wheels: $sdist lacks $needed" >&2; exit 1; }
done

# From the source distribution, so that what it lacks is noticed.
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
tar -xzf "$sdist" -C "$unpacked" --strip-components=1
(cd "$unpacked" && "$python" -m build --no-isolation --wheel --outdir wheels .)
# torch and CUDA come with torch; they are found there when `import torch` has loaded them.
"$python" -m auditwheel repair --wheel-dir dist --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcudart*' \
  "$unpacked"/wheels/*.whl
for wheel in dist/*.whl; do
  "$python" -m zipfile -l "$wheel" | grep -E '_C\.abi3\.so|py\.typed' >/dev/null ||
    { echo "build_wheels: $wheel lacks the extension" >&2; exit 1; }
done
ls -l dist
