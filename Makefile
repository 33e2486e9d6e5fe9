# The same commands for a new user and for CI. Everything lands in .venv; nothing else is written.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# First interpreter that really starts (a pyenv shim may exist without a version behind it).
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && { echo $$p; break; }; done)

# torch_npu without CANN breaks `import torch` unless its autoload is off.
export TORCH_DEVICE_BACKEND_AUTOLOAD ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo test lint env clean

help:
	@echo "make demo   train configs/quickstart.yaml on the simulated node"
	@echo "make test   run the whole test suite"
	@echo "make lint   ruff and mypy"
	@echo "make env    print the environment report for a bug report"
	@echo "make clean  remove .venv, caches and build output"

venv: $(STAMP)

# torch comes first and exactly pinned: a range can resolve to builds that pull gigabytes.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.10 to 3.13 found; set PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP)
	$(BIN)/memferry train configs/quickstart.yaml

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

env: $(STAMP)
	$(BIN)/memferry env

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
