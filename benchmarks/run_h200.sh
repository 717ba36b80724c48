#!/usr/bin/env bash
# The runs whose results the README shows, all of them (about five minutes on an H200) or one part at a time:
#
#   bash benchmarks/run_h200.sh PART [FOLDER]
#
# PART: all (SECONDS_IN_ALL=280 ends it); a model (dsv3, qwen3_30b, mixtral, gptoss120b: every format of the tables);
# warm, which compiles what `all` runs (NO_WARM=1 leaves it out there); smoke, with checks against a float32 reference;
# emulation, route, example, tune. Lines are appended to files of FOLDER (default: benchmarks/results).
# MS=1,64 and REPS=9 make a part shorter.
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

models=dsv3,qwen3_30b,mixtral,gptoss120b
# Layers of 4-bit weights run in one process, wider ones in others: together they would not fit the GPU.
four_bits() { if [ "$1" = dsv3 ]; then echo nvfp4,nvfp4-a4,nvfp4-a8; else echo nvfp4,nvfp4-a4,nvfp4-a8,mxfp4; fi; }
wide() { case $1 in dsv3 | qwen3_30b) echo bf16 fp8 ;; *) echo bf16 ;; esac; }
four_bit_backends=cuda_sm90,cuda_sm90_packed,cuda_sm90_folded,triton
wide_backends=cuda_sm90_bf16,cuda_sm90_fp8,triton,triton_fp8
four_bit_peers() {
  case $1 in
    dsv3) echo marlin,humming ;;
    gptoss120b) echo marlin:nvfp4+mxfp4,humming:nvfp4+mxfp4,triton_kernels ;;
    *) echo marlin:nvfp4+mxfp4,humming,triton_kernels ;;
  esac
}

# Ends what runs beyond the time that is left of SECONDS_IN_ALL.
left() { echo $((${SECONDS_IN_ALL:-280} - SECONDS)); }
timed() { # seconds at most, options
  local seconds=$(($(left) < $1 ? $(left) : $1))
  shift
  [ "$seconds" -lt 15 ] || moe "$((seconds - 10))" h200_moe.jsonl --warm 0 --ms "$ms" "$@"
}
model() {
  local fmt
  timed 90 --shapes "$1" --backends $four_bit_backends --fmts "$(four_bits "$1")" \
    --peers "$(with_peers "$(four_bit_peers "$1")")"
  for fmt in $(wide "$1"); do
    timed 50 --shapes "$1" --backends $wide_backends --fmts "$fmt" --peers "$(with_peers "vllm_triton:$fmt")"
  done
}

# Lines of commands on as many processes as there are cores, nothing of which is timed: they fill caches.
at_once() { xargs -d '\n' -P "$(nproc)" -I{} timeout "${WARM:-100}" bash -c '{} >/dev/null 2>&1 || true'; }
warm() {
  local m n fmt fmts=nvfp4,nvfp4-a4,nvfp4-a8,mxfp4,bf16,fp8
  local once="$python benchmarks/bench_moe.py --warm 0 --reps 1 --sets 1"
  {
    echo "$python benchmarks/bench_moe.py --warm-only --warm 80 --shapes $models --ms $ms --fmts $fmts"
    for m in ${models//,/ }; do
      for fmt in $(wide "$m"); do
        echo "$once --shapes $m --backends triton_fp8 --fmts $fmt --ms $ms --peers '$(with_peers "vllm_triton:$fmt")'"
      done
      # humming takes some seconds a kernel and number of tokens.
      for n in ${ms//,/ }; do
        echo "$once --shapes $m --backends '' --ms $n --peers '$(with_peers "$(four_bit_peers "$m")")'"
      done
    done
  } | at_once
}

case $part in
  warm) warm ;;
  all)
    [ -n "${NO_WARM:-}" ] || warm
    for m in ${models//,/ }; do model "$m"; done
    [ "$(left)" -lt 15 ] || bash "$0" emulation "$to"
    [ "$(left)" -lt 12 ] || bash "$0" route "$to"
    [ "$(left)" -lt 40 ] || bash "$0" example "$to" ;;
  dsv3 | qwen3_30b | mixtral | gptoss120b) model "$part" ;;
  smoke)
    moe 100 smoke.jsonl --fmts nvfp4,nvfp4-a4,mxfp4,mxfp4-a8,fp8,int4,bf16 --shapes qwen3_30b --ms "$ms" \
      --check --peers "$(with_peers marlin,triton_kernels,vllm_triton:fp8+bf16)" ;;
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
