# The same words everywhere: README.md lists them.
SHELL := bash
VENV := .venv
PY := $(VENV)/bin/python
STUBS := libs/protos/src
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1

.PHONY: setup demo demo-seeds demo-smollm2 test test-k8s soak test-engines test-tinker bench-scheduler bench-weights bench-gateway bench-rl bench-sandbox load-gateway check protos format clean

setup:
	@bash deploy/setup.sh $(VENV)

demo: setup
	@reflux demo

demo-seeds: setup
	@reflux demo-seeds --write-readme

# A real language model: half an hour on two idle cores. Ctrl-C stops it, the same command goes on (docs/real-llm.md).
demo-smollm2: setup
	@bash deploy/engines/model.sh $(ENGINE_MODEL)
	@reflux demo --file examples/xrd-phase-id/smollm2.toml --state .reflux/smollm2 --go-on

test: setup
	@$(PY) -m pytest

# Needs REFLUX_KUBE_API; deploy/kubernetes/real_api.sh builds and starts a server.
test-k8s: setup
	@$(PY) -m pytest services/scheduler/tests/test_kubernetes_real_api.py

# Real vLLM and SGLang servers on CPU, in environments of their own (7 GB, made once); ENGINES="vllm" asks only some.
ENGINES ?= vllm sglang sglang-distributed
ENGINE_MODEL := .reflux/engines/smollm2-135m
test-engines: setup
	@bash deploy/engines/vllm.sh .venv-vllm
	@case "$(ENGINES)" in *sglang*) bash deploy/engines/sglang.sh .venv-sglang ;; esac
	@bash deploy/engines/model.sh $(ENGINE_MODEL)
	@REFLUX_TEST_ENGINES=$(ENGINE_MODEL) REFLUX_TEST_ENGINES_ONLY="$(ENGINES)" $(PY) -m pytest tests/engines --timeout 900

# The supervised and RL loops of tinker-cookbook against the whole stack, in an environment of their own (made once).
test-tinker: setup
	@bash deploy/tinker.sh .venv-tinker
	@$(PY) -m pytest -m "slow or not slow" tests/e2e/test_tinker.py tests/e2e/test_tinker_cookbook.py

soak: setup
	@$(PY) -m pytest -m "slow or not slow"

# The last line is one JSON object with the figures; QUESTIONS="place golden" asks only these.
bench-scheduler: setup
	@$(PY) benchmarks/harness.py scheduler $(QUESTIONS)

# Rivals that are not installed are left out: deploy/bench/peers.sh installs them.
bench-weights: setup
	@$(PY) benchmarks/harness.py weights $(QUESTIONS)

# Routers that are not installed are left out: deploy/bench/routers.sh installs them.
bench-gateway: setup
	@$(PY) benchmarks/harness.py gateway $(QUESTIONS)

bench-rl: setup
	@$(PY) benchmarks/harness.py rl $(QUESTIONS)

# REFLUX_BENCH_FULL=1 makes the loop of executions that looks for leaks as long as its bar asks.
bench-sandbox: setup
	@$(PY) benchmarks/harness.py sandbox $(QUESTIONS)

# Open loop against any OpenAI endpoint, see deploy/load/README.md; a token comes from REFLUX_TOKEN.
URL ?= http://127.0.0.1:8003
RATE ?= 10
MIX ?= chat
DURATION ?= 30
load-gateway: setup
	@$(PY) deploy/load/load_gateway.py $(URL) --rate $(RATE) --mix $(MIX) --duration $(DURATION) $(ARGS)

check: setup
	@bash deploy/check.sh

protos:
	@bash deploy/protos.sh $(STUBS)

format: setup
	@ruff format . && ruff check --fix .

clean:
	rm -rf $(VENV) runs .reflux
