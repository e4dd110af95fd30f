# The same words everywhere: README.md lists them.
SHELL := bash
VENV := .venv
PY := $(VENV)/bin/python
STUBS := libs/protos/src
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1

.PHONY: setup demo demo-seeds test test-k8s soak bench-scheduler check protos format clean

setup:
	@bash deploy/setup.sh $(VENV)

demo: setup
	@reflux demo

demo-seeds: setup
	@reflux demo-seeds --write-readme

test: setup
	@$(PY) -m pytest

# Needs REFLUX_KUBE_API; deploy/kubernetes/real_api.sh builds and starts a server.
test-k8s: setup
	@$(PY) -m pytest services/scheduler/tests/test_kubernetes_real_api.py

soak: setup
	@$(PY) -m pytest -m "slow or not slow"

# The last line is one JSON object with the figures; QUESTIONS="place golden" asks only these.
bench-scheduler: setup
	@$(PY) benchmarks/scheduler/run.py $(QUESTIONS)

check: setup
	@bash deploy/check.sh

protos:
	@bash deploy/protos.sh $(STUBS)

format: setup
	@ruff format . && ruff check --fix .

clean:
	rm -rf $(VENV) runs .reflux
