#!/usr/bin/env bash
# Packs what the replication needs beside torch, transformers, accelerate, matplotlib, rich and typer into one archive,
# for a machine without a network: unpack it into a folder on PYTHONPATH. lm-eval's own tasks are left out.
# usage: offline.sh OUT.tar.xz [PYTHON]        (needs pip and xz; about a minute)
set -euo pipefail
out=$(realpath "$1")
python=${2:-3.12}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$(dirname "$0")/../.."
lm_eval=$(grep -o '^lm-eval==.*' constraints.txt)
python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary=:all: --target "$work/site" \
  --implementation cp --python-version "$python" --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 \
  "$lm_eval" datasets 'dill<0.4.2' 'multiprocess<0.70.20' pydantic annotated-types typing-inspection typing-extensions wonderwords \
  "pydantic-core==$(python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$python" \
    --dest "$work/pydantic" pydantic && unzip -p "$work"/pydantic/*.whl '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core==//p')"
find "$work/site/lm_eval/tasks" -mindepth 1 -maxdepth 1 -type d -exec rm -r {} +
tar -C "$work/site" -cf - . | xz -T0 -6 >"$out"
ls -l "$out"
