# Two commands matter: `make demo` runs the main job on this machine, `make test` checks everything.
# A virtual environment elsewhere, or another Python: make VENV=/path PYTHON=/path/to/python3.12 ...
VENV ?= .venv
export MLMSUB_TEST_CACHE ?= /var/tmp/mlmsub-tests
export PYTHONDONTWRITEBYTECODE = 1
BIN = $(VENV)/bin

.PHONY: help demo test unit lint clean

help:
	@sed -n 's/^\([a-z]*\):.*## /  make \1   /p' Makefile

demo: $(VENV)/ready ## quantize and export a real small model through Slurm (or as processes) on this machine
	@PATH="$(abspath $(BIN)):$$PATH" tests/demo.sh

test: lint ## lint, types, shellcheck, and all tests that this machine can run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --no-loadscope-reorder tests

unit: $(VENV)/ready ## the tests that need a second
	$(BIN)/python -m pytest tests/unit

lint: $(VENV)/ready ## ruff, mypy, shellcheck
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy --cache-dir=$(MLMSUB_TEST_CACHE)/mypy
	git ls-files '*.sh' 'slurm/local/*' 'tests/cluster/sandbox/*.sh' | sort -u | xargs shellcheck

$(VENV)/ready: pyproject.toml tests/bootstrap.sh
	tests/bootstrap.sh $(VENV)

clean: ## remove the virtual environment and the tests' cache
	rm -rf $(VENV) $(MLMSUB_TEST_CACHE)
