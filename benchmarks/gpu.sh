#!/bin/bash
# Runs benchmarks/gpu.py on a machine with a GPU and without a network, whose Python has torch.
#
#     benchmarks/gpu.sh WHEELS [options of gpu.py]
#
# WHEELS is a folder of what benchmarks/gpu.txt lists, made where there is a network:
#
#     pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#         --platform manylinux2014_x86_64 --dest WHEELS --requirement benchmarks/gpu.txt --constraint constraints.txt
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
wheels=$(realpath "$1")
shift
cd "$(dirname "$0")/.."
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
if compgen -G "$wheels/*.whl" > /dev/null; then
    "${PYTHON:-python3}" -m pip install --quiet --no-index --no-deps --target "$packages" "$wheels"/*.whl
fi
PYTHONPATH="$PWD:$packages${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" benchmarks/gpu.py "$@"
