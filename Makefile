# Two commands for users: `make quickstart` and `make test`. Both work on a fresh clone.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: quickstart test check format clean

quickstart: $(VENV)/train.ok
	@$(VENV)/bin/steelyard train examples/quickstart.yaml

test: $(VENV)/dev.ok check
	@$(PY) -m pytest -q --durations=15 tests

check: $(VENV)/dev.ok
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check . || { echo "make: run 'make format'"; exit 1; }
	@$(PY) -m mypy --no-error-summary

format: $(VENV)/dev.ok
	@$(VENV)/bin/ruff check --quiet --fix .
	@$(VENV)/bin/ruff format --quiet .

$(VENV)/train.ok: pyproject.toml constraints.txt | $(VENV)/python.ok
	@echo "installing Steelyard into $(VENV) (once) ..."
	@$(PIP) -e '.[train,sandbox]'
	@touch $@

$(VENV)/dev.ok: pyproject.toml constraints.txt | $(VENV)/python.ok
	@echo "installing Steelyard and its test tools into $(VENV) (once) ..."
	@$(PIP) -e '.[train,sandbox,s3,agents,dev]'
	@touch $(VENV)/train.ok $@

$(VENV)/python.ok:
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer must be installed, found none on PATH"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: Python must be >= 3.11, got $$($(PYTHON) --version 2>&1); set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "make: $(PYTHON) must be able to make virtual environments (on Debian: apt install python3-venv)"; exit 1; }
	@touch $@

clean:
	@rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
