#!/usr/bin/env bash
# TRL, the rival of `make bench-rl`: deploy/bench/trl.sh [VENV]. It uses torch and transformers of .venv, so that both sides have the same; some minutes, once.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv-trl}
stamp="$venv/.ready"
wanted=$(cat deploy/bench/trl.sh deploy/bench/requirements-trl.txt constraints.txt | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0

make setup
echo "trl: creating $venv and installing deploy/bench/requirements-trl.txt" >&2
bash deploy/beside.sh "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check -q install -c constraints.txt -r deploy/bench/requirements-trl.txt
echo "$wanted" >"$stamp"
echo "trl: done" >&2
