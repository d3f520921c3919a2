# Needs only Python >= 3.11, make and a compiler. Everything is installed into .venv; pip's own settings (index, proxy) apply.
# Choose an interpreter with `make test PYTHON=python3.12`.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-all lint types format clean

help:
	@echo 'make demo      profile this machine, search a plan for a GPT, simulate it, run it, compare'
	@echo 'make test      lint, types, doctests and the tests a change needs'
	@echo 'make test-all  the same with the slow tests'
	@echo 'make format    format the code and apply safe lint fixes'
	@echo 'make clean     remove caches, build outputs and .venv'

$(STAMP): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'simpart needs Python >= 3.11; none found: name one with PYTHON=...' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev,data]'
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m simpart.demo

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy simpart tests

test: lint types
	$(PYTEST) -m 'not slow'

test-all: lint types
	$(PYTEST)

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
