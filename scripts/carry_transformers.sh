#!/usr/bin/env bash
# Collects transformers and what it imports, unpacked in a folder, for a machine without a network:
#
#   bash scripts/carry_transformers.sh            # here; makes .whl (about 35 MB, 10 MB compressed), which git ignores
#   PYTHONPATH=.whl python benchmarks/bench_transformers_model.py ...     # there
#
# The machine needs Python 3.12 on x86_64 (PYTHON_VERSION=3.13 for another one), torch and numpy. Of the models only
# those that the benchmark builds are kept: MODELS="qwen3_moe gpt_oss" adds or leaves out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
to=${TO:-.whl}
models=${MODELS:-qwen3_moe gpt_oss}
# huggingface_hub's client of HTTP is imported, though nothing is fetched.
packages=("transformers==${TRANSFORMERS:-5.23.0}" huggingface_hub tokenizers safetensors regex packaging pyyaml tqdm
  filelock httpx2 httpcore2 anyio h11 idna truststore typing_extensions)

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
${PYTHON:-python3} -m pip download --quiet --no-deps --dest "$wheels" --only-binary=:all: \
  --python-version "${PYTHON_VERSION:-3.12}" --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
  "${packages[@]}"
rm -rf "$to"
mkdir -p "$to"
for wheel in "$wheels"/*.whl; do ${PYTHON:-python3} -m zipfile -e "$wheel" "$to"; done
for folder in "$to"/transformers/models/*/; do
  name=$(basename "$folder")
  case " auto $models " in *" $name "*) ;; *) rm -r "$folder" ;; esac
done
rm -rf "$to"/hf_xet* "$to"/*/tests
du -sh "$to"
