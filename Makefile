# make demo   the main job on this machine, whatever it has
# make test   all tests that need no GPU and little time
# make docs   the documentation site, into site/
# Each does its own set-up, once: in .venv, with torch for a CPU. Where there is a GPU, make demo and make test-gpu use
# .venv-gpu, on top of the torch that $(PYTHON) or python3 has, if that sees the GPU; else with the one of TORCH.
# Variables: PYTHON, INDEX (another package index), TORCH (what pip installs for a GPU), TESTS, WORKERS.

PYTHON  ?= python3.11
INDEX   ?=
TORCH   ?= torch==2.15.0
TESTS   ?= tests
WORKERS ?= 2

VENV    := .venv
# Byte code is written, whatever the caller's environment says: without it every process compiles torch from its
# sources, 3 seconds for each of the tests' many.
export PYTHONDONTWRITEBYTECODE :=
# make test-triton TRITON=3.7.1: the Hopper kernels and the emulator under another Triton, in an environment of its own.
# vLLM 0.32 brings 3.7.1, SGLang 0.5.23 3.8.0; 3.6.0 is the oldest accepted.
TRITON  ?= 3.6.0
VENVT   := .venv-triton-$(TRITON)
VENVGPU := .venv-gpu
GPU     := $(shell nvidia-smi -L 2>/dev/null)
HERE    := $(if $(GPU),$(VENVGPU),$(VENV))
# make test-engines: real vLLM and SGLang on this CPU (3.5 GB; on two cores 4 to 14 minutes to install, 30 or more to run).
VENVE   := .venv-engines
# Two distributions from one repository: softsm, and dsv4, which can do without it.
PROJECTS := -e './packages/softsm[trace]' -e '.[dev,docs,hf,plot]'
BOTH    := pyproject.toml packages/softsm/pyproject.toml
# Neighbours stay together: a kernel that several tests launch is compiled and decoded in one worker.
PARALLEL := -n $(WORKERS) --dist worksteal
# One file needs no workers, which take seconds to start.
ONE_FILE := $(and $(filter 1,$(words $(TESTS))),$(filter %.py,$(firstword $(subst ::, ,$(TESTS)))))
PYTEST  := $(VENV)/bin/python -m pytest $(if $(ONE_FILE),,$(PARALLEL))
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu
INDEX_OPTION := $(if $(INDEX),--index-url $(INDEX))
# Paths that must also pass under other Tritons: the emulator, the Hopper kernels and those for both architectures.
TRITON_TESTS := $(wildcard tests/softsm tests/triton tests/museum tests/rules tests/dsv4/kernels tests/dsv4/*/kernels/sm90 tests/dsv4/*/kernels/test_*.py)

.PHONY: demo test test-slow test-gpu test-triton test-engines docs fuzz lint bench setup clean known-tests

demo: $(HERE)/.installed
	$(HERE)/bin/python -m dsv4 demo

test: known-tests setup
	$(PYTEST) -m "not slow and not gpu" $(TESTS)

test-slow: known-tests setup
	$(PYTEST) -m "slow and not gpu" $(TESTS)

test-gpu: known-tests $(HERE)/.installed
	$(HERE)/bin/python -m pytest -m gpu $(TESTS)

known-tests:
	@for test in $(foreach test,$(TESTS),"$(firstword $(subst ::, ,$(test)))"); do \
	   test -e "$$test" || { echo "TESTS: there is no $$test"; exit 1; }; done

test-triton: $(VENVT)/.installed
	$(PYTEST:$(VENV)/%=$(VENVT)/%) -m "not slow and not gpu" $(TRITON_TESTS)

test-engines: $(VENVE)/.installed
	DSV4_ENGINES=1 $(VENVE)/bin/python -m pytest tests/engines

# The documentation, into site/; a broken link or a missing reference fails.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --strict --site-dir site

# Mutated kernels under the checkers; make test runs 60 of them. FUZZ: seconds and seed.
FUZZ ?= --seconds 300 --seed 0
fuzz: setup
	$(VENV)/bin/python tests/softsm/fuzz/mutants.py $(FUZZ) --record tests/softsm/fuzz/record.json

lint: setup
	$(VENV)/bin/ruff check src tests benchmarks tutorials docs
	$(VENV)/bin/ruff format --check src tests benchmarks tutorials docs
	$(VENV)/bin/mypy

bench: setup
	$(VENV)/bin/python benchmarks/cpu.py

setup: $(VENV)/.installed $(VENV)/triton-3.6.0/.installed

clean:
	rm -rf $(VENV) $(VENVE) .venv-triton-* $(VENVGPU) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp per step: a step runs again only when what it depends on has changed. Byte code is left to the first import:
# compiling all of torch and transformers takes longer than unpacking them.
$(VENV)/.torch $(VENVT)/.torch: %/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13, for which constraints.txt is made; set PYTHON="; exit 1; }
	test -x $*/bin/python || $(PYTHON) -m venv $*
	@cp constraints.txt $*/constraints.txt
	@if [ "$*" = "$(VENVT)" ]; then sed -i 's/^triton==.*/triton==$(TRITON)/' $*/constraints.txt; fi
	@pip="$*/bin/python -m pip --disable-pip-version-check install -q --no-compile $(INDEX_OPTION)"; \
	 echo "installing torch for a CPU into $*"; \
	 if ! $$pip -c $*/constraints.txt 'torch==2.13.0+cpu' 2>$*/pip.log \
	   && ! $$pip --retries 1 --timeout 20 --extra-index-url $(CPU_TORCH_INDEX) \
	        -c $*/constraints.txt 'torch==2.13.0+cpu' 2>>$*/pip.log; then \
	   echo "torch==2.13.0+cpu is not available here (see $*/pip.log); taking torch 2.15, which also accepts triton 3.9"; \
	   sed -i 's/^torch==.*/torch==2.15.0/; /^setuptools==/d' $*/constraints.txt; \
	   $$pip -c $*/constraints.txt torch==2.15.0; \
	 fi
	@touch $@

$(VENV)/.installed $(VENVT)/.installed: %/.installed: %/.torch $(BOTH)
	@echo "installing dsv4, softsm and their tools into $*"
	@$*/bin/python -m pip --disable-pip-version-check install -q --no-compile $(INDEX_OPTION) -c $*/constraints.txt $(PROJECTS)
	@touch $@

# The oldest Triton beside the environment's: its front end reads every Hopper kernel in make test.
$(VENV)/triton-3.6.0/.installed: | $(VENV)/.installed
	@echo "installing triton 3.6.0 into $(@D)"
	@$(VENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile --no-deps --upgrade --target $(@D) \
	   $(INDEX_OPTION) triton==3.6.0
	@touch $@

SEES_GPU := -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null
$(VENVGPU)/.installed: $(BOTH)
	@for python in "$(PYTHON)" python3; do \
	   if [ "$(origin TORCH)" = file ] && $$python $(SEES_GPU); then \
	     echo "installing dsv4, softsm and their tools into $(VENVGPU), on top of the torch of $$python"; \
	     $$python -m venv --clear --system-site-packages $(VENVGPU) && break; fi; done
	@test -x $(VENVGPU)/bin/python || { echo "installing $(TORCH) for a GPU into $(VENVGPU)"; $(PYTHON) -m venv $(VENVGPU) \
	   && $(VENVGPU)/bin/python -m pip --disable-pip-version-check install -q $(INDEX_OPTION) '$(TORCH)'; }
	@$(VENVGPU)/bin/python -m pip --disable-pip-version-check install -q $(INDEX_OPTION) $(PROJECTS)
	@$(VENVGPU)/bin/python $(SEES_GPU) || { rm -rf $(VENVGPU); echo "this machine has a GPU, but the torch that make" \
	   "found or installed does not see it; set PYTHON to a Python whose torch does, or TORCH to what pip shall install"; \
	   exit 1; }

# vLLM pins a numba on which softsm does not run, and asks for packages for images and sound that need another torch.
# torch comes first and alone: the index of its CPU builds is asked only where the usual one has none.
# The oldest and the newest transformers lie beside the one that vLLM needs.
$(VENVE)/.installed: tests/engines/requirements.txt tests/engines/constraints.txt $(BOTH)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo "$(PYTHON) is not Python 3.11, for which $< is made; set PYTHON="; exit 1; }
	test -x $(VENVE)/bin/python || $(PYTHON) -m venv $(VENVE)
	@set -e; pip="$(VENVE)/bin/python -m pip --disable-pip-version-check -q"; install="$$pip install --no-compile $(INDEX_OPTION)"; \
	 torch="$$(grep ^torch== $<)"; echo "installing $$torch, vLLM and SGLang into $(VENVE)"; \
	 $$install "$$torch" 2>$(VENVE)/pip.log \
	   || $$install --retries 1 --timeout 20 --extra-index-url $(CPU_TORCH_INDEX) "$$torch" 2>>$(VENVE)/pip.log \
	   || { echo "$$torch is not available here, see $(VENVE)/pip.log: the engines were not tested"; exit 1; }; \
	 $$install -r $< -c tests/engines/constraints.txt; $$pip uninstall -y torchvision torchaudio torchcodec; \
	 $$install --no-deps numba==0.68.1 llvmlite==0.50.0 sglang==0.5.23 -e ./packages/softsm -e .; \
	 beside="$$install --no-deps --upgrade --target $(VENVE)/transformers"; \
	 $$beside/5.17.0 transformers==5.17.0 huggingface_hub==1.33.0 kernels==0.16.2 kernels-data==0.16.2; $$beside/5.22.2 transformers==5.22.2
	@touch $@
