# `make demo` and `make test` do everything on a fresh machine, set-up included. PYTHON=python3.12 chooses another interpreter.
# `make test TORCH=2.15.0` runs the tests on another torch, in an environment of its own.

PYTHON ?= python3
TORCH  ?=
VENV   := .venv$(addprefix -,$(TORCH))
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off $(if $(TORCH),torch==$(TORCH),-c constraints.txt)

# One thread a process: two test workers with two threads each would fight over two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test install lint types layers unit cover format bench clean

help: ## Show what can be made.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Some virtual machines advertise AMX and trap its instructions, which ends torch's bfloat16 kernels on a CPU.
demo: export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
demo: $(VENV)/.demo ## Train on handwritten digits in float32 and mixed precision, and compare.
	$(BIN)/python examples/digits.py

# Types are checked against the torch of constraints.txt: annotations differ from version to version.
test: $(if $(TORCH),unit,lint types layers unit) ## Install and check everything: lint, types, layers, tests.

install: $(VENV)/.dev ## Make the environment that development needs.

lint: $(VENV)/.dev ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## Check the types of src.
	$(BIN)/mypy

layers: $(VENV)/.dev ## Check that imports point down only.
	$(BIN)/lint-imports --no-logo

unit: $(VENV)/.dev ## Run the tests on two processes.
	$(PYTEST) -n 2

cover: $(VENV)/.dev ## The same with coverage, which takes half as long again.
	$(PYTEST) -n 2 --cov=mezzo --cov-report=term

format: $(VENV)/.dev ## Format, and fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## Run every benchmark, and write the README's tables anew.
	$(BIN)/python benchmarks/autocast.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/optim.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/tables.py

clean: ## Remove the environments and everything that tools leave behind.
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* htmlcov build dist
	find src tests examples -name __pycache__ -prune -exec rm -rf {} +

# The stamps make a second run instant. They are written last: an interrupted install starts again.
$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "mezzo needs Python 3.11 or newer. Choose one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "This Python has no venv. Install it (on Debian: apt install python3-venv), or choose another: make PYTHON=... $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[$*]'
	touch $@
