#!/usr/bin/env bash
# Builds FlashInfer's CUTLASS MoE module for Hopper ahead of time, on a machine without a GPU.
#
#   PYTHON=.venv/bin/python MAX_JOBS=16 bash scripts/flashinfer_build_sm90.sh [--full | --mxfp4] [FOLDER]
#
# Without an option it is the part that bf16, f16, FP8 and FP8-block layers call (scripts/flashinfer_sm90_subset.py): 22
# sources instead of 250, 24 minutes of one core with flashinfer-python 0.7.2.post1 and CUDA 13.0, installed into the
# package. --mxfp4: the part that layers with MXFP4 weights call, in its place (scripts/flashinfer_sm90_mxfp4.py).
# --full: the whole module takes 8 hours of cores at 3 to 8 GiB a job; it lies in FOLDER/.cache/flashinfer afterwards:
# set FLASHINFER_WORKSPACE_BASE=FOLDER where it is to be used, with the same release.
#
# Needs a CUDA toolkit (12.8 or later) with the headers of cuBLAS, cuRAND and NVRTC, the stub of libcuda, and ninja.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
FULL= PART=()
if [ "${1:-}" = --full ]; then FULL=1; shift; elif [ "${1:-}" = --mxfp4 ]; then PART=(--mxfp4); shift; fi
FOLDER=$(mkdir -p "${1:-build/flashinfer_sm90}" && cd "${1:-build/flashinfer_sm90}" && pwd)
command -v nvcc >/dev/null || { echo "nvcc must be on the PATH" >&2; exit 1; }
export MAX_JOBS=${MAX_JOBS:-4}

if [ -z "$FULL" ]; then
  exec "$PYTHON" scripts/flashinfer_sm90_subset.py "$FOLDER" --install "${PART[@]}"
fi
export FLASHINFER_WORKSPACE_BASE=$FOLDER FLASHINFER_CUDA_ARCH_LIST=9.0a
"$PYTHON" - <<'CODE'
import time

from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

spec = gen_cutlass_fused_moe_sm90_module()
print(f"{len(spec.sources)} sources", flush=True)
began = time.time()
spec.build(verbose=True)
print(f"built in {time.time() - began:.0f} s: {spec.get_library_path()}")
CODE
