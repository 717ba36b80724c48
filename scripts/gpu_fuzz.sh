#!/usr/bin/env bash
# Random problems on every backend of this library that runs on this GPU, against the oracle, by
# tests/programs/fuzz_problems.py.
#
#   bash scripts/gpu_fuzz.sh OUT.jsonl [COUNT] [SECONDS]
#
# COUNT problems (default 10000) of each, at most SECONDS (default 60) each, on JOBS processes (default 8); BACKENDS chooses.
# "cpu:avx512" there is `cpu` with the kernels of that instruction set. A line a backend is appended to OUT.jsonl; the
# exit status is 1 where something missed its bound. OPTIONS=--special adds rows of NaN and Inf.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?a file for results, see the head of this file}
status=0
for backend in ${BACKENDS:-triton triton_fp8 cuda_sm90 cuda_sm90_int4 cuda_sm90_packed cuda_sm90_folded cuda_sm90_bf16 cuda_sm90_fp8}; do
  case $backend in *:*) export MOEQ_CPU_ISA=${backend#*:} ;; *) unset MOEQ_CPU_ISA ;; esac
  # shellcheck disable=SC2086
  "${PYTHON:-python3}" tests/programs/fuzz_problems.py --backend "${backend%%:*}" --count "${2:-10000}" --seconds "${3:-60}" \
    --jobs "${JOBS:-8}" --out "$out" ${OPTIONS:-} || status=1
done
exit "$status"
