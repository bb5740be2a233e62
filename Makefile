# Two commands do all the set-up: `make train` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip would compile all modules, which takes as long as the rest; Python compiles those that it uses.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	--constraint constraints.txt

export OMP_NUM_THREADS ?= 1
# The tests start hundreds of processes: without bytecode on the disk each compiles raydl anew.
unexport PYTHONDONTWRITEBYTECODE

BENCHMARKS := efficiency time_to_accuracy mixed_speed exchange ladder thin_link recovery goodput \
	regroup startup growth accuracy streaming paper allreduces partitions chaos control
BENCH_OPTIONS ?=
# Short runs do not replace the results.
BENCH_OUT = $(if $(findstring quick,$(BENCH_OPTIONS)),,--out benchmarks/results)

.PHONY: train test test-fast test-cluster test-slow soak seeds fuzz mutants nightly test-gpu bench docs dist lint check clean help

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

docs: $(VENV)/installed-dev  ## the documentation as a site, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

dist: $(VENV)/installed-dev  ## wheel and source distribution, in dist
	$(BIN)/python -m build --no-isolation --outdir dist

lint: $(VENV)/installed-dev  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(VENV)/installed-dev  ## format, lint and types, without writing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# A test on a cluster has some ten processes, which wait for each other and for time-outs.
AT_ONCE ?= 3
# The files with such tests; to import the others takes each of those processes seconds.
ON_CLUSTERS = $(shell grep -rlE 'mark\.(cluster|processes)' tests --include='test_*.py')

# The files that have no fast tests.
NOT_FAST = $(shell grep -rlE '^pytestmark = .*mark\.(cluster|processes|slow|gpu)' tests --include='test_*.py')

# Half of the time of the fast tests is waiting: two processes per core keep the cores busy.
FAST_AT_ONCE ?= $(shell $(PYTHON) -c "import os; print(2 * (os.cpu_count() or 1))")

test: $(VENV)/installed-dev  ## check, and run all but the slow tests
	@$(MAKE) --no-print-directory --jobs 2 check test-fast
	@$(MAKE) --no-print-directory test-cluster

test-fast: $(VENV)/installed-dev  ## the tests that start no Ray and no other program, in parallel
	$(BIN)/pytest -m 'not cluster and not processes and not slow and not gpu' \
		$(NOT_FAST:%=--ignore=%) --numprocesses $(FAST_AT_ONCE) --dist worksteal

test-cluster: $(VENV)/installed-dev  ## the tests that start Ray or other programs, a few at once
	$(BIN)/pytest -m '(cluster or processes) and not slow and not gpu' $(ON_CLUSTERS) \
		--numprocesses $(AT_ONCE) --dist loadscope --no-loadscope-reorder

test-slow: $(VENV)/installed-dev  ## the tests that take minutes
	$(BIN)/pytest -m slow --ignore=tests/whole_runs/test_soak.py

soak: $(VENV)/installed-dev  ## minutes of kills, halts and new nodes at random
	$(BIN)/pytest -m slow -s tests/whole_runs/test_soak.py

seeds: $(VENV)/installed-dev  ## simulate 12,000 runs with random faults, some minutes
	$(BIN)/python tests/seeds.py

fuzz: $(VENV)/installed-dev  ## read thousands of damaged data sets of every format, some minutes
	$(BIN)/python tests/fuzz.py

$(VENV)/installed-mutants: $(VENV)/installed-dev
	$(PIP) --editable '.[mutants]'
	@touch $@

mutants: $(VENV)/installed-mutants  ## change the core line by line, see whether tests or types notice; hours
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mutmut run > mutants.log 2>&1 || tail -n 30 mutants.log
	$(BIN)/python tests/mutants.py

nightly: $(VENV)/installed-dev  ## what takes longer than make test, hours; writes docs/nightly.md
	$(BIN)/python tests/nightly.py $(PARTS)

test-gpu: $(VENV)/installed-dev  ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) --editable '.[bench]'
	@touch $@

bench: $(VENV)/installed-bench  ## all benchmarks, hours; BENCH_OPTIONS=--quick for a look
	@failed=; for name in $(BENCHMARKS); do \
		$(BIN)/python -m benchmarks.$$name $(BENCH_OUT) $(BENCH_OPTIONS) || \
		failed="$$failed $$name"; \
	done; $(if $(findstring quick,$(BENCH_OPTIONS)),,\
	$(BIN)/python -m benchmarks.page || failed="$$failed page";) \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
