# The same words everywhere: README.md lists them.
SHELL := bash
VENV := .venv
PY := $(VENV)/bin/python
STUBS := libs/protos/src
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1

.PHONY: setup demo demo-seeds test soak check protos format clean

setup:
	@bash deploy/setup.sh $(VENV)

demo: setup
	@reflux demo

demo-seeds: setup
	@reflux demo-seeds --write-readme

test: setup
	@$(PY) -m pytest

soak: setup
	@$(PY) -m pytest -m "slow or not slow"

check: setup
	@bash deploy/check.sh

protos:
	@bash deploy/protos.sh $(STUBS)

format: setup
	@ruff format . && ruff check --fix .

clean:
	rm -rf $(VENV) runs .reflux
