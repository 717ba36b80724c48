#!/usr/bin/env bash
# Builds the CPU extension with AddressSanitizer and UndefinedBehaviorSanitizer in a copy of the
# tree, and runs the tests of the C++ kernels with it, JOBS (2) processes at a time.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
python=$(command -v "${PYTHON:-python3}")
case $python in /*) ;; *) python=$root/$python ;; esac
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r setup.py pyproject.toml README.md LICENSE torch_moe_ops csrc scripts tests "$copy"
rm -f "$copy"/torch_moe_ops/*.so
cd "$copy"
MOEQ_SANITIZE=1 MOEQ_CUDA=0 "$python" setup.py -q build_ext --inplace >build.log 2>&1 || { cat build.log; exit 1; }
# The interpreter is not instrumented: the runtimes are preloaded, and its own leaks are not ours.
preload=$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so)
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  PYTHONPATH=$copy "$python" -m pytest -q -n "${JOBS:-2}" -p no:cacheprovider tests/backends/cpu/test_cpu_kernels.py \
  tests/backends/cpu/test_cpu_schemes.py tests/backends/cpu/test_cpu_integers.py tests/backends/cpu/test_cpu_e2m1.py \
  tests/backends/cpu/test_cpu_tiles.py tests/backends/cpu/test_cpu_row_blocks.py \
  tests/host_experts/test_host_experts.py tests/ops/test_op_abuse.py tests/ops/test_plans.py \
  tests/prepared/test_accepted_calls*.py --deselect \
  tests/prepared/test_accepted_calls_kept.py::test_forks_and_the_end_of_a_process  # processes without the runtimes
echo "sanitize: clean"
