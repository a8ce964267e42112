# Every target sets up what it needs in $(VENV) first; a second call finds it there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The models here are small: more threads make them slower, much slower on a busy machine.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export PYTHONUNBUFFERED := 1

.PHONY: help demo test test-all lint bench bench-alerts check-gpu clean
.DELETE_ON_ERROR:

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## train two small models and see why their attention entropy fell (about a minute)
	$(BIN)/entropy-monitor demo

test: $(READY) ## the test suite
	$(BIN)/python -m pytest -q

test-all: $(READY) ## the test suite with the slow tests
	$(BIN)/python -m pytest -q -m ''

lint: $(READY) ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY) ## what monitoring costs on this machine (a few minutes; keep the machine quiet)
	$(BIN)/python tests/benchmarks/bench_statistics.py
	$(BIN)/python tests/benchmarks/bench_training.py
	$(BIN)/python tests/benchmarks/bench_training.py --bf16

bench-alerts: $(READY) ## train every kind of collapse and score the alerts (long)
	$(BIN)/python -m tests.benchmarks.collapse

check-gpu: $(READY) ## what only a GPU can show; without one it says so
	$(BIN)/python tests/gpu/check.py

clean: ## remove the environment and everything built in it
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
