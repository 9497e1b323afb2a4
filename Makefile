# Prism: the targets a newcomer needs. `make demo` and `make test` set everything up by themselves.
#
#   PRISM_TORCH   the requirement(s) handed to pip for torch, e.g. "torch==2.13.0" or the path of a wheel
#   PYTHON        the interpreter for the virtual environment (3.11 or newer); found when not given
#   ARGS          extra arguments of `make demo` (examples/demo.py) and `make test` (pytest)

PRISM_TORCH ?= torch==2.13.0
ARGS ?=

# Frameworks that only the tests of their adapters need. They bring no torch with them; without them those tests are skipped.
# megatron-core says that it wants Python 3.12, and works with 3.11.
FRAMEWORKS ?= megatron-core==0.17.1 deepspeed==0.19.8 einops hjson msgpack ninja py-cpuinfo

VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
# One stamp for each torch requirement: asking for another torch sets up again. The demo needs no test tools.
STAMP := $(VENV)/.prism-$(shell printf '%s' '$(PRISM_TORCH)' | tr -c 'A-Za-z0-9.' '-')
TEST_STAMP := $(STAMP)-test

# Jobs and tests start thousands of processes: where bytecode is not kept, each compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test ray fuzz lint docs clean

help:
	@echo 'make demo    observe, record, calibrate, emulate and compare a small GPT (set-up included)'
	@echo 'make test    run every test (set-up included)'
	@echo 'make ray     install Ray and run the tests that need it'
	@echo 'make fuzz    run the property tests with new examples'
	@echo 'make setup   create $(VENV) with torch, Prism and its test tools'
	@echo 'make lint    ruff, mypy and the import contracts'
	@echo 'make docs    build the documentation site into build/docs'
	@echo 'make clean   remove $(VENV), caches and what the demo wrote'

setup: $(TEST_STAMP)

# The first interpreter of 3.11 or newer that can make a virtual environment. 3.11 comes first: torch has wheels for it
# the longest. A name on PATH may be a stub that cannot run, so each one is tried.
FIND_PYTHON = for candidate in "$(PYTHON)" python3.11 python3.12 python3.13 python3 python; do \
	[ -n "$$candidate" ] || continue; \
	if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "$$candidate"; exit 0; \
	fi; \
	done

$(STAMP): pyproject.toml
	@set -eu; \
	if ! $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
		python=$$($(FIND_PYTHON)); \
		if [ -z "$$python" ]; then \
			echo 'error: no Python 3.11 or newer with the venv and ensurepip modules was found.' >&2; \
			echo '       Install one (Debian: python3.11-venv) or name it: make PYTHON=/path/to/python setup' >&2; \
			exit 1; \
		fi; \
		echo "==> creating $(VENV) with $$("$$python" --version)"; \
		rm -rf $(VENV); \
		"$$python" -m venv $(VENV); \
	fi
	@echo '==> installing $(PRISM_TORCH)'
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PRISM_TORCH)
	@echo '==> installing Prism'
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet -e .
	@$(BIN)/python -c 'import torch, prismtrace, prism_sdk; print("==> ready: torch", torch.__version__)'
	@rm -f $(VENV)/.prism-*
	@touch $@

# One call, and one environment to build them all in. Most modules of the test tools are never imported: those that are
# get compiled then.
$(TEST_STAMP): $(STAMP) $(PLUGINS:%=%/pyproject.toml) nccl_profiler/pyproject.toml $(wildcard nccl_profiler/src/*)
	@echo '==> installing test tools and the plugins of this repository'
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet 'hatchling>=1.26' editables
	@set -- -e '.[test]' $(patsubst %,-e '%[test]',$(PLUGINS)); \
	if command -v "$${CC:-cc}" >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || command -v clang >/dev/null 2>&1; \
	then \
		set -- "$$@" -e './nccl_profiler[test]'; \
	else \
		echo '==> no C compiler: the NCCL profiler is left out, and its tests are skipped'; \
	fi; \
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-compile "$$@"
	@echo '==> installing frameworks for the tests of their adapters'
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet setuptools wheel pydantic tqdm psutil packaging \
		&& $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation \
			--ignore-requires-python $(FRAMEWORKS) \
		|| echo 'note: they could not be installed; tests that need them are skipped'
	@echo '==> ready; to have prism on the path: . $(VENV)/bin/activate'
	@touch $@

demo: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/demo.py $(ARGS)

test: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 $(ARGS)

# Recordings, calibrations and sweeps on a Ray cluster of several raylets; Ray is 75 MB, and `make test` does without it.
ray: setup
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[ray]'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/runtime/test_engines.py $(ARGS)

fuzz: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 --hypothesis-profile=default $(ARGS) \
		$$(grep -rl '^from hypothesis' tests plugins nccl_profiler --include='test_*.py')

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html --conf-dir docs . build/docs
	@echo 'open build/docs/index.html'

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist demo-output
	rm -f nccl_profiler/python/*/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
