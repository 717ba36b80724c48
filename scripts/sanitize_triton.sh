#!/usr/bin/env bash
# The Triton kernels under compute-sanitizer: memcheck and initcheck over every format, racecheck over one of every
# weight scheme. Needs a GPU. Prints a line for each tool and group of kernels; anything but "0 errors" is a finding.
# PYTHON: the interpreter. LIMIT: seconds for each tool. TOOLS, PARTS: which tools, which groups.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} limit=${LIMIT:-300}
parts=${PARTS:-$("$python" scripts/sanitize_triton.py list)}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# Each tensor is an allocation of its own, so that a read past its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

# run TOOL GROUP: one line, and the beginning of the log of what failed.
run() {
  local log=$logs/$1.$2 start=$SECONDS few='' code=0
  [ "$1" = racecheck ] && few=--few
  timeout "$limit" compute-sanitizer --tool "$1" --error-exitcode 3 --print-limit 8 --show-backtrace no \
    "$python" scripts/sanitize_triton.py "$2" $few >"$log" 2>&1 || code=$?
  echo "$1 | $2 | $(grep -o '[0-9]* results right' "$log" || echo 'wrong or stopped') |" \
    "$(grep -o 'SUMMARY: [0-9].*' "$log" | tail -n 1) | $((SECONDS - start)) s"
  if [ $code -ne 0 ]; then
    echo "   exit status $code (124: stopped after $limit s)"
    head -n "${SHOWN:-60}" "$log"
  fi
  return $code
}

# tools GROUP: one after the other, as what the first one compiles the others find in the cache.
tools() {
  local status=0
  for tool in ${TOOLS:-memcheck initcheck racecheck}; do
    run "$tool" "$1" || status=1
  done
  return $status
}

jobs=() status=0
for part in $parts; do
  tools "$part" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do
  wait "$job" || status=1
done
exit $status
