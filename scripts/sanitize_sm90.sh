#!/usr/bin/env bash
# The Hopper kernels under compute-sanitizer: memcheck, racecheck, synccheck. Needs such a GPU and the CUDA extension.
# Prints a line for each tool and group of kernels, and the reports. Anything but "0 errors" is a finding, but for pairs
# of racecheck that scripts/racecheck_accepted.json explains; they need an extension built with MOEQ_LINEINFO=1.
# PYTHON, LIMIT, SECONDS_IN_ALL: see sanitizer_report.sh. TOOLS: which tools. JOBS: processes at a time. KERNELS: of
# decode, slim, narrow, wide, layers (fp8 activations, bf16, routing). GROUPS_OF: only groups whose names match this.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
. scripts/sanitizer_report.sh

check() { # TOOL GROUP
  local few=() options=()
  [ "$1" = racecheck ] && few=(--few)
  [ "$1" = synccheck ] && options=(--num-cuda-barriers 65536) # rings of them in every thread block
  # Only our kernels: torch's own are not under test, and checking them takes most of the time.
  report "$1" "$2" compute-sanitizer --tool "$1" "${options[@]}" --kernel-name kernel_substring=moeq \
    --error-exitcode 3 --print-limit 10000 --show-backtrace no "$PYTHON" tests/programs/sm90_sanitizer.py "$2" "${few[@]}"
}
export -f check

names=$("$PYTHON" tests/programs/sm90_sanitizer.py list ${KERNELS:+--kernels "$KERNELS"} | tr ' ' '\n' | grep -E "${GROUPS_OF:-.}")
[ -n "$names" ] || { echo "no group of kernels to run"; exit 2; }
for tool in ${TOOLS:-racecheck memcheck synccheck}; do
  for name in $names; do echo "$tool $name"; done
done | xargs -P "${JOBS:-$(nproc)}" -I '{}' bash -c 'check {}'
