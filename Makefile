# `make demo` and `make test` do everything on a fresh machine, including the installation.
# PYTHON=python3.12 chooses another interpreter. `make test TORCH=2.15.0` runs the tests on another
# version of torch, in an environment of its own.

PYTHON ?= python3
TORCH  ?=
VENV   := .venv$(addprefix -,$(TORCH))
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off \
          $(if $(TORCH),torch==$(TORCH),-c constraints.txt)

# One thread per process: two test workers with two threads each would compete for two cores.
# Bytecode is written even where the shell turns it off: without it every run and every process that
# a test starts compiles mezzo and the tests anew, which takes half of the collection.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2

# Types are checked against the torch of constraints.txt: annotations differ between versions.
CHECKS := $(if $(TORCH),,lint types layers docs)

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-all install lint types layers docs unit cover slow format bench
.PHONY: package clean

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Some virtual machines advertise AMX but trap its instructions, which ends torch's bfloat16 kernels
# on a CPU.
demo: export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
demo: $(VENV)/.demo ## Name and cure an overflow; compare all precisions on handwritten digits.
	$(BIN)/python examples/overflow.py
	$(BIN)/python -m mezzo.comparing.demo

quick: $(VENV)/.dev ## Run the fast tests: less than a minute on two cores.
	$(PYTEST) -m "not gpu and not slow"

test: $(CHECKS) unit ## Install and check everything, as CI does: lint, types, layers, site, tests.

test-all: export MEZZO_EXHAUSTIVE = 1
test-all: export MEZZO_FUZZ_FILES ?= 10000
test-all: export MEZZO_FUZZ_OPS ?= 20
test-all: $(CHECKS) unit ## The same with all cases of thinned tests, and more fuzzing.

install: $(VENV)/.dev ## Create the environment for development.

lint: $(VENV)/.dev ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## Check the types of src.
	$(BIN)/mypy

layers: $(VENV)/.dev ## Check the layers of the packages: imports go downwards, without cycles.
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/.dev ## Build the documentation site strictly into site/: dead links are errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

unit: $(VENV)/.dev ## Run the tests in two processes.
	$(PYTEST)

cover: $(VENV)/.dev ## Run the tests with coverage, which takes half as long again.
	$(PYTEST) --cov=mezzo --cov-report=term

slow: $(VENV)/.dev ## Run the tests, and write the slow ones, which quick leaves out, to tests/slow.txt.
	$(PYTEST) --record-slow

format: $(VENV)/.dev ## Format, and fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## Run all benchmarks, and write the tables of the README and docs.
	$(BIN)/python benchmarks/autocast.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/optim.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/models.py
	$(BIN)/python benchmarks/levels.py
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/numerics.py
	$(BIN)/python benchmarks/shapes.py
	$(BIN)/python benchmarks/tables.py
	$(BIN)/python benchmarks/compare_page.py

package: $(VENV)/.dev ## Build the wheel and the sdist into dist; the tests install them too.
	$(BIN)/python -m build --no-isolation

clean: ## Remove the environments, caches and build products.
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf .coverage .coverage.* htmlcov build dist site mezzo-demo.html
	find src tests examples docs -name __pycache__ -prune -exec rm -rf {} +

# The stamps make a second run instant. They are written last: an interrupted install starts again.
$(VENV)/.demo $(VENV)/.dev: $(VENV)/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "mezzo needs Python 3.11 or newer." \
	    "Choose one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "This Python has no venv. Install it (on Debian: apt install python3-venv)," \
	    "or choose another: make PYTHON=... $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[$*]'
	touch $@
