#!/usr/bin/env bash
# The Hopper kernels under compute-sanitizer: memcheck, racecheck, synccheck. Needs such a GPU and the CUDA extension.
# Prints a line for each tool and group of kernels, and the reports; anything but "0 errors" is a finding.
# PYTHON: the interpreter. LIMIT: seconds for each process. SECONDS_IN_ALL: ends everything. TOOLS: which tools. JOBS:
# processes at a time. KERNELS: of decode, slim, narrow, wide, layers (fp8 activations, bf16, routing).
# GROUPS_OF: only those groups whose names match this.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-300} LOGS STOP
LOGS=$(mktemp -d)
STOP=$(($(date +%s) + ${SECONDS_IN_ALL:-36000}))
trap 'rm -rf "$LOGS"' EXIT
# Each tensor is an allocation of its own, so that an access past its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1

# check TOOL GROUP: one line, and the beginning of the log of what failed.
check() {
  local log=$LOGS/$1.$2 start=$SECONDS code=0 limit=$((STOP - $(date +%s))) few=() options=()
  [ "$limit" -lt "$LIMIT" ] || limit=$LIMIT
  [ "$limit" -gt 0 ] || { echo "$1 | $2 | not run, no time is left |"; return 1; }
  [ "$1" = racecheck ] && few=(--few)
  [ "$1" = synccheck ] && options=(--num-cuda-barriers 65536) # rings of them in every thread block
  # Only our kernels: torch's own are not under test, and checking them takes most of the time.
  timeout "$limit" compute-sanitizer --tool "$1" "${options[@]}" --kernel-name kernel_substring=moeq \
    --error-exitcode 3 --print-limit 20 --show-backtrace no \
    "$PYTHON" tests/sm90_sanitizer.py "$2" "${few[@]}" >"$log" 2>&1 || code=$?
  echo "$1 | $2 | $(grep -o '[0-9]* results right' "$log" || echo 'wrong or stopped') |" \
    "$(grep -o 'SUMMARY: [0-9].*' "$log" | tail -n 1) | $((SECONDS - start)) s"
  if [ $code -ne 0 ]; then
    echo "   $1, $2: exit status $code (124: stopped after $limit s)"$'\n'"$(head -n 80 "$log")"
  fi
  return $code
}
export -f check

names=$("$PYTHON" tests/sm90_sanitizer.py list ${KERNELS:+--kernels "$KERNELS"} | tr ' ' '\n' | grep -E "${GROUPS_OF:-.}")
[ -n "$names" ] || { echo "no group of kernels to run"; exit 2; }
for tool in ${TOOLS:-racecheck memcheck synccheck}; do
  for name in $names; do echo "$tool $name"; done
done | xargs -P "${JOBS:-$(nproc)}" -I '{}' bash -c 'check {}'
