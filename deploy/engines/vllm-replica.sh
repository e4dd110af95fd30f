#!/usr/bin/env bash
# A vLLM server on the CPU as a replica of a run whose fleet.engines is 0: deploy/engines/vllm-replica.sh RUN MODEL [DTYPE]. DTYPE is the run's fleet.weight_dtype.
# It finds the local stack as `reflux` does (REFLUX_STATE_DIR), and both processes end with this one.
set -euo pipefail
cd "$(dirname "$0")/../.."
run=$1 model=$(realpath "$2") dtype=${3:-float32}
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
bash deploy/engines/vllm.sh .venv-vllm
stack="${REFLUX_STATE_DIR:-.reflux}/stack.json"
address() { python -c 'import json, sys; print(json.load(open(sys.argv[1]))["grpc"][sys.argv[2]])' "$stack" "$1"; }
REFLUX_BROKER_ADDRESS=$(address weight-broker) REFLUX_GATEWAY_ADDRESS=$(address inference-gateway)
export REFLUX_BROKER_ADDRESS REFLUX_GATEWAY_ADDRESS
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

VLLM_SERVER_DEV_MODE=1 VLLM_HOST_IP=127.0.0.1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=${CORE:-0} \
  .venv-vllm/bin/python -m vllm.entrypoints.openai.api_server --enforce-eager --model "$model" --served-model-name "$run" \
  --dtype "$dtype" --host 127.0.0.1 --port "$port" --max-model-len 2048 --max-num-seqs 32 \
  --weight-transfer-config '{"backend": "reflux"}' --worker-extension-cls reflux_vllm_plugin.worker.RefluxWorker &
REFLUX_RUN=$run REFLUX_ENGINE_ADAPTER_ENGINE_URL=http://127.0.0.1:$port REFLUX_ENGINE_ADAPTER_MODEL=$model \
  REFLUX_ENGINE_ADAPTER_MODEL_ID=$run REFLUX_ENGINE_ADAPTER_WEIGHT_DTYPE=$dtype reflux-engine-adapter &
wait -n
