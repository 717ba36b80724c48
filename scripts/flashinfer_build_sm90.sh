#!/usr/bin/env bash
# Builds FlashInfer's CUTLASS MoE module for Hopper ahead of time, on a machine without a GPU.
#
#   PYTHON=.venv/bin/python MAX_JOBS=16 bash scripts/flashinfer_build_sm90.sh [FOLDER]
#
# Needs a CUDA toolkit (12.8 or later) with the headers of cuBLAS, cuRAND and NVRTC, and ninja. flashinfer-python 0.7.2 has
# about 240 CUDA files of 100 to 210 s each: 8 CPU hours, 3 to 8 GiB a job. The module lies in FOLDER/.cache/flashinfer
# afterwards; set FLASHINFER_WORKSPACE_BASE=FOLDER where it is to be used, with the same release of flashinfer-python.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
FOLDER=$(mkdir -p "${1:-build/flashinfer_sm90}" && cd "${1:-build/flashinfer_sm90}" && pwd)
command -v nvcc >/dev/null || { echo "nvcc must be on the PATH" >&2; exit 1; }

export FLASHINFER_WORKSPACE_BASE=$FOLDER FLASHINFER_CUDA_ARCH_LIST=9.0a MAX_JOBS=${MAX_JOBS:-4}
"$PYTHON" - <<'CODE'
import time

from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

spec = gen_cutlass_fused_moe_sm90_module()
print(f"{len(spec.sources)} sources", flush=True)
began = time.time()
spec.build(verbose=True)
print(f"built in {time.time() - began:.0f} s: {spec.get_library_path()}")
CODE
