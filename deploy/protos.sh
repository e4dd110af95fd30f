#!/usr/bin/env bash
# Generates the committed stubs: deploy/protos.sh OUT
set -euo pipefail
out=$1
mapfile -t files < <(find protos -name '*.proto' | sort)
python -m grpc_tools.protoc -Iprotos --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" \
  --mypy_grpc_out=quiet:"$out" "${files[@]}"
# Files without a service get an empty stub module: leave it out.
grep -L 'Stub' $(find "$out/reflux" -name '*_pb2_grpc.py') | while read -r empty; do rm -f "$empty" "${empty}i"; done
