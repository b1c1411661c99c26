# The words people type. Each makes what it needs: nothing but git and Python 3.11 has to be there before.

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do command -v $$p >/dev/null 2>&1 && \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH := $(shell sed -n 's/^torch==/torch==/p' requirements/cpu.lock)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Shared with another environment, what DeepSpeed compiles would be built anew whenever the other one was used in between.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions

ifeq ($(GPU),yes)
ACCELERATE := recipes/accelerate/zero3.yaml
else
ACCELERATE := recipes/accelerate/cpu_zero3.yaml
demo soak: export DS_ACCELERATOR = cpu
demo soak: export OMP_NUM_THREADS = 1
demo soak: export TORCH_CPP_LOG_LEVEL = ERROR
endif

.PHONY: help setup demo test test-ranks test-long test-faults soak bench lint format types clean
.DEFAULT_GOAL := help

help: ## what can be typed
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(STAMP) ## .venv with everything (once: a stamp remembers)

$(STAMP): requirements/cpu.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found. Set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "$(if $(GPU),An NVIDIA GPU was found: installing grpo-ext with its extras.,No NVIDIA GPU was found: installing the CPU set of requirements/cpu.lock.)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(GPU),yes)
	$(BIN)/pip install -q -e '.[vllm,deepspeed,peft,report,reasoning-gym,dev]'
else
	$(BIN)/pip install -q --no-deps '$(TORCH)' || $(BIN)/pip install -q --no-deps --index-url $(TORCH_CPU_INDEX) '$(TORCH)'
	grep -v '^torch==' requirements/cpu.lock > $(VENV)/rest.lock
	$(BIN)/pip install -q --no-deps -r $(VENV)/rest.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
endif
	@touch $(STAMP)

demo: $(STAMP) ## train a tiny model on sums until it can add (about two minutes on two cores)
	$(BIN)/accelerate launch --config_file $(ACCELERATE) recipes/grpo_arithmetic.py --config recipes/grpo_arithmetic.yaml

test: $(STAMP) ## the test suite on one rank: real engine, no hub (about twelve minutes on two cores)
	$(BIN)/python -m pytest -m "not slow and not distributed"

test-ranks: $(STAMP) ## the tests on two ranks, under ZeRO-3 and DDP (about ten minutes)
	$(BIN)/python -m pytest -m "distributed and not slow"

test-long: $(STAMP) ## all of these, and those that take longer
	$(BIN)/python -m pytest

test-faults: $(STAMP) ## faults on purpose: 25 kills at random points, dying ranks, full disks
	$(BIN)/python -m pytest tests/faults

soak: $(STAMP) ## 500 steps of the demo, watched for leaks
	$(BIN)/accelerate launch --config_file $(ACCELERATE) benchmarks/soak.py

bench: $(STAMP) ## the benchmarks, one after the other
	$(BIN)/python benchmarks/weight_sync.py
	$(BIN)/python benchmarks/train_side.py
	$(BIN)/python benchmarks/report.py

lint: $(STAMP) ## ruff, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## ruff, changing what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy
	$(BIN)/mypy

clean: ## take away what runs left behind, and .venv
	rm -rf $(VENV) outputs dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
