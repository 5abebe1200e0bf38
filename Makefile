# make diagnose   install the core into .venv and diagnose a bundled workload: verdict and report, in minutes
# make lab        the notebooks, in JupyterLab, on this machine only
# make install    everything into .venv, for the tests too, and nothing is run
# make test       what to run before and after a change
# make test-slow      the tests that take more than a few seconds
# make test-cluster   the tests that need processes of their own: minutes, most of them to start processes
# make test-browser   JupyterLab in a headless Chromium: notebooks, panels, interrupt, reload; needs the program chromium
# make check      all of these, plus style, types and the slow tests; the same as .ci/run
# make notebooks  run every notebook again and store its outputs
# make nightly    the tests that kill processes over and over, and make audit: ten minutes
# make audit      known vulnerabilities of the tested set; needs a network
# make docs       the documentation as a site, in build/site
# make gpu        the tests that need a CUDA device, and what lanes and watching cost on it; minutes
# make zoo        how often the workbench is right: planted faults and healthy trainings, 40 minutes on two idle cores
# make bench      what it costs, side by side with a bare loop and with other tools; BENCHMARKS=... for one file

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install diagnose lab docs zoo types test test-slow test-cluster test-browser check nightly audit notebooks bench gpu

VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
LAB := $(VENV)/.lab
STAMP := $(VENV)/.installed
WORKLOAD ?= digits_cnn
NOTEBOOKS = $(wildcard notebooks/*.ipynb)
BENCHMARKS = $(wildcard tests/benchmarks/bench_*.py)

# The first interpreter that runs and is new enough; `make PYTHON=... diagnose` chooses another one.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Small models gain nothing from a second thread, and one thread gives the same digits everywhere.
test test-slow test-cluster test-browser check nightly notebooks zoo: export OMP_NUM_THREADS := 1
test test-slow test-cluster test-browser check nightly notebooks zoo: export MKL_NUM_THREADS := 1
test test-slow test-cluster test-browser check nightly notebooks zoo: export WORKBENCH_LIVE := 0
test test-slow test-cluster test-browser check nightly notebooks: export PYDEVD_DISABLE_FILE_VALIDATION := 1
test notebooks: export WORKBENCH_RUNS := runs

help:
	@sed -n '/^# make/s/^# //p' Makefile

install: $(STAMP)

$(CORE): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Installing PyTorch and what else is needed into $(VENV), once: most of it is the download, some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(LAB): $(CORE)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lab]'
	@touch $@

$(STAMP): $(CORE)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

diagnose: $(CORE)
	$(BIN)/workbench diagnose $(WORKLOAD)

lab: $(LAB)
	$(BIN)/workbench lab

# One worker a core, and for the notebooks a worker a kernel; these on copies in an empty folder: a study that is there would be read instead of trained again.
test: $(STAMP)
	$(BIN)/python -m pytest -q -n logical --dist worksteal -m "not slow and not cluster and not browser and not gpu and not nightly"
ifneq ($(NOTEBOOKS),)
	@rm -rf build/notebooks && mkdir -p build/notebooks && cp $(NOTEBOOKS) notebooks/*.py build/notebooks
	$(BIN)/python -m pytest -q -n logical --dist loadfile -p tests.notebooks.shapes --nbval --nbval-current-env \
		--nbval-cell-timeout=120 --nbval-sanitize-with tests/notebooks/nbval_sanitize.cfg $(NOTEBOOKS:%=build/%)
endif

# A file stays with its worker: what its tests share, a Ray cluster among it, is made once.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -n logical --dist loadfile -m "slow and not cluster and not browser and not nightly" --durations=15

# Every warning, as of a link that leads nowhere, is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

types: $(STAMP)
	$(BIN)/mypy

# In processor seconds, of which two cores have 120 a minute: tests 1,090, notebooks 230, slow 670, types and docs 100, all on two cores;
# clusters 1,040 and browsers 130 in one process each, which waits for half of its time.
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) -j 2 --output-sync types docs
	$(MAKE) test
	$(MAKE) test-slow
	$(MAKE) test-cluster
	$(MAKE) test-browser

# What kills over and over: minutes a test.
nightly: $(STAMP)
	$(BIN)/python -m pytest -q -m nightly --durations=15
	$(MAKE) audit

# In an environment of its own, so that what it needs is no part of the tested set.
audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit
	build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

# Apart from the others: one Ray cluster is up from the first test to the last.
test-cluster: $(STAMP)
	$(BIN)/python -m pytest -q -m "cluster and not nightly" --durations=15

test-browser: $(STAMP)
	$(BIN)/python -m pytest -q tests/browser --durations=15

notebooks: $(STAMP)
	@rm -rf build/notebooks && mkdir -p build/notebooks && cp $(NOTEBOOKS) notebooks/*.py build/notebooks
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.timeout=600 $(NOTEBOOKS:%=build/%)
	$(BIN)/nbstripout --keep-output --keep-count --extra-keys \
		"metadata.widgets metadata.papermill cell.metadata.papermill cell.metadata.execution" $(NOTEBOOKS:%=build/%)
	$(BIN)/python -m tests.notebooks.pictures $(NOTEBOOKS:%=build/%)
	cp $(NOTEBOOKS:%=build/%) notebooks

gpu: $(STAMP)
	$(BIN)/python -m pytest -q tests/gpu
	$(BIN)/python tests/benchmarks/bench_watch.py 5 --device cuda
	$(BIN)/python tests/benchmarks/bench_lanes.py --device cuda --steps 300 --lanes 8 32 --without optuna ray

# All cores, one process a case; what is in build/zoo already is not diagnosed again.
zoo: $(STAMP)
	$(BIN)/python -m tests.zoo --write

bench: $(STAMP)
	@test -n "$(BENCHMARKS)" || { echo "no bench_*.py in tests/benchmarks" >&2; exit 1; }
	@for f in $(BENCHMARKS); do echo "== $$f"; $(BIN)/python $$f; done
