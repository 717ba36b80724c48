#!/usr/bin/env bash
# Installs releases of flashinfer-python side by side and runs the contract tests against each, on a CPU.
#
#   PYTHON=.venv/bin/python bash scripts/flashinfer_releases.sh [VERSION ...]
#
# Without arguments: the oldest supported release and the newest one that the library is known to fit (OLDEST and NEWEST in
# torch_moe_ops/backends/flashinfer/package.py), so that the outcome does not depend on the day; a newer one is named. Only
# the wheel and the small packages that importing it needs are installed (--no-deps), in build/flashinfer/.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
FOLDER=$PWD/build/flashinfer
if [ $# -eq 0 ]; then
  known=$("$PYTHON" -c 'from torch_moe_ops.backends.flashinfer.package import NEWEST, OLDEST; print(OLDEST, NEWEST)')
  read -r oldest newest <<<"$known"
  set -- "$oldest" "$newest"
  released=$("$PYTHON" -m pip index versions flashinfer-python 2>/dev/null | sed -n 's/^flashinfer-python (\(.*\))$/\1/p') || true
  if [ -n "$released" ] && [ "$released" != "$newest" ]; then
    echo "flashinfer-python $released is out: make test-flashinfer FLASHINFER=$released" >&2
  fi
fi

# What `import flashinfer` needs besides torch and numpy.
"$PYTHON" -m pip install --quiet 'apache-tvm-ffi<0.2' nvidia-ml-py tqdm requests filelock jinja2 packaging
paths=
for version in "$@"; do
  target=$FOLDER/$version
  [ -d "$target/flashinfer" ] || "$PYTHON" -m pip install --quiet --no-deps --target "$target" "flashinfer-python==$version"
  paths=$paths:$target
done
MOEQ_FLASHINFER_PATHS=${paths#:} "$PYTHON" -m pytest -q -n 2 tests/backends/flashinfer/test_flashinfer_versions.py
