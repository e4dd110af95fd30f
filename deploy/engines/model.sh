#!/usr/bin/env bash
# SmolLM2-135M-Instruct in bfloat16 for the engine tests: deploy/engines/model.sh VENV FOLDER. VENV is that of vllm.sh.
set -euo pipefail
[ -f "$2/model.safetensors" ] && exit 0
mkdir -p "$(dirname "$2")"
rm -rf "$2.part"
OMP_NUM_THREADS=1 "$1/bin/python" tests/engines/smollm2.py "$2"
