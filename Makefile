# Each target sets up what it needs; a second run reuses it.
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench

.DEFAULT_GOAL := help
.PHONY: help demo test bench clean

help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(VENV)/installed  ## Train PPO on CartPole from the command line
	$(VENV)/bin/lit-collect fit --config configs/ppo_cartpole.yaml

test: $(VENV)/installed  ## Lint, check formatting and types, run the tests
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest

bench: $(BENCH_VENV)/installed  ## Compare with hand-written loops and other libraries (minutes)
	$(BENCH_VENV)/bin/python tests/benchmarks/run.py
	$(BENCH_VENV)/bin/python tests/benchmarks/lowering.py
	$(BENCH_VENV)/bin/python tests/benchmarks/vector_sources.py
	$(BENCH_VENV)/bin/python tests/benchmarks/callbacks.py
	$(BENCH_VENV)/bin/python tests/benchmarks/replay.py
	$(BENCH_VENV)/bin/python tests/benchmarks/assembling.py

clean:  ## Remove environments, caches and logs
	rm -rf $(VENV) $(BENCH_VENV) build *.egg-info lightning_logs .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	echo "lit_collect needs Python 3.10 or newer, got $$($(PYTHON) --version 2>&1); choose one with: make PYTHON=python3.12"; \
	exit 1; }
$(PYTHON) -m venv --clear $(@D)
endef

$(VENV)/installed: pyproject.toml constraints.txt
	$(make_venv)
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[dev]"
	@touch $@

$(BENCH_VENV)/installed: pyproject.toml tests/benchmarks/constraints.txt
	$(make_venv)
	$(BENCH_VENV)/bin/python -m pip install -c tests/benchmarks/constraints.txt -e ".[all,atari]" torchrl stable-baselines3
	@touch $@
