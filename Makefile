# Words: setup, check, test, demo, docs. All can be repeated and do no work twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup check test test-all demo demo-distill demo-full docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Stillroom needs Python 3.11 or newer; set PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and alone, so that nothing else decides which build of it is installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_layers.py

test: setup
	$(BIN)/python -m pytest -q

test-all: setup
	$(BIN)/python -m pytest -q -m 'not gpu and not network'

demo: setup
	$(BIN)/stillroom demo knob --resume

demo-distill: setup
	$(BIN)/stillroom demo --output_dir runs/demo --resume

demo-full: setup
	$(BIN)/stillroom knob recipes/knob_chars.yaml --resume

docs: setup
	$(BIN)/python -m tools.claims table
	$(BIN)/python -m tools.docs

clean:
	rm -rf runs build dist .pytest_cache .ruff_cache
