#!/usr/bin/env bash
# Collects bitsandbytes with its kernels for CUDA 13.0, unpacked in a folder, for a machine without a network:
#
#   bash scripts/carry_bitsandbytes.sh             # here; makes .bnb (about 5 MB), which git ignores
#   PYTHONPATH=.bnb python benchmarks/bench_backward.py --ways nf4 ...            # there
#
# The machine needs torch for CUDA 13, numpy and packaging. CUDA=128 keeps the library for CUDA 12.8 instead (27 MB, which
# thin_fatbins.py makes smaller).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
to=${TO:-.bnb}
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
${PYTHON:-python3} -m pip download --quiet --no-deps --dest "$wheels" --only-binary=:all: \
  --platform manylinux_2_24_x86_64 "bitsandbytes==${BITSANDBYTES:-0.50.2}"
rm -rf "$to"
mkdir -p "$to"
${PYTHON:-python3} -m zipfile -e "$wheels"/*.whl "$to"
find "$to" -name '*.so' ! -name "libbitsandbytes_cuda${CUDA:-130}.so" ! -name 'libbitsandbytes_cpu.so' -delete
du -sh "$to"
