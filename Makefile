# Every target sets itself up: a fresh clone and `make demo` or `make test` are enough.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV ?= .venv
PYTHON3 ?= python3
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# The interpreter that has a CUDA build of torch; the virtual environment above is made for a CPU.
GPU_PYTHON ?= python3
export HF_HUB_OFFLINE ?= 1

.PHONY: help setup demo serve test test-slow lint format typecheck proto proto-check bench bench-gpu soak clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## make the virtual environment (.venv) with everything for running and testing on a CPU

$(STAMP): pyproject.toml constraints.txt
	@echo ">> setup: Python packages into $(VENV) (about 2 GB; a few minutes the first time)"
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Cohort needs Python 3.11 or newer; set PYTHON3=/path/to/python3.11")'
	@$(PYTHON3) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[server,dev]'
	@touch $@

demo: $(STAMP) ## start a router and two shards on the committed demo model and stream three prompts at once
	@echo ">> demo: a router and two tensor-parallel shards on this machine, three prompts at once"
	@$(PY) -m demo.run

serve: $(STAMP) ## serve a model: make serve MODEL=demo/cohere ARGS='--tensor-parallel-size 2'
	$(PY) -m router serve --model $(or $(MODEL),demo/cohere) $(ARGS)

test: $(STAMP) ## the quick tests (under 12 minutes on two cores)
	@echo ">> test: quick tests"
	$(PY) -m pytest -q $(ARGS)

test-slow: $(STAMP) ## the long tests: start and stop loops, every demo fact on every path, long property runs
	@echo ">> test-slow: long tests"
	$(PY) -m pytest -q -m 'slow and not gpu' $(ARGS)

lint: $(STAMP) ## ruff and buf
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/buf lint proto

format: $(STAMP) ## let ruff format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: $(STAMP) ## mypy, strict
	$(PY) -m mypy

proto: $(STAMP) ## regenerate the committed stubs
	PYTHON=$(PY) proto/generate.sh

proto-check: $(STAMP) ## check that the committed stubs equal regenerated ones
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && PYTHON=$(abspath $(PY)) proto/generate.sh "$$out" && \
	  for f in $$(cd "$$out" && find . -type f); do \
	    cmp "$$out/$$f" "proto/$$f" || { echo "stubs are stale: run 'make proto' and commit the result"; exit 1; }; \
	  done && echo "stubs are up to date"

bench: $(STAMP) ## compare with transformers on this CPU, and a cached prompt with a new one; tables in bench/results/
	$(PY) -m bench.cpu $(ARGS)
	$(PY) -m bench.prefix $(if $(findstring --quick,$(ARGS)),--quick)

soak: $(STAMP) ## callers of every kind while shards are killed, for 30 minutes: make soak ARGS='--minutes 5'
	$(PY) -m bench.chaos $(ARGS)

bench-gpu: ## on a GPU machine: make bench-gpu GEOMETRY=aya-8b TP=1; tables in bench/results/
	PYTHONPATH=proto:. $(GPU_PYTHON) -m bench.gpu --geometry $(or $(GEOMETRY),aya-8b) --tensor-parallel-size $(or $(TP),1) $(ARGS)

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis proto/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
