# Every target sets up what it needs in $(VENV), once. `make help` lists them.
#
#   PYTHON=python3.12       the interpreter that makes the virtual environment (3.11 or later)
#   VENV=DIR                where that environment lives
#   TORCH_INDEX=URL         take torch from this package index, e.g. a CPU build for a machine without a GPU
#   ARGS="..."              further arguments for chat, serve, test, test-long, bench, bench-http, bench-logprobs

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

PY := $(VENV)/bin/python
# Benchmarks import each other: their folder, not the checkout, is first on the path.
BENCH := env -u PYTHONSAFEPATH $(PY)
PIP := $(PY) -m pip install -q --disable-pip-version-check -c constraints.txt
DEV := $(VENV)/.slotline-dev
DOCS := $(VENV)/.slotline-docs
EVAL := $(VENV)/.slotline-eval
CLIENTS := $(VENV)/clients

# Keeps the checkout's own folders (kernels/ above all) from being imported as top-level packages.
export PYTHONSAFEPATH = 1

.DEFAULT_GOAL := help
.PHONY: help setup chat serve test test-clients test-long check lint types layout format bench bench-http bench-logprobs docs link clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

setup: $(DEV) ## create the virtual environment and install slotline with its development tools

# Setup talks on stderr only and leaves stdin alone, so that `printf ... | make chat` works on a fresh clone.
$(DEV): pyproject.toml setup.py constraints.txt
	@echo "setting up $(VENV); the first time downloads PyTorch" >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "slotline needs Python 3.11 or later: make PYTHON=...")' </dev/null >&2
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) </dev/null >&2
	@test -z "$(TORCH_INDEX)" || $(PIP) --index-url "$(TORCH_INDEX)" torch </dev/null >&2
	@$(PIP) -e '.[dev]' </dev/null >&2
	@touch $@

$(DOCS): $(DEV)
	@$(PIP) -e '.[docs]' </dev/null >&2
	@touch $@

$(EVAL): $(DEV)
	@$(PIP) -e '.[eval]' </dev/null >&2
	@touch $@

# At odds with a pin of constraints.txt, and 290 MB: not in the environment of everything else.
$(CLIENTS)/.installed: $(DEV)
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS) </dev/null >&2
	@$(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check 'litellm>=1.108' </dev/null >&2
	@touch $@

chat: setup ## talk to a small model in the terminal, or answer what is piped in
	@$(VENV)/bin/slotline chat $(ARGS)

serve: setup ## serve the OpenAI routes
	@$(VENV)/bin/slotline serve $(ARGS)

test: setup ## run the tests, without those that need a GPU or take minutes
	@$(PY) -m pytest -q -m "not gpu and not long" $(ARGS)

test-clients: setup $(CLIENTS)/.installed ## run the smoke test of LiteLLM, in an environment of its own
	@SLOTLINE_LITELLM_PYTHON=$(CLIENTS)/bin/python $(PY) -m pytest -q tests/cases/test_clients.py -k litellm $(ARGS)

test-long: setup $(EVAL) ## run the long tests, lm-evaluation-harness among them
	@$(PY) -m pytest -q -m long --hypothesis-profile=long $(ARGS)

check: lint types layout ## lint, types, layout tests

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

# mypy passes when it finds nothing to check, hence the count.
types: setup link
	@found=$$($(PY) -m mypy) || { echo "$$found"; exit 1; }; echo "$$found"; \
	seen=$$(echo "$$found" | sed -n 's/.* in \([0-9]*\) source file.*/\1/p'); \
	want=$$(find core plugins kernels apis -name '*.py' | wc -l); \
	[ "$$seen" -ge "$$want" ] || { echo "mypy checked $$seen files, there are $$want"; exit 1; }

layout: setup
	@$(PY) -m pytest -q tests/test_layout.py

format: setup ## let ruff fix and format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: setup ## measure the microkernel alone, then the CPU engine beside transformers (and llama.cpp, by an option)
	@$(BENCH) benchmarks/bench_microkernel.py
	@$(BENCH) benchmarks/bench_cpu.py $(ARGS)

bench-http: setup ## measure the HTTP server with the echo backend
	@$(BENCH) benchmarks/bench_http.py $(ARGS)

bench-logprobs: setup ## measure what logprobs cost, on a GPU where there is one
	@$(BENCH) benchmarks/bench_logprobs.py $(ARGS)

docs: $(DOCS) link ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

link: ## lay .link/slotline, through which type checkers and editors see the package
	@mkdir -p .link/slotline && cd .link/slotline && find -L . -type l -exec rm -f {} + && \
	ln -sfn ../../core/* ../../plugins ../../kernels ../../apis .

clean: ## remove what the other targets made
	@rm -rf .link build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
