# make demo        train, measure, quantise and compare; writes runs/demo/report.html
# make demo-fast   the same shape of work in under two minutes; writes runs/demo-fast/report.html
# make test        build a virtual environment and run the tests
# make test-slow   the tests that take longer
# make bench       every benchmark with --quick
# make check       format, lint, types
#
# FRESH=1          start a demo anew instead of resuming it
# PYTHON=python3   the interpreter that .venv is made with (3.11 or newer)
# TORCH_INDEX=URL  a package index with the build of torch you want (README: "Which torch")

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo demo-fast test test-slow bench check clean

demo: $(VENV)/.installed
	@$(BIN)/skipless demo $(if $(FRESH),--fresh)

demo-fast: $(VENV)/.installed
	@$(BIN)/skipless demo --fast $(if $(FRESH),--fresh)

test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -m slow

bench: $(VENV)/.installed-bench
	@set -e; for script in benchmarks/[a-z]*.py; do $(BIN)/python $$script --quick; done

check: $(VENV)/.installed-dev
	@$(BIN)/ruff format --check src tests benchmarks
	@$(BIN)/ruff check src tests benchmarks
	@$(BIN)/pyright

# torch goes first and alone, so that its build is chosen by the constraint and by nothing else.
$(VENV)/.torch: constraints.txt
	@echo "making $(VENV) and installing torch (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.torch pyproject.toml
	@$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.installed

# ONNX Runtime is a peer in benchmarks only.
$(VENV)/.installed-bench: $(VENV)/.torch pyproject.toml
	@$(PIP) -e '.[test,onnx]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

clean:
	rm -rf $(VENV) build dist
