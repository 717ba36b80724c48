#!/usr/bin/env bash
# The runs whose results the README shows, all of them (about five minutes on an H200) or one part at a time:
#
#   bash benchmarks/run_h200.sh PART [FOLDER]
#
# PART: all (SECONDS_IN_ALL=280 ends it); nvfp4, mxfp4, bf16, fp8: the tables of a weight format; warm, which compiles
# what they run (NO_WARM=1 leaves it out of `all`); smoke, with checks against a float32 reference; emulation, route,
# example, tune. Not in `all`: standard, times of the backends that `accuracy="strict"` leaves out beside those that it
# takes (fp8 and int4; up to five minutes), and distances, how far each is from the oracle (up to three).
# Lines are appended to files of FOLDER (default: benchmarks/results), but for distances, which are one run.
# MS=1,64 and REPS=9 make a part shorter; SHAPES, FMTS="fp8row int4zp,int4g32" and SECONDS_OF_PART those two.
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

# Ends what runs beyond the time that is left of SECONDS_IN_ALL.
left() { echo $((${SECONDS_IN_ALL:-280} - SECONDS)); }
timed() { # seconds at most, options
  local seconds=$(($(left) < $1 ? $(left) : $1))
  shift
  [ "$seconds" -lt 15 ] || moe "$((seconds - 10))" h200_moe.jsonl --warm 0 --ms "$ms" "$@"
}
# A weight format: in one process what fits the GPU together.
format() {
  case $1 in
    nvfp4)
      timed 150 --shapes dsv3,mixtral,qwen3_30b,gptoss120b --fmts nvfp4,nvfp4-a4,nvfp4-a8 \
        --backends cuda_sm90,cuda_sm90_packed,cuda_sm90_folded,triton --peers "$(with_peers marlin,humming)" ;;
    mxfp4)
      timed 60 --shapes gptoss120b --fmts mxfp4 --backends cuda_sm90,triton \
        --peers "$(with_peers marlin:mxfp4,humming:mxfp4,triton_kernels)"
      timed 60 --shapes qwen3_30b,mixtral --fmts mxfp4 --backends cuda_sm90,triton \
        --peers "$(with_peers marlin:mxfp4,triton_kernels)" ;;
    bf16)
      timed 80 --shapes qwen3_30b,mixtral,dsv3,gptoss120b --fmts bf16 --backends cuda_sm90_bf16,triton \
        --peers "$(with_peers vllm_triton)" ;;
    fp8)
      timed 60 --shapes dsv3,qwen3_30b --fmts fp8 --backends cuda_sm90_fp8,triton_fp8,triton \
        --peers "$(with_peers vllm_triton:fp8)" ;;
  esac
}

standard() { # weight formats
  local peers=""
  case $1 in
    fp8) peers=vllm_triton:fp8,deepgemm:fp8 ;;
    int4,mxint4) peers=marlin:int4+mxint4,humming:int4+mxint4 ;;
  esac
  moe "${SECONDS_OF_PART:-95}" h200_standard.jsonl --warm 0 --ms "$ms" --fmts "$1" \
    --shapes "${SHAPES:-qwen3_30b,dsv3,mixtral,160:8:5120:1536}" \
    --backends triton,auto,triton_fp8,cuda_sm90_fp8,cuda_sm90_int4 --peers "$(with_peers "$peers")"
}

# Lines of commands on as many processes as there are cores, nothing of which is timed: they fill caches.
at_once() { xargs -d '\n' -P "$(nproc)" -I{} timeout "${WARM:-100}" bash -c '{} >/dev/null 2>&1 || true'; }
warm() {
  local n fmt
  {
    for fmt in nvfp4 mxfp4; do # humming takes some seconds a kernel and number of tokens
      for n in ${ms//,/ }; do echo "MS=$n bash $0 once-$fmt"; done
    done
    for fmt in bf16 fp8; do echo "MS=$ms bash $0 once-$fmt"; done
  } | at_once
}

case $part in
  warm) warm ;;
  all)
    [ -n "${NO_WARM:-}" ] || warm
    for fmt in nvfp4 mxfp4 bf16 fp8; do format "$fmt"; done
    [ "$(left)" -lt 15 ] || bash "$0" emulation "$to"
    [ "$(left)" -lt 12 ] || bash "$0" route "$to"
    [ "$(left)" -lt 40 ] || bash "$0" example "$to" ;;
  nvfp4 | mxfp4 | bf16 | fp8) format "$part" ;;
  once-*)
    reps=1 to=$(mktemp -d)
    format "${part#once-}"
    rm -rf "$to" ;;
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
  standard)
    for fmts in ${FMTS:-fp8 fp8row int4,mxint4}; do standard "$fmts"; done ;;
  distances)
    timeout $((${SECONDS_OF_PART:-170} + 30)) "$python" benchmarks/distances.py --seconds "${SECONDS_OF_PART:-170}" --out "$to/h200_distances.jsonl" ;;
  tune)
    timeout 170 "$python" -m torch_moe_ops tune --shapes "${SHAPES:-qwen3_30b}" --scheme "${SCHEME:-nvfp4}" \
      --tokens "$ms" --max-minutes "${MINUTES:-2}" ;;
  *)
    sed -n 2,13p "${BASH_SOURCE[0]}" >&2
    exit 2 ;;
esac
