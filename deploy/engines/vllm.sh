#!/usr/bin/env bash
# An environment of its own for vLLM on CPU with our plug-in: deploy/engines/vllm.sh VENV. A second call returns at once.
# The versions are pinned with everything that they need, so that pip resolves nothing. Not among them: torchvision, torchaudio and
# torchcodec, which do not load beside the CPU build of torch (text models work without), and what only our services need (gRPC aside).
# torch has to be a CPU build: where the package index offers another, name one that has it by PIP_EXTRA_INDEX_URL.
set -euo pipefail
venv=$1
here=$(dirname "$0")
stamp="$venv/.ready"
wanted=$(cat "$0" "$here/requirements-vllm.txt" libs/{transfer,weightplan,vllm-plugin}/pyproject.toml | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0
echo "engines: installing vLLM into $venv (3.5 GB, some minutes, once)" >&2
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@" 2> >(grep -v '^WARNING: Location' >&2); }
pip install --no-deps -r "$here/requirements-vllm.txt"
pip install --no-deps --no-build-isolation -e libs/weightplan -e libs/transfer -e libs/vllm-plugin
echo "$wanted" >"$stamp"
