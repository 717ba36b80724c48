#!/usr/bin/env bash
# Runs the tests that need a GPU and keeps their outcomes, for a record of this device in tests/records.
#
#   bash scripts/gpu_record.sh FOLDER [SECONDS] [PYTEST OPTIONS]
#
# Outcomes are appended to files of FOLDER as they come. The run ends by itself after SECONDS (default 480); another one
# with the same FOLDER goes on where it ended, without the tests that passed. When all is done:
#
#   python scripts/merge_records.py FOLDER && python scripts/support_table.py --write
#
# MOEQ_REQUIRE (default: every backend of this library that a Hopper GPU has) names backends that must be here: a test
# that would be skipped because one is not fails. JOBS: processes at a time (default 8). PART: one of "graph", "kernels",
# "layers"; default all, in that order, each with what time is left. INSTALL=1 builds and installs the library first.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mkdir -p "${1:?a folder for outcomes, see the head of this file}" && cd "$1" && pwd)
limit=${2:-480}
shift $(($# < 2 ? $# : 2))
python=${PYTHON:-python3}
export MOEQ_RECORD=$folder
export MOEQ_REQUIRE=${MOEQ_REQUIRE-cuda_sm90,cuda_sm90_int4,cuda_sm90_packed,cuda_sm90_folded,cuda_sm90_bf16,cuda_sm90_fp8,triton,triton_fp8}

if [ "${INSTALL:-0}" = 1 ]; then
  "$python" -m pip install --quiet --no-build-isolation --no-deps . || exit 1
fi

files() {
  case $1 in
    graph) echo tests/backends/gpu/test_in_graph*.py ;;
    kernels) echo tests/backends/sm90 tests/backends/triton tests/numerics/test_cuda_*.py ;;
    layers) # all others that speak of CUDA
      grep -rl --include='test_*.py' 'cuda' tests | grep -v -e test_in_graph -e test_cuda_ -e backends/sm90/ -e backends/triton/ | sort | tr '\n' ' ' ;;
    *) echo "gpu_record.sh: PART must be graph, kernels or layers, got $1" >&2 && exit 1 ;;
  esac
}

status=0
for part in ${PART:-graph kernels layers}; do
  chosen=$(files "$part") || exit 1
  # The matrix in its order, which has what users get first; elsewhere who is done takes from others.
  dist=worksteal
  [ "$part" != graph ] || dist=load
  left=$((limit - SECONDS))
  if [ "$left" -lt 20 ]; then
    echo "gpu_record.sh: no time left for $part" && status=124
    continue
  fi
  # An installed library, not this tree, which has no compiled kernels where it was not built in place: no `-m pytest`.
  # shellcheck disable=SC2086
  timeout --signal=INT --kill-after=20 "$left" "$python" -c 'import sys, pytest; sys.path[:] = [p for p in sys.path if p]; sys.exit(pytest.main(sys.argv[1:]))' \
    -q -m "not slow" -n "${JOBS:-8}" --dist "$dist" --timeout 240 -p no:cacheprovider -rN "$@" $chosen
  ended=$?
  [ "$ended" = 0 ] || [ "$ended" = 5 ] || status=$ended # 5: all of them had passed before
done
exit "$status"
