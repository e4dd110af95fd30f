#!/usr/bin/env bash
# An environment of its own for SGLang on CPU: deploy/engines/sglang.sh VENV. A second call returns at once.
# The versions are pinned with everything that is used, so that pip resolves nothing: SGLang's own metadata asks for CUDA kernels
# (sglang-kernel, flashinfer) and another torch. deploy/engines/sglang-stubs stands in for the two packages that it imports anyway.
# torch has to be a CPU build: where the package index offers another, name one that has it by PIP_EXTRA_INDEX_URL.
set -euo pipefail
venv=$1
here=$(dirname "$0")
stamp="$venv/.ready"
wanted=$(cat "$0" "$here/requirements-sglang.txt" | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0
echo "engines: installing SGLang into $venv (3.3 GB, some minutes, once)" >&2
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check -q install --no-deps -r "$here/requirements-sglang.txt" 2> >(grep -v '^WARNING: Location' >&2)
echo "$wanted" >"$stamp"
