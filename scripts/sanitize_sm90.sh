#!/usr/bin/env bash
# The Hopper kernels under compute-sanitizer: memcheck, racecheck, synccheck. Needs such a GPU and the CUDA extension.
# Ends with a line per tool; anything but exit status 0 is a finding.
# PYTHON: the interpreter. LIMIT: seconds for each tool. TOOLS: which ones. KERNELS: of decode, prefill, layers (the
# kernels for fp8 activations, and routing).
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} limit=${LIMIT:-300} kernels=${KERNELS:-decode,prefill,layers} status=0
# Each tensor is an allocation of its own, so that an access past its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

for tool in ${TOOLS:-memcheck synccheck racecheck}; do
  few=
  [ "$tool" = racecheck ] && few=--few
  log=$(mktemp)
  barriers=
  [ "$tool" = synccheck ] && barriers="--num-cuda-barriers 65536"  # rings of them in every thread block
  # Only our kernels: torch's own are not under test, and checking them takes most of the time.
  timeout "$limit" compute-sanitizer --tool "$tool" $barriers --kernel-name kernel_substring=moeq \
    --error-exitcode 3 --print-limit 20 "$python" tests/sm90_sanitizer.py --kernels "$kernels" $few >"$log" 2>&1
  code=$?
  [ $code -eq 0 ] || { status=1; tail -n 100 "$log"; }
  [ $code -eq 124 ] && echo "$tool: stopped after $limit s"
  echo "$tool: exit status $code; $(grep -c 'all results are right' "$log") complete run; $(grep 'SUMMARY' "$log" | tail -n 1)"
  rm -f "$log"
done
exit $status
