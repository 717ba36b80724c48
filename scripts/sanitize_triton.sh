#!/usr/bin/env bash
# The Triton kernels under compute-sanitizer: memcheck and initcheck over every format, racecheck over one of every
# weight scheme. Needs a GPU. Prints a line for each tool and group of kernels; anything but "0 errors" is a finding.
# PYTHON, LIMIT, SECONDS_IN_ALL: see sanitizer_report.sh. TOOLS: which tools ("none" only compiles the kernels, which is
# slow under a tool). JOBS: processes at a time. GPUS: GPUs that share them.
set -u
cd "$(dirname "$0")/.."
export GPUS=${GPUS:-1}
. scripts/sanitizer_report.sh

check() { # TOOL GROUP [--few]
  local run=(compute-sanitizer --tool "$1" --error-exitcode 3 --print-limit 8 --show-backtrace no)
  # torch's own kernels are not under test, but initcheck has to see what they write.
  [ "$1" = initcheck ] || run+=(--kernel-name-exclude kernel_substring=at6native)
  [ "$1" = none ] && run=()
  CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$((RANDOM % GPUS))} \
    report "$1" "$2" "${run[@]}" "$PYTHON" scripts/sanitize_triton.py "${@:2}"
}
export -f check

status=0
for tool in ${TOOLS:-none memcheck initcheck racecheck}; do
  few=
  [ "$tool" = racecheck ] && few=--few
  "$PYTHON" scripts/sanitize_triton.py list $few | tr ' ' '\n' |
    xargs -P "${JOBS:-$(nproc)}" -I '{}' bash -c "check $tool {} $few" || status=1
done
exit $status
