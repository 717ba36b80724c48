#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds the extensions in place, tests the CUDA quantizer, times it, and runs its
# kernels under compute-sanitizer. Writes logs and figures to the folder $1 (default: gpu_check). Nonzero on a failure.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_check}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD
failed=0

step() {
  local name=$1 start=$SECONDS
  shift
  "$@" >"$out/$name.log" 2>&1
  local status=$?
  echo "== $name: exit $status, $((SECONDS - start)) s"
  tail -n "${LINES_SHOWN:-4}" "$out/$name.log"
  [ $status -eq 0 ] || failed=1
}

sanitizer() {
  # Only kernels of our namespace are instrumented: torch's own would take minutes.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 120 compute-sanitizer --tool "$1" --kernel-name kns=moeq \
    --error-exitcode 9 "$python" scripts/quantize_driver.py
}

MOEQ_CUDA=1 LINES_SHOWN=2 step build timeout 240 "$python" setup.py build_ext --inplace
LINES_SHOWN=12 step tests timeout 200 "$python" -m pytest -q -rs tests/numerics/test_cuda_quantize.py \
  tests/numerics/test_cuda_number_code.py
LINES_SHOWN=70 step bench timeout 120 "$python" benchmarks/bench_quantize_cuda.py --json "$out/quantize_nvfp4.jsonl"
for tool in memcheck racecheck initcheck; do
  step "$tool" sanitizer "$tool"
done
exit $failed
