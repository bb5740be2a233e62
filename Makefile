# Two commands do all the set-up: `make train` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

export OMP_NUM_THREADS ?= 1

.PHONY: train test test-slow soak test-gpu lint check clean help

help:  ## list what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*##/\t/' | expand -t 12

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev]'
	@touch $@

train: $(VENV)/installed  ## train LeNet on the bundled digits with 2 workers
	$(BIN)/raydl train --data digits --model lenet --method sync-easgd --workers 2 --epochs 60
	@echo '  both need:    . $(BIN)/activate    (once in this shell)'

lint: $(VENV)/installed-dev  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(VENV)/installed-dev  ## format, lint and types, without writing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check  ## check, and run all but the slow tests
	$(BIN)/pytest

test-slow: $(VENV)/installed-dev  ## the tests that take minutes
	$(BIN)/pytest -m slow --ignore=tests/test_soak.py

soak: $(VENV)/installed-dev  ## minutes of kills, halts and new nodes at random
	$(BIN)/pytest -m slow -s tests/test_soak.py

test-gpu: $(VENV)/installed-dev  ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
