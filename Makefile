# Two commands do everything: `make demo` and `make test`. Each makes .venv first if it is not there.

VENV := .venv
OLDEST := .venv-oldest-jax
OLDEST_JAX := 0.11.2
# The first interpreter that runs (pyenv's shims may not), is new enough and can make environments.
SUITABLE := import sys, venv, ensurepip; assert sys.version_info >= (3, 12)
CANDIDATES := $(PYTHON) python3.12 python3.13 python3.14 python3 python
FIND_PYTHON = for python in $(CANDIDATES); do \
	"$$python" -c "$(SUITABLE)" >/dev/null 2>&1 && break; python=; done; \
	test -n "$$python" || { echo "fkv needs Python 3.12 or newer with venv, and none of" \
	"$(CANDIDATES) is one (install it, or run: make PYTHON=/path/to/python3.12 demo)" >&2; exit 1; }
PIP := -m pip install -q --disable-pip-version-check

.PHONY: help demo test lint types test-oldest-jax constraints clean

help:
	@echo "make demo              run the main job on all routes and print a table"
	@echo "make test              run the test suite"
	@echo "make lint types        ruff, pyright"
	@echo "make test-oldest-jax   the jax part of the suite on jax $(OLDEST_JAX)"
	@echo "make constraints       write constraints.txt anew from a fresh environment"
	@echo "make clean             remove the environments"

demo: $(VENV)/.installed
	$(VENV)/bin/python -m fkv demo

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -n auto

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

types: $(VENV)/.installed
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

test-oldest-jax: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n auto --frameworks jax

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(FIND_PYTHON); echo "Making $(VENV) with $$("$$python" -V) (some GB, a few minutes)"; \
	"$$python" -m venv --clear $(VENV)
	$(VENV)/bin/python $(PIP) -c constraints.txt pip
	$(VENV)/bin/python $(PIP) -c constraints.txt -e '.[all]' --group dev
	@touch $@

$(OLDEST)/.installed: pyproject.toml constraints.txt
	@$(FIND_PYTHON); echo "Making $(OLDEST) with $$("$$python" -V)"; \
	"$$python" -m venv --clear $(OLDEST)
	grep -viE '^jax(lib)?==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python $(PIP) -c $(OLDEST)/constraints.txt pip
	$(OLDEST)/bin/python $(PIP) -c $(OLDEST)/constraints.txt \
		jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX) -e '.[pallas]' --group test
	@touch $@

constraints:
	@$(FIND_PYTHON); dir=$$(mktemp -d); "$$python" -m venv "$$dir"; \
	"$$dir/bin/python" $(PIP) -U pip; \
	"$$dir/bin/python" $(PIP) 'torch==2.14.1' 'jax==0.12.0.1' '.[all]' --group dev; \
	{ echo "# Versions that the suite was seen to pass with; written by make constraints."; \
	"$$dir/bin/python" -m pip freeze --all --exclude fkv; } > constraints.txt; rm -r "$$dir"

clean:
	rm -rf $(VENV) $(OLDEST)
