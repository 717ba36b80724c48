#!/usr/bin/env bash
# The runs whose results the README shows, all of them (about five minutes on an H200) or one part at a time:
#
#   bash benchmarks/run_h200.sh PART [FOLDER]
#
# PART: all (the README's table first; SECONDS_IN_ALL=280 ends it); warm, which compiles what `all` runs; smoke, with
# checks against a float32 reference; nvfp4-SHAPE, mxfp4-SHAPE or wide-SHAPE (fp8 and bf16) with SHAPE qwen3_30b, dsv3,
# mixtral or gptoss120b; emulation, route, example, tune. Lines are appended to files of FOLDER (default:
# benchmarks/results). MS=1,64, REPS=9 and BUDGET=60 (seconds) make a part shorter.
# The peers are those of benchmarks/peers/fetch_peers.sh in .peers; without them the library runs alone.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part=${1:?a part, see the head of this file}
to=${2:-benchmarks/results}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
reps=${REPS:-15}
ms=${MS:-1,8,64,256,1024,4096}
mkdir -p "$to"

with_peers() { if [ -f .peers/MANIFEST ]; then echo "$1"; fi; }
moe() { # seconds, output file, options
  local seconds=$1 out=$2
  shift 2
  timeout $((seconds + 30)) "$python" benchmarks/bench_moe.py --reps "$reps" --budget "$seconds" --out "$to/$out" "$@"
}

backends=cuda_sm90,cuda_sm90_fp8,triton,triton_fp8
shapes=dsv3,qwen3_30b,mixtral,gptoss120b
first=qwen3_30b,mixtral,gptoss120b

# Lines of commands on as many processes as there are cores, nothing of which is timed: they fill caches.
at_once() { xargs -d '\n' -P "$(nproc)" -I{} timeout "${WARM:-75}" bash -c '{} >/dev/null 2>&1 || true'; }
peer="$python benchmarks/bench_moe.py --backends '' --warm 0 --reps 1 --sets 1"

warm_first() { # what the first runs of `all` compile
  {
    echo "$python benchmarks/bench_moe.py --warm-only --warm 30 --shapes $shapes --ms $ms --fmts nvfp4,nvfp4-a4,mxfp4,bf16"
    if [ -f .peers/MANIFEST ]; then
      for shape in gptoss120b qwen3_30b mixtral; do
        echo "$peer --shapes $shape --ms $ms --peers triton_kernels"
        echo "$peer --shapes $shape --ms $ms --peers vllm_triton"
      done
    fi
  } | at_once
}

warm_rest() {
  {
    for shape in qwen3_30b dsv3; do
      echo "$python benchmarks/bench_moe.py --backends triton_fp8 --warm 0 --reps 1 --sets 1 --fmts fp8 --shapes $shape --ms $ms"
    done
    echo "$python benchmarks/bench_moe.py --warm-only --shapes dsv3 --ms $ms --fmts bf16,fp8"
    if [ -f .peers/MANIFEST ]; then
      # humming takes some seconds a kernel and number of tokens; six times DeepSeek-V3 would not fit.
      for m in 1,8,64 256,1024,4096; do echo "$peer --shapes dsv3 --ms $m --peers humming"; done
      for m in ${ms//,/ }; do
        for shape in mixtral qwen3_30b; do echo "$peer --shapes $shape --ms $m --peers humming"; done
      done
      for shape in dsv3 qwen3_30b; do echo "$peer --shapes $shape --ms $ms --peers vllm_triton:fp8+bf16"; done
    fi
  } | at_once
}

# Ends what runs beyond the time that is left of SECONDS_IN_ALL.
left() { echo $((${SECONDS_IN_ALL:-280} - SECONDS)); }
timed() { # seconds at most, options
  local seconds=$(($(left) < $1 ? $(left) : $1))
  shift
  [ "$seconds" -lt 15 ] || moe "$((seconds - 10))" h200_moe.jsonl --warm 0 --backends "$backends" --ms "$ms" "$@"
}

# humming compiles some seconds a kernel and number of tokens: all of them at once, into its cache.
warm_humming() {
  [ -f .peers/MANIFEST ] || return 0
  for m in ${ms//,/ }; do
    timeout 100 "$python" benchmarks/bench_moe.py --backends '' --warm 0 --peers humming --reps 1 --sets 1 \
      --shapes "$1" --ms "$m" >/dev/null 2>&1 &
  done
  wait
}

shape=${part#*-}
case $part in
  warm) warm_first && warm_rest ;;
  all)
    warm_first
    timed 35 --fmts nvfp4,nvfp4-a4 --shapes dsv3 --peers "$(with_peers marlin)"
    timed 75 --fmts nvfp4,nvfp4-a4,mxfp4,bf16 --shapes "$first" \
      --peers "$(with_peers marlin:nvfp4+mxfp4,triton_kernels,vllm_triton)"
    if [ "$(left)" -gt 110 ]; then # a part of it would replace whole columns of what is there
      warm_rest
      timed 80 --fmts nvfp4,nvfp4-a4 --shapes qwen3_30b,dsv3,mixtral --peers "$(with_peers marlin,humming)"
      timed 60 --fmts bf16,fp8 --shapes dsv3,qwen3_30b --peers "$(with_peers vllm_triton:fp8+bf16)"
    fi
    [ "$(left)" -lt 15 ] || bash "$0" emulation "$to"
    [ "$(left)" -lt 12 ] || bash "$0" route "$to" ;;
  smoke)
    moe 100 smoke.jsonl --fmts nvfp4,nvfp4-a4,mxfp4,mxfp4-a8,fp8,int4,bf16 --shapes qwen3_30b --ms "$ms" \
      --check --peers "$(with_peers marlin,triton_kernels,vllm_triton:fp8+bf16)" ;;
  nvfp4-*)
    warm_humming "$shape"
    moe "${BUDGET:-170}" h200_moe.jsonl --fmts nvfp4,nvfp4-a4 --shapes "$shape" --ms "$ms" \
      --peers "$(with_peers marlin,humming)" ;;
  mxfp4-*)
    moe "${BUDGET:-170}" h200_moe.jsonl --fmts mxfp4,mxfp4-a8 --shapes "$shape" --ms "$ms" \
      --peers "$(with_peers marlin:mxfp4,triton_kernels)" ;;
  wide-*)
    moe "${BUDGET:-170}" h200_moe.jsonl --fmts fp8,bf16 --shapes "$shape" --ms "$ms" \
      --peers "$(with_peers vllm_triton:fp8+bf16)" ;;
  emulation)
    moe 40 h200_emulation.jsonl --fmts nvfp4 --shapes qwen3_30b --ms 1,64,1024 \
      --peers "$(with_peers emulation)" ;;
  route)
    timeout 120 "$python" benchmarks/bench_route.py --out "$to/h200_route.jsonl" ;;
  example)
    timeout 170 "$python" examples/transformers_qwen3_moe.py --synthetic --out "$to/h200_example.json" ;;
  tune)
    timeout 170 "$python" -m torch_moe_ops tune --shapes "${SHAPES:-qwen3_30b}" --scheme "${SCHEME:-nvfp4}" \
      --tokens "$ms" --max-minutes "${MINUTES:-2}" ;;
  *)
    sed -n 2,10p "${BASH_SOURCE[0]}" >&2
    exit 2 ;;
esac
