# Sourced by sanitize_sm90.sh and sanitize_triton.sh: runs a process under a tool of compute-sanitizer and says what came
# of it, in a line. PYTHON: the interpreter. LIMIT: seconds for each process. SECONDS_IN_ALL: ends everything. KEEP: a
# folder that keeps the logs.
export PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-300} LOGS STOP
LOGS=$(mktemp -d)
STOP=$(($(date +%s) + ${SECONDS_IN_ALL:-36000}))
trap 'rm -rf "$LOGS"' EXIT
# Each tensor is an allocation of its own, so that an access past its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1
# By default racecheck ends its report of a process earlier, as it did of packed-large. Not run on a GPU since this is set.
export NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS=${NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS:-100000000}

# report TOOL GROUP COMMAND...: one line, racecheck's pairs (racecheck_pairs.py), and the beginning of the log of what
# failed. From the root of the repository.
report() {
  local tool=$1 group=$2 start=$SECONDS code=0 limit=$((STOP - $(date +%s)))
  local log=$LOGS/$tool.$group
  shift 2
  [ "$limit" -lt "$LIMIT" ] || limit=$LIMIT
  [ "$limit" -gt 0 ] || { echo "$tool | $group | not run, no time is left |"; return 1; }
  timeout "$limit" "$@" >"$log" 2>&1 || code=$?
  [ -z "${KEEP:-}" ] || cp "$log" "$KEEP/"
  echo "$tool | $group | $(grep -o '[0-9]* results right' "$log" || echo 'wrong or stopped') |" \
    "$(grep -o 'SUMMARY: [0-9].*' "$log" | tail -n 1) | $((SECONDS - start)) s"
  # Exit status 3 is of findings, which for racecheck may all be accepted. Results have to be right all the same.
  if [ "$tool" = racecheck ] && { [ $code -eq 0 ] || [ $code -eq 3 ]; } && grep -q '[0-9] results right' "$log"; then
    code=0
    "$PYTHON" scripts/racecheck_pairs.py "$log" || code=3
  fi
  if [ $code -ne 0 ]; then
    echo "   $tool, $group: exit status $code (124: stopped after $limit s)"$'\n'"$(head -n 80 "$log")"
  fi
  return $code
}
export -f report
