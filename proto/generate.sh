#!/usr/bin/env bash
# Regenerates the committed stubs under proto/cohort, or into the folder given as $1.
set -euo pipefail
root=$(cd "$(dirname "$0")" && pwd)
out=${1:-$root}
python=${PYTHON:-python3}
bin=$(dirname "$(command -v "$python")")
cd "$root"
PATH="$bin:$PATH" "$python" -m grpc_tools.protoc -I . \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
  $(find cohort -name '*.proto' | sort)
