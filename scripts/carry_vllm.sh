#!/usr/bin/env bash
# Packs what one of vLLM's MoE layers needs into a file, for a machine with torch 2.11 for CUDA 13 and no network:
#
#   bash scripts/carry_vllm.sh             # here; makes .vllm/site.tar.xz (about 15 MB), which git ignores
#   mkdir /tmp/site && tar xJf .vllm/site.tar.xz -C /tmp/site                       # there
#   PYTHONPATH=/tmp/site:$PWD python benchmarks/bench_vllm_layer.py --out FILE
#
# It is no whole vLLM: of its libraries the two with the kernels of layers are kept, and of these what a GPU of ARCH=90
# runs of experts in bfloat16 with NVFP4, MXFP4, FP8 or INT4 weights (Marlin's, which come as PTX, compiled here: CUDA's
# ptxas and fatbinary are needed); attention's, 460 MB, are replaced by names that raise. The machine needs Python 3.12 on x86_64, transformers 5.5
# or later and what scientific Python images have (numpy, regex, aiohttp, pillow, uvloop, nvidia-ml-py, cuda-bindings).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
to=${TO:-.vllm}
python=${PYTHON:-python3}
# humming compiles its kernels there; compressed-tensors is the release that vLLM asks for.
packages=(vllm==0.26.0 humming-kernels==0.1.10 compressed-tensors==0.17.0 openai-harmony==0.0.8 openai anyio blake3
  cachetools cbor2 dill distro httpcore2 httpx2 jiter loguru msgspec pybase64 pyelftools pyzmq sniffio truststore)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() {
  "$python" -m pip download --quiet --only-binary=:all: --python-version 3.12 --dest "$work/wheels" \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_26_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 "$@"
}
fetch --no-deps "${packages[@]}"
fetch pydantic # with the core that it asks for
for wheel in "$work"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$work/site"; done
site=$work/site/vllm
mkdir "$work/kept"
"$python" -m pip install --quiet --target "$work/tools" zstandard
thin() { # LIBRARY KERNELS
  PYTHONPATH=$work/tools "$python" scripts/thin_fatbins.py "$site/$1.abi3.so" "$work/kept/$1.abi3.so" \
    --arch "${ARCH:-90}" --compile --kernels "$2"
}
thin _C_stable_libtorch \
  'activation_kernel|act_and_mul|silu_and_mul|per_token_group_quant|scaled_int8_quant|segmented_max|marlin_repack|marlin_int4|MarlinDefault'
# Marlin's template arguments are numbers of types: activations (bfloat16), then weights (e2m1, or 4 bits with a bias of 8).
thin _moe_C_stable_libtorch "moe_sum|moeSigmoid|topkGating|moe_wna16_gemm|grouped_topk|computeExpertFirst|expandInput\
|MarlinDefault|marlin_moe_wna166MarlinILl1125899906909960ELl(562949953487106|1125899907892224)E"
find "$site" -name '*.so' -delete
rm "$site/vllm-rs" # a server
find "$site/third_party" -depth -type d \( -name include -o -name cutlass \) -exec rm -r {} + # headers of other kernels
mv "$work"/kept/*.so "$site"
rm -rf "$site"/vllm_flash_attn/*
cat >"$site/vllm_flash_attn/__init__.py" <<'PYTHON'
"""Stands for the kernels of attention, which layers of experts do not call."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"vllm.vllm_flash_attn.{name} was left out")

    return missing
PYTHON
mkdir -p "$to"
tar cJf "$to/site.tar.xz" -C "$work/site" .
du -h "$to/site.tar.xz"
