#!/usr/bin/env bash
# An environment of its own for the rivals (NIXL, Mooncake, ucxx): deploy/bench/peers.sh [VENV]. About 1.7 GB, some minutes, once.
# Runs the NIXL cases of the conformance suite:
#   REFLUX_TEST_NIXL=1 .venv-peers/bin/python -m pytest libs/transfer/tests
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv-peers}
stamp="$venv/.ready"
wanted=$(cat deploy/bench/peers.sh deploy/bench/requirements-peers.txt libs/transfer/pyproject.toml | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0

echo "peers: creating $venv and installing deploy/bench/requirements-peers.txt" >&2
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@" 2> >(grep -v '^WARNING: Location' >&2); }
pip install -r deploy/bench/requirements-peers.txt
# Without their dependencies: backends, handles and pulls need neither gRPC nor the protos.
pip install --no-deps --no-build-isolation -e ./libs/transfer -e ./libs/weightplan -e ./libs/kit -e ./libs/protos
echo "$wanted" >"$stamp"
echo "peers: done" >&2
