# Every target sets up what it needs; a bare clone, Python 3.11+ and a C compiler are enough.

SHELL := bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

# 3.11 first: the CPU build of torch that some machines carry is for that version.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
BIN := .venv/bin
PYTEST := $(BIN)/pytest
PIP := $(BIN)/python -m pip --disable-pip-version-check
WORKERS ?= 2
SPREAD := $(if $(filter-out 0 1,$(WORKERS)),-n $(WORKERS) --dist worksteal)
ARGS ?=
BUNDLE ?= dist/bundle
ATTNCC := PYTHONPATH=".pkg:$$PYTHONPATH" $(BIN)/python -m attncc.runtime.cli

# The oldest Triton that is supported; its tiers put this folder in front of site-packages.
TRITON_OLD := 3.6.0
WITH_OLD := PYTHONPATH="$(CURDIR)/.triton36"

# Bytecode of what is imported is kept for the many processes that follow. pip would compile all that
# it installs, which takes as long as the rest of a set-up.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test lint fix test-fast test-interpreter test-compile test-gpu bench docs bundle \
	hooks clean

help:
	@echo 'make setup    .venv and .triton36'
	@echo 'make demo     declare an op, see its kernel, compile it and run it; no GPU needed'
	@echo 'make test     lint, types and every test that needs no GPU'
	@echo 'make test-gpu the kernels on a GPU'
	@echo 'make bench    the benchmark table (ARGS="...")'
	@echo 'make docs     tables, pictures and printed blocks of docs/, derived anew'
	@echo 'make bundle   compile kernels for sm_90 into BUNDLE=dist/bundle; no GPU needed'
	@echo 'make lint     ruff and mypy; make fix applies what ruff can'
	@echo 'make hooks    install the pre-commit hooks'
	@echo 'make clean    remove caches and build output'

setup: .venv/.stamp .venv/.dialects .triton36/.stamp

.venv/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'attncc needs Python 3.11 or newer with venv' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet --no-compile -c constraints.txt -e '.[dev,cli]'
	@touch $@

# What only tests need. cuDNN's frontend builds and checks graphs without a GPU; what it depends on only
# runs them. Where it has no wheel, tests/runtime/test_cudnn_graph.py is left out.
.venv/.dialects: .venv/.stamp
	$(PIP) install --quiet --no-compile -c constraints.txt -e '.[cutedsl]'
	-$(PIP) install --quiet --no-compile --no-deps -c constraints.txt nvidia-cudnn-frontend
	@touch $@

# Moved into place when complete, so that an interrupted install is not taken for a good one.
.triton36/.stamp: Makefile | .venv/.stamp
	test -d .triton36/triton-$(TRITON_OLD).dist-info || { \
	rm -rf .triton36 .triton36.partial \
	&& $(PIP) install --quiet --no-compile --no-deps --target .triton36.partial triton==$(TRITON_OLD) \
	&& mv .triton36.partial .triton36; }
	@touch $@

demo: .venv/.stamp
	$(BIN)/python examples/demo.py

test: lint test-fast test-interpreter test-compile

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fix: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A worker has one core: torch's and BLAS' threads would only wait for each other.
test-fast test-interpreter test-compile: export OMP_NUM_THREADS := 1

# Each tier is a process of its own: TRITON_INTERPRET is read once, when triton is imported.
test-fast: setup
	$(PYTEST) $(SPREAD) tests --ignore=tests/interpreter --ignore=tests/compile --ignore=tests/gpu

test-interpreter: setup
	TRITON_INTERPRET=1 $(PYTEST) $(SPREAD) tests/interpreter
	$(WITH_OLD) TRITON_INTERPRET=1 $(PYTEST) $(SPREAD) -m 'not played' tests/interpreter

test-compile: setup
	$(PYTEST) $(SPREAD) tests/compile
	$(WITH_OLD) $(PYTEST) $(SPREAD) -m 'not cutedsl' tests/compile

test-gpu: setup
	$(PYTEST) tests/gpu $(ARGS)

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

docs: setup
	PYTHONPATH=".pkg:$$PYTHONPATH" $(BIN)/python docs/generate.py --write

# Kernels for a GPU that is elsewhere; tests/gpu/test_bundle.py runs them there.
bundle: setup
	$(ATTNCC) build attention --target sm_90 --dtype bf16 --sizes D=128,E=128,G=4 \
	--form plain,cache,paged -o $(BUNDLE)
	$(ATTNCC) build gated_delta_rule --target sm_90 --dtype bf16,g=fp32,beta=fp32 \
	--sizes K=128,V=128,G=2 --form plain,pool -o $(BUNDLE)

hooks: setup
	$(BIN)/pre-commit install

clean:
	rm -rf build dist .pkg/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find dsl codegen runtime tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
