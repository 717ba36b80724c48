#!/usr/bin/env bash
# The Hopper kernels in two processes at once under MPS, each with a share of the multiprocessors. Needs such a GPU that
# nobody else uses, nvidia-cuda-mps-control, and the CUDA extension. Every result must be bit for bit that of the call
# alone; prints what both processes say, and fails if one does.
#
# usage: scripts/mps_streams.sh [percent ...]     shares to try (default: 50 30 100)
#   PYTHON  interpreter that has torch            (default: python3)
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD
python=${PYTHON:-python3}
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d
trap 'echo quit | nvidia-cuda-mps-control || true; rm -rf "$folder"' EXIT

failed=0
[ $# -gt 0 ] || set -- 50 30 100
for percent in "$@"; do
  export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$percent
  count=$("$python" -c 'import torch; print(torch.cuda.get_device_properties(0).multi_processor_count)')
  echo "== $percent %: $count multiprocessors, as CUDA says"
  pids=()
  for scenario in eager graphs; do
    timeout 180 "$python" tests/programs/sm90_streams.py "$scenario" --seconds 150 >"$folder/$scenario.txt" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
  done
  tail -n 3 "$folder"/eager.txt "$folder"/graphs.txt
done
exit "$failed"
