#!/usr/bin/env bash
# All Triton kernels under compute-sanitizer: memcheck and initcheck over every format, racecheck over one of every
# weight scheme. Needs a GPU. Ends with a line per tool and part; anything but "0 errors" is a finding.
# PYTHON: the interpreter. LIMIT: seconds for each tool. PARTS: processes at a time. TOOLS: which of them.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} limit=${LIMIT:-300} parts=${PARTS:-8} status=0
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# Each tensor is an allocation of its own, so that a read past its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

# all NAME COMMAND...: the command on every part at once; shows what failed.
all() {
  local name=$1 start=$SECONDS failed=0 jobs=()
  shift
  for ((i = 0; i < parts; i++)); do
    timeout "$limit" "$@" --part "$i" "$parts" >"$logs/$name.$i" 2>&1 &
    jobs+=($!)
  done
  for ((i = 0; i < parts; i++)); do
    wait "${jobs[$i]}"
    local code=$?
    [ $code -eq 0 ] || { failed=1; echo "-- $name, part $i: exit status $code"; tail -n 40 "$logs/$name.$i"; }
    [ $code -eq 124 ] && echo "stopped after $limit s"
  done
  echo "$name, $((SECONDS - start)) s: $(cat "$logs/$name".* | grep -c 'all results are right') of $parts parts right; $(cat "$logs/$name".* |
    grep -ho 'SUMMARY: [0-9].*' | grep -v 'not printed' | sort | uniq -c | tr '\n' ';')"
  [ $failed -eq 0 ] || status=1
}

for tool in ${TOOLS:-memcheck initcheck racecheck}; do
  few=
  [ "$tool" = racecheck ] && few=--few
  all "$tool" compute-sanitizer --tool "$tool" --error-exitcode 3 --print-limit 5 --show-backtrace no \
    "$python" scripts/sanitize_triton.py $few
done
exit $status
