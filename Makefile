# make demo   the main job on this machine, whatever it has
# make test   all tests that need no GPU and little time
# Each does its own set-up in .venv, once. Variables: PYTHON, INDEX (another package index), TESTS, WORKERS.

PYTHON  ?= python3.11
INDEX   ?=
TESTS   ?= tests
WORKERS ?= 2

VENV    := .venv
# make test-triton TRITON=3.7.1: the Hopper kernels and the emulator under another Triton, in an environment of its own.
# vLLM 0.32 brings 3.7.1, SGLang 0.5.23 3.8.0; 3.6.0 is the oldest accepted.
TRITON  ?= 3.6.0
VENVT   := .venv-triton-$(TRITON)
EXTRAS  := dev,hf,plot,trace
# Neighbours stay together: a kernel that several tests launch is compiled and decoded in one worker.
PYTEST  := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu
INDEX_OPTION := $(if $(INDEX),--index-url $(INDEX))
# Paths that must also pass under other Tritons: the emulator, the Hopper kernels and those for both architectures.
TRITON_TESTS := $(wildcard tests/softsm tests/triton tests/museum tests/rules tests/dsv4/kernels/sm90 tests/dsv4/kernels/test_*.py)

.PHONY: demo test test-slow test-gpu test-triton fuzz lint bench setup clean

demo: setup
	$(VENV)/bin/python -m dsv4 demo

test: setup
	$(PYTEST) -m "not slow and not gpu" $(TESTS)

test-slow: setup
	$(PYTEST) -m "slow and not gpu" $(TESTS)

test-gpu: setup
	$(VENV)/bin/python -m pytest -m gpu $(TESTS)

test-triton: $(VENVT)/.installed
	$(PYTEST:$(VENV)/%=$(VENVT)/%) -m "not slow and not gpu" $(TRITON_TESTS)

# Mutated kernels under the checkers; make test runs 12 s of it. FUZZ: seconds and seed.
FUZZ ?= --seconds 300 --seed 0
fuzz: setup
	$(VENV)/bin/python tests/softsm/fuzz/mutants.py $(FUZZ) --record tests/softsm/fuzz/record.json

lint: setup
	$(VENV)/bin/ruff check src tests benchmarks tutorials
	$(VENV)/bin/mypy

bench: setup
	$(VENV)/bin/python benchmarks/cpu.py

setup: $(VENV)/.installed

clean:
	rm -rf $(VENV) .venv-triton-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp per step: a step runs again only when what it depends on has changed. Byte code is left to the first import:
# compiling all of torch and transformers takes longer than unpacking them.
$(VENV)/.torch $(VENVT)/.torch: %/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo "$(PYTHON) is not Python 3.11, for which constraints.txt is made; set PYTHON="; exit 1; }
	test -x $*/bin/python || $(PYTHON) -m venv $*
	@cp constraints.txt $*/constraints.txt
	@if [ "$*" = "$(VENVT)" ]; then sed -i 's/^triton==.*/triton==$(TRITON)/' $*/constraints.txt; fi
	@pip="$*/bin/python -m pip --disable-pip-version-check install -q --no-compile $(INDEX_OPTION)"; \
	 echo "installing torch for a CPU into $*"; \
	 if ! $$pip -c $*/constraints.txt 'torch==2.13.0+cpu' 2>$*/pip.log \
	   && ! $$pip --retries 1 --timeout 20 --extra-index-url $(CPU_TORCH_INDEX) \
	        -c $*/constraints.txt 'torch==2.13.0+cpu' 2>>$*/pip.log; then \
	   echo "torch==2.13.0+cpu cannot be had here (see $*/pip.log); taking torch 2.15, which also accepts triton 3.9"; \
	   sed -i 's/^torch==.*/torch==2.15.0/; /^setuptools==/d' $*/constraints.txt; \
	   $$pip -c $*/constraints.txt torch==2.15.0; \
	 fi
	@touch $@

$(VENV)/.installed $(VENVT)/.installed: %/.installed: %/.torch pyproject.toml
	@echo "installing dsv4, softsm and their tools into $*"
	@$*/bin/python -m pip --disable-pip-version-check install -q --no-compile $(INDEX_OPTION) -c $*/constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
