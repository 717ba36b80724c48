#!/usr/bin/env bash
# Installs the package as a user would on each of several Pythons (wheel, source distribution, editable install, each in
# a virtual environment of its own), and lets `doctor` and the quickstart say what works there. Writes a transcript.
#
# usage: scripts/try_install.sh TRANSCRIPT PYTHON...
#   needs dist/ of scripts/build_wheels.sh
#   WAYS         some of "wheel sdist editable"                                                       (default: all)
#   TORCH        what pip installs as torch                                                           (default: torch)
#   TORCH_SITES  instead: TORCH_SITES/3.10, 3.11, ... are folders of packages with torch, put on PYTHONPATH
set -euo pipefail
cd "$(dirname "$0")/.."
transcript=$(realpath -m "$1")
shift
ways=${WAYS:-wheel sdist editable}
torch=${TORCH:-torch}
root=$PWD
wheel=$(realpath dist/*.whl)
sdist=$(realpath dist/*.tar.gz)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=$work/venv # one path for all, so that a compiler cache recognizes what it compiled before
: >"$transcript"

# No machine's paths, no package index, and nothing of what torch and pip say of other things.
filtered() {
  sed -E -e "s#$work/##g; s#$root/##g; s#$HOME#~#g" -e 's#/[^ :]*/(site-packages|torch)/#\1/#g; s#https?://[^ ]*#URL#g' \
    -e '/^(WARNING: |\[notice\]|W[0-9]{4} |Looking in |ERROR: pip.s dependency resolver|torch [0-9.]+ requires )/d; /Failed to initialize NumPy|cpu = _conversion|^ *warnings\.warn/d'
}

say() { echo "$*" | filtered | tee -a "$transcript"; }

# A command as it is read, and what it prints; its status is kept.
run() {
  say "\$ $*"
  local status=0
  (eval "$*") >"$work/output" 2>&1 || status=$?
  filtered <"$work/output" | tee -a "$transcript"
  [ $status = 0 ] || { say "FAILED with status $status"; return $status; }
}

fresh() {
  rm -rf "$venv" "$work/source"
  "$python" -m venv "$venv"
  export PATH=$venv/bin:$plain_path PYTHONPATH=
  if [ -n "${TORCH_SITES:-}" ]; then
    ln -sfn "$TORCH_SITES/$version" "$work/torch"
    export PYTHONPATH=$work/torch
  else
    pip install --quiet "$torch" 2>&1 | filtered
  fi
}

source_tree() {
  mkdir "$work/source"
  tar -xzf "$sdist" -C "$work/source" --strip-components=1
  cd "$work/source"
}

works() {
  mkdir -p "$work/elsewhere/examples" # where no source tree can be imported instead
  cp examples/quickstart.py "$work/elsewhere/examples"
  cd "$work/elsewhere"
  run python -m torch_moe_ops doctor
  run python examples/quickstart.py "$root/tests/data/checkpoints/qwen3_moe_modelopt_nvfp4"
}

plain_path=$PATH
export MOEQ_CUDA=${MOEQ_CUDA:-0} PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
failed=0
for python in "$@"; do
  python=$(command -v "$python")
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  for way in $ways; do
    fresh
    say ""
    say "## Python $("$venv/bin/python" -c 'import platform; print(platform.python_version())'), $way"
    (
      set -e
      case $way in
        wheel)
          run pip install --quiet "dist/$(basename "$wheel")"
          ;;
        sdist)
          source_tree
          run "pip install --quiet --upgrade 'setuptools>=77' wheel ninja"
          run pip install --quiet --no-build-isolation .
          ;;
        editable)
          source_tree
          run "pip install --quiet --upgrade 'setuptools>=77' wheel ninja"
          run pip install --quiet --no-build-isolation -e .
          ;;
      esac
      cd "$root"
      works
    ) || failed=1
  done
done
exit $failed
