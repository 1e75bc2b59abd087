# make demo   the main job on this machine, whatever it has
# make test   all tests that need no GPU and little time
# make docs   the documentation site, into site/
# Each does its own set-up, once (tools/environments.py): in .venv, with torch for a CPU. Where there is a GPU, make demo
# and make test-gpu use .venv-gpu, on top of the torch that $(PYTHON) or python3 has, if that sees the GPU.
# Variables: PYTHON, INDEX (another package index), TORCH (what is installed for a GPU), TESTS, WORKERS.

PYTHON  ?= python3.11
TESTS   ?= tests
WORKERS ?= 2
export INDEX TORCH
# Byte code is written, whatever the caller's environment says: without it every process compiles torch from its
# sources, 3 seconds for each of the tests' many.
export PYTHONDONTWRITEBYTECODE :=

VENV    := .venv
# make test-triton TRITON=3.7.1: the Hopper kernels and the emulator under another Triton, in an environment of its own.
# vLLM 0.32 brings 3.7.1, SGLang 0.5.23 3.8.0; 3.6.0 is the oldest accepted.
TRITON  ?= 3.6.0
VENVT   := .venv-triton-$(TRITON)
VENVGPU := .venv-gpu
GPU     := $(shell nvidia-smi -L 2>/dev/null)
HERE    := $(if $(GPU),$(VENVGPU),$(VENV))
# make test-engines: real vLLM and SGLang on this CPU (3.5 GB; on two cores 4 to 14 minutes to install, 30 or more to run).
VENVE   := .venv-engines
BOTH    := pyproject.toml packages/softsm/pyproject.toml
# Neighbours stay together: a kernel that several tests launch is compiled and decoded in one worker.
PARALLEL := -n $(WORKERS) --dist worksteal
# One file needs no workers, which take seconds to start.
ONE_FILE := $(and $(filter 1,$(words $(TESTS))),$(filter %.py,$(firstword $(subst ::, ,$(TESTS)))))
PYTEST  := $(VENV)/bin/python -m pytest $(if $(ONE_FILE),,$(PARALLEL))
# Paths that must also pass under other Tritons: the emulator, the Hopper kernels and those for both architectures.
TRITON_TESTS := $(wildcard tests/softsm tests/triton tests/museum tests/rules tests/dsv4/kernels \
                  tests/dsv4/*/kernels/sm90 tests/dsv4/*/kernels/test_*.py)
# What ruff reads.
CODE    := src tests benchmarks examples tutorials docs tools

.PHONY: demo test test-compile test-slow test-gpu test-triton test-triton-suite test-field test-engines docs fuzz lint bench cubins setup \
        clean known-tests

demo: $(HERE)/.installed
	$(HERE)/bin/python -m dsv4 demo

test: known-tests setup
	$(PYTEST) -m "not slow and not compile and not gpu" $(TESTS)

# What make test leaves out for its six minutes: tests that take seconds, mostly to compile their kernels.
test-compile: known-tests setup
	$(PYTEST) -m "compile and not slow and not gpu" $(TESTS)

test-slow: known-tests setup
	$(PYTEST) -m "slow and not gpu" $(TESTS)

test-gpu: known-tests $(HERE)/.installed
	$(HERE)/bin/python -m pytest -m gpu $(TESTS)

known-tests:
	@for test in $(foreach test,$(TESTS),"$(firstword $(subst ::, ,$(test)))"); do \
	   test -e "$$test" || { echo "TESTS: there is no $$test"; exit 1; }; done

test-triton: $(VENVT)/.installed
	$(PYTEST:$(VENV)/%=$(VENVT)/%) -m "not slow and not gpu" $(TRITON_TESTS)

# Triton's own suites in softsm: TRITON_SOURCE is a checkout at the tag of the installed version, EACH how
# many tests of each function run (0: all), RECORD a file of results that is continued.
EACH ?= 0
test-triton-suite: setup
	@test -n "$(TRITON_SOURCE)" || { echo "TRITON_SOURCE: a checkout of Triton, e.g. git clone --depth 1 \
	   --branch v3.9.0 https://github.com/triton-lang/triton"; exit 1; }
	$(VENV)/bin/python tools/triton_suite.py "$(TRITON_SOURCE)" --each $(EACH) --workers $(WORKERS) \
	   $(if $(RECORD),--record "$(RECORD)")

# Published kernels in softsm: SOURCES is a folder with checkouts (docs/field.md), ONLY a part of their names.
test-field: setup
	@test -n "$(SOURCES)" || { echo "SOURCES: a folder with checkouts of the projects that docs/field.md lists"; exit 1; }
	$(VENV)/bin/python tools/field.py "$(SOURCES)" --only "$(ONLY)" $(if $(WRITE),--write)

test-engines: $(VENVE)/.installed
	DSV4_ENGINES=1 $(VENVE)/bin/python -m pytest tests/engines

# The documentation, into site/; a broken link or a missing reference fails.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --strict --site-dir site

# Mutated kernels under the checkers; make test runs 30 of them. FUZZ: seconds and seed.
FUZZ ?= --seconds 300 --seed 0
fuzz: setup
	$(VENV)/bin/python tests/softsm/fuzz/mutants.py $(FUZZ) --record tests/softsm/fuzz/record.json

lint: setup
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# The wheel dsv4-cubins, into dist/: CUBINS='--arch sm_90a -- --kind v4' for a part of it.
CUBINS ?=
cubins: setup
	$(VENV)/bin/python tools/cubins.py $(CUBINS)

bench: setup
	$(VENV)/bin/python benchmarks/cpu.py

setup: $(VENV)/.installed $(VENV)/triton-3.6.0/.installed

clean:
	rm -rf $(VENV) $(VENVE) .venv-triton-* $(VENVGPU) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp per environment: it is made again when what it depends on has changed.
$(VENV)/.installed: constraints.txt $(BOTH)
	@$(PYTHON) tools/environments.py test

$(VENVT)/.installed: constraints.txt $(BOTH)
	@$(PYTHON) tools/environments.py triton $(TRITON)

$(VENV)/triton-3.6.0/.installed: | $(VENV)/.installed
	@$(PYTHON) tools/environments.py oldest-triton

$(VENVGPU)/.installed: $(BOTH)
	@$(PYTHON) tools/environments.py gpu

$(VENVE)/.installed: tests/engines/requirements.txt tests/engines/constraints.txt $(BOTH)
	@$(PYTHON) tools/environments.py engines
