#!/usr/bin/env bash
# The gate: format, lint, types, import rules, protos, drift of generated files. Runs every step, fails if any failed.
set -uo pipefail
failed=()
step() {
  local name=$1
  shift
  if "$@" >"$log" 2>&1; then
    echo "ok    $name"
  else
    echo "FAIL  $name"
    cat "$log"
    failed+=("$name")
  fi
}
log=$(mktemp)
drift=$(mktemp -d)
trap 'rm -rf "$log" "$drift"' EXIT

same_stubs() { bash deploy/protos.sh "$drift" && diff -r --exclude=__pycache__ "$drift/reflux" libs/protos/src/reflux; }

step "constraints fresh" python deploy/check_constraints.py
step "format (ruff)" ruff format --check .
step "lint (ruff)" ruff check .
step "types (basedpyright)" basedpyright --level error
step "import rules (import-linter)" lint-imports
step "protos (buf lint)" buf lint
step "protos (buf breaking)" buf breaking --against protos/v1.binpb
step "stubs fresh" same_stubs
if [ ${#failed[@]} -gt 0 ]; then
  echo "make check failed: ${failed[*]}" >&2
  exit 1
fi
