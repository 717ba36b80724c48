#!/usr/bin/env bash
# Proves that every CUDA source compiles, on a machine without a GPU and with a CPU-only torch: objects, no linking.
# Kernels of csrc/cuda/sm90 have to wait for those in front before they touch memory, and for what they load from shared
# memory before they give it back (tests/programs/sass_order.py).
#
# usage: scripts/cuda_compile.sh [source ...]          (default: all of csrc/cuda; the host's .cpp by nvcc's host compiler)
#   PYTHON       interpreter that has torch, and Triton for its nvdisasm  (default: python3)
#   NVCC         compiler                               (default: nvcc in PATH, else in CUDA_HOME/bin)
#   MOEQ_ARCHS   targets, e.g. "80 90a"                 (default: those of scripts/cuda_targets.py that nvcc knows)
#   MOEQ_OBJECTS folder for the objects                 (default: a temporary one)
#   JOBS         compilers at a time                    (default: 2)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
candidates=(nvcc "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
if [ -n "${NVCC:-}" ]; then
  candidates=("$NVCC")   # what was asked for, or nothing
fi
nvcc=$(command -v "${candidates[@]}" | head -n 1 || true)
if [ -z "$nvcc" ]; then
  echo "cuda-compile: no CUDA compiler, tried: ${candidates[*]}; install CUDA 12.8 or later, or set NVCC" >&2
  exit 2
fi

objects=${MOEQ_OBJECTS:-}
if [ -z "$objects" ]; then
  objects=$(mktemp -d)
  trap 'rm -rf "$objects"' EXIT
fi
mkdir -p "$objects"

# Assigned before they are split, so that a failing interpreter ends the script here.
read -r -a arches <<<"${MOEQ_ARCHS:-}"
generic=$("$python" scripts/cuda_targets.py "$nvcc" generic "${arches[@]}")
hopper=$("$python" scripts/cuda_targets.py "$nvcc" sm90 "${arches[@]}" 2>/dev/null)   # said already; may be empty
mapfile -t generic <<<"$generic"
mapfile -t hopper <<<"$hopper"

# Assigned before it is split, so that a failing interpreter (no torch) ends the script here.
paths=$("$python" -c '
import sysconfig
from torch.utils.cpp_extension import include_paths
for path in [*include_paths(), sysconfig.get_path("include")]:
    print("-I" + path)')
mapfile -t includes <<<"$paths"

# The flags of setup.py and those that torch's BuildExtension adds, a report of registers and spills from ptxas, and lines
# of the sources, by which early arrivals are told apart: machine code is the same with them.
flags=(-O3 -std=c++17 --fmad=false -DTORCH_TARGET_VERSION=0x020b000000000000 -DPy_LIMITED_API=0x030a0000 -DUSE_CUDA
  -D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_BFLOAT16_CONVERSIONS__
  -D__CUDA_NO_HALF2_OPERATORS__ --expt-relaxed-constexpr
  -lineinfo -Xcompiler -fPIC -Xptxas -v "${includes[@]}")

sources=("$@")
if [ ${#sources[@]} -eq 0 ]; then
  # Backwards: the longest, of w4a8, begins first.
  mapfile -t sources < <(find csrc/cuda -name '*.cu' -o -name '*.cpp' | sort -r)
fi

failures=$objects/failures
: >"$failures"

disassembles=yes
if ! "$python" -c 'import triton' 2>/dev/null; then
  disassembles=
  echo "cuda-compile: $python has no Triton, whose nvdisasm reads machine code: what kernels do before they wait is not checked"
fi

# compile SOURCE: prints its report when it is done; adds to $failures if it does not compile.
compile() {
  local source=$1 name start=$SECONDS of_source=("${generic[@]}")
  name=$(basename "$source")
  local object=$objects/${name%.*}.o
  if [[ $source == *.cpp ]]; then
    of_source=()
  elif [[ $source == */sm90/* ]]; then
    if [ -z "${hopper[0]}" ]; then
      echo "skip $source (90a is not among the architectures)"
      return 0
    fi
    of_source=("${hopper[@]}")
  fi
  local log=$objects/$name.log
  if "$nvcc" "${flags[@]}" "${of_source[@]}" -c "$source" -o "$object" >"$log" 2>&1; then
    local report
    report=$("$python" scripts/ptxas_report.py "$log") || echo "no report of $source" | tee -a "$failures"
    echo "ok   $source ($((SECONDS - start)) s)${report:+$'\n'$report}"
    # Nothing then multiplies while something else is done, and nothing but this line says so.
    if grep -o 'wgmma.mma_async instructions are serialized.*' "$log"; then
      echo "FAIL $source: ptxas serializes its products" | tee -a "$failures"
    fi
    if [ -n "$disassembles" ] && [[ $source == */sm90/*.cu ]]; then
      "$python" tests/programs/sass_order.py "$object" || echo "FAIL $source: does not wait as docs/design.md, section 11, and docs/hopper.md want it" | tee -a "$failures"
    fi
  else
    echo "FAIL $source" | tee -a "$failures"
    cat "$log"
  fi
}

for source in "${sources[@]}"; do
  while [ "$(jobs -pr | wc -l)" -ge "${JOBS:-2}" ]; do
    wait -n || true
  done
  compile "$source" &
done
wait
[ ! -s "$failures" ]
