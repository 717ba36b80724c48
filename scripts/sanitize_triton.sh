#!/usr/bin/env bash
# The Triton kernels under compute-sanitizer: memcheck and initcheck over every format, racecheck over one of every
# weight scheme. Needs a GPU. Prints a line for each tool and group of kernels; anything but "0 errors" is a finding.
# PYTHON: the interpreter. LIMIT: seconds for each process. SECONDS_IN_ALL: ends everything. TOOLS: which tools ("none"
# only compiles the kernels, which is slow under a tool). JOBS: processes at a time. GPUS: GPUs that share them.
set -u
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-300} GPUS=${GPUS:-1} LOGS STOP
LOGS=$(mktemp -d)
STOP=$(($(date +%s) + ${SECONDS_IN_ALL:-36000}))
trap 'rm -rf "$LOGS"' EXIT
# Each tensor is an allocation of its own, so that a read past its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1

# check TOOL GROUP [--few]: one line, and the beginning of the log of what failed.
check() {
  local log=$LOGS/$1.$2 start=$SECONDS code=0 limit=$((STOP - $(date +%s))) run=(compute-sanitizer --tool "$1")
  [ "$limit" -lt "$LIMIT" ] || limit=$LIMIT
  [ "$limit" -gt 0 ] || { echo "$1 | $2 | not run, no time is left |"; return 1; }
  run+=(--error-exitcode 3 --print-limit 8 --show-backtrace no)
  # torch's own kernels are not under test, but initcheck has to see what they write.
  [ "$1" = initcheck ] || run+=(--kernel-name-exclude kernel_substring=at6native)
  [ "$1" = none ] && run=()
  CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$((RANDOM % GPUS))} timeout "$limit" \
    "${run[@]}" "$PYTHON" scripts/sanitize_triton.py "${@:2}" >"$log" 2>&1 || code=$?
  echo "$1 | $2 | $(grep -o '[0-9]* results right' "$log" || echo 'wrong or stopped') |" \
    "$(grep -o 'SUMMARY: [0-9].*' "$log" | tail -n 1) | $((SECONDS - start)) s"
  if [ $code -ne 0 ]; then
    echo "   $1, $2: exit status $code (124: stopped after $limit s)"$'\n'"$(head -n 60 "$log")"
  fi
  return $code
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
