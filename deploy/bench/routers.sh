#!/usr/bin/env bash
# An environment of its own for the routers of make bench-gateway: deploy/bench/routers.sh [VENV]. About 220 MB, once.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv-routers}
stamp="$venv/.ready"
wanted=$(cat deploy/bench/routers.sh deploy/bench/requirements-routers.txt | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0

echo "routers: creating $venv and installing deploy/bench/requirements-routers.txt" >&2
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check -q install -r deploy/bench/requirements-routers.txt \
  2> >(grep -v '^WARNING: Location' >&2)
for module in sglang_router.launch_router vllm_router.launch_router; do
  "$venv/bin/python" -m "$module" --help >/dev/null
done
echo "$wanted" >"$stamp"
echo "routers: done" >&2
